#!/bin/sh
# Everything that is checked without running the tests; the first failure ends it.
set -eu
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
ruff check
ruff format --check
basedpyright
lint-imports
codespell
python scripts/forbidden.py src
