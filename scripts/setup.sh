#!/bin/sh
# Makes .venv from the lock and installs this package into it, editable.
set -eu
cd "$(dirname "$0")/.."
if ! [ -x .venv/bin/python ] && ! python3 -m venv .venv; then
    echo "error: python3 cannot make a virtual environment; type: sudo apt-get install python3-venv" >&2
    exit 1
fi
.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.lock
# The build tools are in the lock: nothing is downloaded a second time for the build.
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
touch .venv/.ready
