"""wandb, offline: what its files have, read back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.observe import MissingExtra, Wandb

ROOT = Path(__file__).parents[2]


def play(folder, *orders, status=0):
    quiet = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.observe.wandb_program", str(folder), json.dumps(orders)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | quiet | {"WANDB_DIR": str(folder), "HOME": str(folder)},
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1]) if status == 0 else None


def steps(run):
    return [row["step"] for row in run["rows"] if "step" in row]


def test_rows_hyperparameters_and_the_axis(tmp_path):
    found = play(
        tmp_path,
        {"id": "one", "steps": [0, 1, 2, 1, 2, 3]},
        {"id": "own", "steps": [0, 1, 1, 2], "own": True},
    )
    (one,), (own,) = found["one"], found["own"]
    assert steps(one) == [0, 1, 2, 3]  # none twice
    assert [row["train/loss"] for row in one["rows"]] == [0.5] * 4
    assert one["axes"]["*"] == "step"
    values = {name: said.get("value", said) for name, said in one["config"].items()}
    assert values == {"mine": 1, "lr": 0.1, "betas": "(0.9, 0.99)"}
    # A run of the user's, whose own rows have no part in it and are not dropped.
    assert steps(own) == [0, 1, 2]
    assert [row["theirs"] for row in own["rows"] if "theirs" in row] == [1, 2]


def test_resumed_after_a_kill_it_sends_only_what_is_new(tmp_path):
    play(tmp_path, {"id": "r", "steps": list(range(5)), "die": True}, status=-signal.SIGKILL)
    found = play(tmp_path, {"id": "r", "steps": list(range(3, 8)), "value": 0.25})
    sent = [step for run in found["r"] for step in steps(run)]
    assert sent == sorted(set(sent))  # never back
    assert steps(found["r"][-1]) == [5, 6, 7]


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtra, match=r"pip install 'manyhands\[wandb\]'"):
        Wandb("project").log_metrics({"a": 1.0}, 0)
