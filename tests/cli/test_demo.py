"""`manyhands demo` runs to its end and finds nothing wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


def demo(tmp_path, *options):
    command = [sys.executable, "-m", "manyhands", "demo", *options]
    environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}  # torch makes it for DDP
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environ)


@pytest.mark.parametrize("place", ["hub", "broker"])
def test_the_demo(place, broker, tmp_path):
    where = [] if place == "hub" else ["--amqp", broker.url()]
    done = demo(tmp_path, "--peers", "3", "--json", *where)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["peers"] == 3
    assert summary["accuracy"] > 0.95
    assert summary["off"] < 1e-3  # away from what one process learns of the same batches


def test_a_place_that_is_not_there(tmp_path):
    done = demo(tmp_path, "--amqp", "amqp://guest:guest@127.0.0.1:1/")
    assert done.returncode == 1
    assert "cannot be reached" in done.stderr
    assert "hint:" in done.stderr
    assert "Traceback" not in done.stderr
    assert "guest:guest" not in done.stderr
