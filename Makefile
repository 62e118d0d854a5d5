# On a fresh Debian with git, make and python3-venv, each target does its own set-up.
.PHONY: setup demo test check bench fuzz

setup: .venv/.ready

.venv/.ready: requirements-dev.lock pyproject.toml scripts/setup.sh
	sh scripts/setup.sh

demo: setup
	.venv/bin/manyhands demo

test: setup
	sh scripts/rabbitmq.sh && .venv/bin/python -m pytest

check: setup
	sh scripts/check.sh

bench: setup
	.venv/bin/python benchmarks/links.py --json benchmarks/results/links.json

fuzz: setup
	.venv/bin/python -m tests.wire.fuzz --inputs 1000000 && .venv/bin/python -m tests.links.fuzz --inputs 1000000
