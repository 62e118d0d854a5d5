"""`manyhands demo` runs to its end and finds nothing wrong."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


def demo(*options):
    command = [sys.executable, "-m", "manyhands", "demo", "--seconds", "0.3", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("place", ["hub", "broker"])
def test_the_demo(place, broker):
    where = [] if place == "hub" else ["--amqp", broker.url()]
    done = demo("--peers", "3", "--json", *where)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["wrong"] == 0
    assert summary["received"] > 0
    # By its closed connection, not by its lease of ten seconds.
    assert summary["killed_noticed_s"] < 8


def test_a_place_that_is_not_there():
    done = demo("--amqp", "amqp://guest:guest@127.0.0.1:1/")
    assert done.returncode == 1
    assert "cannot be reached" in done.stderr
    assert "hint:" in done.stderr
    assert "Traceback" not in done.stderr
    assert "guest:guest" not in done.stderr
