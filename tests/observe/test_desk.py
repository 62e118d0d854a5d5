"""Loggers behind threads: nothing is lost in a normal end, and nobody waits for one that hangs."""

from __future__ import annotations

import logging
import threading

import pytest

from manyhands.core.errors import UsageError
from manyhands.observe import Desk

PATIENCE_S = 30.0


class Memory:
    def __init__(self):
        self.rows, self.params, self.ends = [], [], []

    def log_metrics(self, metrics, step):
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params):
        self.params.append((len(self.rows), dict(params)))

    def finalize(self, status):
        self.ends.append(status)


class Hanging(Memory):
    """Stays in its first row until it is let go."""

    def __init__(self):
        super().__init__()
        self.entered, self.go = threading.Event(), threading.Event()

    def log_metrics(self, metrics, step):
        self.entered.set()
        assert self.go.wait(PATIENCE_S)
        super().log_metrics(metrics, step)


class Broken(Memory):
    def log_metrics(self, metrics, step):
        super().log_metrics(metrics, step)
        raise OSError("no space left")


def join(name):
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def test_a_normal_end_loses_nothing():
    loggers = [Memory() for _ in range(3)]
    with Desk(loggers) as desk:
        desk.log_hyperparams({"lr": 0.1})
        for step in range(2000):
            desk.log_metrics({"loss": float(step)}, step)
    for logger in loggers:
        assert logger.params == [(0, {"lr": 0.1})]  # before the first row
        assert logger.rows == [(step, {"loss": float(step)}) for step in range(2000)]
        assert logger.ends == ["success"]
    assert [(count.failed, count.dropped) for count in desk.counts] == [(0, 0)] * 3
    assert desk.settled == 1999


def test_each_has_a_thread_of_its_own_and_none_before_there_is_a_row():
    threads = set()

    def look(metrics, step):
        threads.add(threading.current_thread())

    before = threading.active_count()
    desk = Desk([look, lambda metrics, step: look(metrics, step)])
    assert threading.active_count() == before
    desk.log_metrics({}, 0)
    desk.finalize("success")
    assert len(threads) == 2
    assert threading.current_thread() not in threads


def test_a_row_is_that_of_the_moment():
    memory, row = Memory(), {"loss": 1.0}
    with Desk([memory]) as desk:
        desk.log_metrics(row, 0)
        row["loss"] = 2.0
    assert memory.rows == [(0, {"loss": 1.0})]


def test_one_that_raises_is_warned_about_once_and_counted(caplog):
    broken, memory = Broken(), Memory()
    desk = Desk([broken, memory])
    for step in range(5):
        desk.log_metrics({}, step)
    desk.finalize("success")
    assert len(broken.rows) == len(memory.rows) == 5
    assert broken.ends == ["success"]
    warned = [r.getMessage() for r in caplog.records if "no space left" in r.getMessage()]
    assert len(warned) == 1
    assert "Broken" in warned[0]
    assert [(count.logger, count.failed, count.dropped) for count in desk.counts] == [
        ("Broken", 5, 0),
        ("Memory", 0, 0),
    ]
    assert "Broken: 5 calls failed, 0 rows were dropped" in caplog.messages
    assert desk.settled == 4


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_what_would_end_a_program_is_a_failure_like_others(kind, caplog):
    def quits(metrics, step):
        raise kind

    ends = []
    with Desk([quits, lambda metrics, step: ends.append(step)]) as desk:
        for step in range(5):
            desk.log_metrics({}, step)
    assert ends == [0, 1, 2, 3, 4]
    assert [(count.failed, count.dropped) for count in desk.counts] == [(5, 0), (0, 0)]


def test_a_logger_is_called_what_its_user_calls_it(caplog):
    def to_my_server(metrics, step):
        raise OSError("unreachable")

    class Board:
        def log(self, metrics, step):
            raise OSError("unreachable")

    with caplog.at_level(logging.WARNING), Desk([to_my_server, Board()]) as desk:
        desk.log_metrics({"train/loss": 0.5}, 0)
    assert [count.logger for count in desk.counts] == ["to_my_server", "Board"]
    for name in ("to_my_server", "Board"):
        assert any(f"{name} failed" in record.getMessage() for record in caplog.records)


def test_one_that_hangs_holds_nobody_up_and_its_queue_has_an_end():
    hanging, memory = Hanging(), Memory()
    desk = Desk([hanging, memory], most=10)
    desk.log_metrics({}, 0)
    assert hanging.entered.wait(PATIENCE_S)
    assert desk.settled == -1
    for step in range(1, 25):
        desk.log_metrics({}, step)  # it would not return
    assert desk.counts[0].dropped == 14
    hanging.go.set()
    desk.finalize("success")
    assert [step for step, _ in hanging.rows] == list(range(11))
    assert memory.rows[0][0] == 0
    assert len(memory.rows) + desk.counts[1].dropped == 25
    assert desk.settled == 24


@pytest.mark.parametrize("refused", [2, 100])
def test_a_system_without_a_thread_to_give_stops_no_training(refused, monkeypatch, caplog):
    start, asked = threading.Thread.start, []

    def starved(thread):
        asked.append(thread)
        if len(asked) <= refused:
            raise RuntimeError("can't start new thread")
        start(thread)

    memory = Memory()
    monkeypatch.setattr(threading.Thread, "start", starved)
    desk = Desk([memory], end_s=PATIENCE_S)
    for step in range(4):
        desk.log_metrics({}, step)
    desk.finalize("success")
    kept = 4 if refused < 4 else 0
    assert [step for step, _ in memory.rows] == list(range(kept))
    assert memory.ends == ["success"] * bool(kept)
    assert desk.counts[0].dropped == 4 - kept
    assert bool(kept) is not any("has not come to its end" in text for text in caplog.messages)


def test_the_end_waits_no_longer_than_it_says(caplog):
    hanging, memory = Hanging(), Memory()
    desk = Desk([hanging, memory], end_s=0.05)
    for step in range(3):
        desk.log_metrics({}, step)
    assert hanging.entered.wait(PATIENCE_S)
    desk.finalize("failed")  # it would not return
    assert any("end_s=0.05" in message for message in caplog.messages)
    assert desk.counts[0].dropped == 2
    hanging.go.set()
    join("Hanging")
    assert [step for step, _ in hanging.rows] == [0]
    assert hanging.ends == ["failed"]


def test_after_its_end():
    memory = Memory()
    desk = Desk([memory])
    desk.finalize("success")
    desk.finalize("success")
    desk.log_metrics({}, 0)
    assert memory.rows == []
    assert memory.ends == ["success"]
    assert desk.counts[0].dropped == 1


def test_what_went_wrong_is_said(caplog):
    memory = Memory()
    with pytest.raises(KeyError), Desk([memory]):
        raise KeyError
    assert memory.ends == ["failed"]


def test_one_that_keeps_no_hyperparameters(caplog):
    class Simple(Memory):
        def log_hyperparams(self, params):
            raise NotImplementedError

    caplog.set_level(logging.WARNING)
    with Desk([Simple()]) as desk:
        desk.log_hyperparams({})
    assert desk.counts[0].failed == 0
    assert caplog.messages == []


def test_without_loggers():
    with Desk([]) as desk:
        desk.log_metrics({}, 7)
        assert desk.settled == 7


def test_what_is_no_logger_is_told_at_once():
    with pytest.raises(UsageError, match="a int is no logger"):
        Desk([3])
