# On a fresh Debian with git, make and python3-venv, each target does its own set-up.
.PHONY: setup demo test check bench bench-scale chaos fuzz

setup: .venv/.ready

.venv/.ready: requirements-dev.lock pyproject.toml scripts/setup.sh
	sh scripts/setup.sh

demo: setup
	$(if $(AMQP),sh scripts/packages.sh rabbitmq-server && .venv/bin/python scripts/demo_amqp.py,.venv/bin/manyhands demo)

test: setup
	sh scripts/packages.sh rabbitmq-server openssh-server && sh scripts/test.sh

check: setup
	sh scripts/check.sh

bench: setup
	.venv/bin/python benchmarks/links.py --json benchmarks/results/links.json
	.venv/bin/python benchmarks/allreduce.py --json benchmarks/results/allreduce.json
	.venv/bin/python benchmarks/ddp.py --json benchmarks/results/ddp.json
	.venv/bin/python benchmarks/train.py --json benchmarks/results/train.json
	.venv/bin/python benchmarks/stages.py --json benchmarks/results/stages.json
	.venv/bin/python benchmarks/order.py --json benchmarks/results/order.json
	.venv/bin/python benchmarks/data.py --json benchmarks/results/data.json
	.venv/bin/python benchmarks/cluster.py $(if $(RAY),--ray $(RAY)) --json benchmarks/results/cluster.json

bench-scale: setup
	.venv/bin/python benchmarks/scale.py --rounds 5 --json benchmarks/results/scale.json

chaos: setup
	sh scripts/packages.sh rabbitmq-server
	sh scripts/chaos.sh $(if $(AMQP),amqp,hub)

fuzz: setup
	.venv/bin/python -m tests.wire.fuzz --inputs 1000000 && .venv/bin/python -m tests.links.fuzz --inputs 1000000
	.venv/bin/python -m tests.cluster.fuzz --examples 500
