"""Where metrics go: the console, `with_logger`, a logger of one's own, wandb."""

import json
import threading

import pytest
from torch.nn import functional as F

from manyhands.compat.fluxdistributed import WandbLogger, prepare_training, train, with_logger
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
    assert [step for step, _ in notes.rows] == [2, 4, 2, 4]
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


def test_wandb_gets_the_rows_by_step_and_the_config(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    made = []
    real = wandb.init

    class Run:
        """A run whose rows are looked at; all else is wandb's."""

        def __init__(self, run):
            self._run = run
            made.append(self)
            self.rows = []

        def __getattr__(self, name):
            return getattr(self._run, name)

        def log(self, row, **how):
            self.rows.append(row)
            return self._run.log(row, **how)

    monkeypatch.setattr(wandb, "init", lambda **how: Run(real(**how)))
    lg = WandbLogger(
        project="DDP",
        name="Resnet-34",
        config={"saveweights": False, "cycles": 100},
        step_increment=10,
        dir=tmp_path,
    )
    with with_logger(lg):
        result = run()
    (one,) = made
    assert [row["step"] for row in one.rows] == [20, 40]
    assert one.rows[1]["train/loss"] == result.history[1]["train/loss"]
    assert one.config["cycles"] == 100
    assert one.config["saveweights"] is False
    assert one.project == "DDP"
    assert one.name == "Resnet-34"
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_wandb_that_is_missing_is_said_at_once(monkeypatch):
    monkeypatch.setattr("manyhands.compat.fluxdistributed.logs.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'manyhands\[wandb\]'"):
        WandbLogger(project="DDP")


def test_steps_go_up():
    pytest.importorskip("wandb")
    with pytest.raises(UsageError, match="step_increment=0"):
        WandbLogger(project="DDP", step_increment=0)
