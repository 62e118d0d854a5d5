"""`make chaos`: what is missed in one part does not keep the next from being played."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PARTS = [
    "tests.replica.chaos",
    *["tests.collectives.chaos"] * 2,
    *["tests.collectives.chaos_links"] * 2,
    "tests.cluster.chaos",
]
# In the place of Python: notes down which part it is asked for, and ends as that is to end.
STUB = """#!/bin/sh
echo "$2" >> "{played}"
case "$2" in
    tests.replica.chaos) exit {first} ;;
    tests.cluster.chaos) exit {last} ;;
esac
"""


@pytest.mark.parametrize(("first", "last", "worst"), [(0, 0, 0), (1, 0, 1), (0, 3, 3), (2, 1, 2)])
def test_all_parts_are_played_and_the_worst_exit_is_told(tmp_path, first, last, worst):
    played, stub = tmp_path / "played", tmp_path / "python"
    stub.write_text(STUB.format(played=played, first=first, last=last))
    stub.chmod(0o755)
    done = subprocess.run(
        ["sh", str(ROOT / "scripts/chaos.sh")],
        env={**os.environ, "CHAOS_PYTHON": str(stub)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert played.read_text().split() == PARTS
    assert done.returncode == worst
    failed = [code for code in (first, last) if code]
    assert done.stderr.count("exit code") == len(failed), done.stderr


def test_make_plays_them():
    for given, link in (((), "hub"), (("AMQP=1",), "amqp")):
        said = subprocess.run(
            ["make", "-n", "chaos", *given], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert f"sh scripts/chaos.sh {link}\n" in said.stdout
