#!/bin/sh
# Makes .venv from the lock and installs this package into it, editable. About a minute, 1.6 GB.
set -eu
cd "$(dirname "$0")/.."
if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "error: Python 3.11 or newer is needed, this is $(python3 -V)" >&2
    exit 1
fi
# A venv without pip is what is left when python3-venv was missing.
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    rm -rf .venv
    if ! python3 -m venv .venv; then
        rm -rf .venv
        echo "error: python3 cannot make a virtual environment; type: sudo apt-get install python3-venv" >&2
        exit 1
    fi
fi
.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.lock
# The build tools are in the lock: nothing is downloaded a second time for the build.
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
touch .venv/.ready
