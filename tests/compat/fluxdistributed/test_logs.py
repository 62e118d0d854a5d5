"""Where metrics go: the console, `with_logger`, a logger of one's own, wandb."""

import inspect
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from torch.nn import functional as F

from manyhands.compat.fluxdistributed import (
    WandbLogger,
    log_loss_and_acc,
    prepare_training,
    train,
    with_logger,
)
from manyhands.core.errors import UsageError
from manyhands.observe import JsonLines, MissingExtra
from tests.compat.fluxdistributed.models import SGD, data, mlp


def run(num_devices=2, **how):
    setup, buffer = prepare_training(mlp(), data(), ["cpu"] * num_devices, SGD, 4, cycles=4)
    return train(F.cross_entropy, setup, buffer, **{"log_every": 2, **how})


class Notes:
    """A logger with Lightning's names."""

    def __init__(self):
        self.rows, self.params, self.ends = [], [], []

    def log_metrics(self, metrics, step):
        self.rows.append((step, metrics["train/loss"]))

    def log_hyperparams(self, params):
        self.params.append(params)

    def finalize(self, status):
        self.ends.append(status)


def test_a_trace_is_printed_by_default(capsys):
    result = run()
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in said] == [
        ["step", "2", "train/loss"],
        ["step", "4", "train/loss"],
    ]
    assert float(said[0].split()[3]) == pytest.approx(result.history[0]["train/loss"], rel=1e-3)


def test_with_logger_is_for_all_trainings_in_the_block_and_ends_with_it(capsys):
    notes = Notes()
    with with_logger(notes) as same:
        assert same is notes
        first = run()
        assert notes.ends == []
        run()
    assert notes.ends == ["success"]
    assert [step for step, _ in notes.rows] == [2, 4, 6, 8]  # they go on
    assert notes.rows[1] == (4, first.history[1]["train/loss"])
    assert notes.params[0]["batchsize"] == 4
    assert notes.params[0]["devices"] == "cpu, cpu"
    assert capsys.readouterr().out == ""
    run()
    assert len(notes.rows) == 4
    assert "step 4" in capsys.readouterr().out


def test_an_error_in_the_block_is_told_to_the_logger():
    notes = Notes()
    with pytest.raises(ZeroDivisionError), with_logger(notes):
        raise ZeroDivisionError
    assert notes.ends == ["failed"]


@pytest.mark.parametrize("keeps", ["file", "function"])
def test_nothing_that_is_logged_in_a_block_takes_the_place_of_anything_else(keeps, tmp_path):
    """A file writes over a step that comes again, and what `adapt` has made drops it."""
    rows, path = [], tmp_path / "rows.jsonl"
    logger = JsonLines(path) if keeps == "file" else lambda row, step: rows.append((step, row))
    model, batch = mlp(), data(12)[:]
    with with_logger(logger):
        log_loss_and_acc(F.cross_entropy, model, batch, "before")
        first = run()
        log_loss_and_acc(F.cross_entropy, model, batch, "between")
        second = run()
        log_loss_and_acc(F.cross_entropy, model, batch, "after", step=3)
    if keeps == "file":
        lines = map(json.loads, path.read_text().splitlines())
        rows = [(row.pop("step"), row) for row in lines]
    assert [step for step, _ in rows] == [0, 2, 4, 5, 7, 9, 10]
    losses = [row["train/loss"] for _, row in rows if "train/loss" in row]
    history = first.history + second.history
    assert losses == [row["train/loss"] for row in history]
    assert [step for step, row in rows if "train/loss" not in row] == [0, 5, 10]


def test_a_training_that_is_resumed_in_a_block_keeps_its_steps(tmp_path):
    notes = Notes()
    with with_logger(notes):
        run(save=tmp_path)
        setup, buffer = prepare_training(mlp(), data(), ["cpu"], SGD, 8, cycles=8)
        train(F.cross_entropy, setup, buffer, resume=tmp_path, log_every=2)
    assert [step for step, _ in notes.rows] == [2, 4, 6, 8]


@pytest.mark.parametrize(("code", "end"), [(None, "success"), (0, "success"), (3, "failed")])
def test_an_exit_is_an_error_if_it_says_so(code, end):
    """Workers of `start` do not come back from it: they exit."""
    notes = Notes()
    with pytest.raises(SystemExit), with_logger(notes):
        sys.exit(code)
    assert notes.ends == [end]


def test_the_end_of_a_logger_is_not_the_users_to_bear(caplog):
    class Torn(Notes):
        def finalize(self, status):
            self.thread = threading.current_thread()
            raise OSError("no network")

    torn = Torn()
    with with_logger(torn):
        run()
    assert torn.thread is not threading.current_thread()
    assert sum("no network" in record.message for record in caplog.records) == 1


def test_blocks_may_be_nested_and_other_threads_have_their_own(capsys):
    outer, inner = Notes(), Notes()
    with with_logger(outer):
        with with_logger(inner):
            run()
        other = threading.Thread(target=run)
        other.start()
        other.join()
    assert len(inner.rows) == 2
    assert outer.rows == []
    assert "step 4" in capsys.readouterr().out  # the thread's, which has no logger


def test_an_argument_goes_before_the_block(tmp_path):
    notes = Notes()
    with with_logger(notes):
        run(logger=JsonLines(tmp_path / "rows.jsonl"))
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 4]
    assert notes.rows == []


def test_a_logger_that_raises_does_not_end_a_training(caplog):
    def torn(row, step):
        raise OSError("no network")

    assert run(logger=torn).steps == 4
    assert sum("no network" in record.message for record in caplog.records) == 1


def test_what_is_no_logger_is_refused():
    with pytest.raises(UsageError, match="is no logger"), with_logger(object()):
        raise AssertionError


def test_wandb_gets_the_rows_by_step_and_the_config(tmp_path):
    (tmp_path / "tmp").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "tests.compat.fluxdistributed.wandb_program", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
        env=os.environ
        | {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
        | {"HOME": str(tmp_path), "TMPDIR": str(tmp_path / "tmp")},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert [row["step"] for row in found["rows"]] == [20, 40]
    losses = [row["train/loss"] for row in found["history"]]
    assert [row["train/loss"] for row in found["rows"]] == losses
    assert found["config"]["cycles"] == 100
    assert found["config"]["saveweights"] is False
    assert found["config"]["batchsize"] == 4
    assert found["called"] == ["DDP", "Resnet-34"]
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert file.stat().st_size > 0


def test_wandb_that_is_missing_is_said_at_once(monkeypatch):
    monkeypatch.setattr("manyhands.observe.base.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'manyhands\[wandb\]'"):
        WandbLogger(project="DDP")


def test_steps_go_up():
    assert inspect.signature(WandbLogger).parameters["step_increment"].default == 1
    with pytest.raises(UsageError, match="step_increment=0"):
        WandbLogger(project="DDP", step_increment=0)
