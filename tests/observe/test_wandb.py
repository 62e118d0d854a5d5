"""wandb, offline: what its files have, read back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from manyhands.observe import MissingExtra, Wandb, adapt

ROOT = Path(__file__).parents[2]


def play(folder, *orders, status=0):
    quiet = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
    (folder / "tmp").mkdir(exist_ok=True)  # where a killed one leaves what it likes
    places = {"WANDB_DIR": str(folder), "HOME": str(folder), "TMPDIR": str(folder / "tmp")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.observe.wandb_program", str(folder), json.dumps(orders)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | quiet | places,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def read(folder):
    return json.loads(play(folder).splitlines()[-1])


def steps(run):
    return [row["step"] for row in run["rows"] if "step" in row]


def test_rows_hyperparameters_and_the_axis(tmp_path):
    play(
        tmp_path,
        {"id": "one", "steps": [0, 1, 2, 1, 2, 3]},
        {"id": "own", "steps": [0, 1, 1, 2], "own": True},
    )
    found = read(tmp_path)
    (one,), (own,) = found["one"], found["own"]
    assert steps(one) == [0, 1, 2, 3]  # none twice
    assert [row["train/loss"] for row in one["rows"]] == [0.5] * 4
    assert one["axes"]["train/loss"] == "step"
    assert one["config"] == {"mine": 1, "lr": 0.1, "betas": "(0.9, 0.99)"}
    # A run of the user's, whose own rows have no part in it and are not dropped.
    assert steps(own) == [0, 1, 2]
    assert [row["theirs"] for row in own["rows"] if "theirs" in row] == [1, 2]
    assert "theirs" not in own["axes"]


def test_resumed_it_sends_only_what_is_new(tmp_path):
    """Of a process that was killed wandb's file ends somewhere: from there on."""
    killed = {"id": "killed", "steps": list(range(2000)), "die": True}
    play(tmp_path, {"id": "ended", "steps": list(range(5))})
    play(tmp_path, killed, status=-signal.SIGKILL)
    play(
        tmp_path,
        {"id": "ended", "steps": list(range(3, 8)), "value": 0.25},
        {"id": "killed", "steps": list(range(2100)), "value": 0.25},
    )
    found = read(tmp_path)
    assert [steps(run) for run in found["ended"]] == [[0, 1, 2, 3, 4], [5, 6, 7]]
    first, second = found["killed"]
    assert steps(first) + steps(second) == list(range(2100))  # none twice, none missing
    assert {row["train/loss"] for row in second["rows"]} == {0.25}


def test_a_training_whose_steps_are_there_already_is_warned(caplog, tmp_path):
    class Run:
        """Of the server, which has rows."""

        id, summary = "run-7", {"step": 4}
        settings = SimpleNamespace(wandb_dir=str(tmp_path))

        def define_metric(self, *_, **__): ...

        def log(self, row): ...

    rows = adapt(Run())
    rows.log_metrics({"train/loss": 0.5}, 0)
    rows.log_metrics({"train/loss": 0.5}, 1)
    (record,) = caplog.records
    assert record.message.startswith("run run-7 of wandb has rows up to step 4")


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtra, match=r"pip install 'manyhands\[wandb\]'"):
        Wandb("project")
