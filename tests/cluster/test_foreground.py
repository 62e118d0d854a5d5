"""A cluster in the foreground: signals at any time, and who is left in which order."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest

from manyhands.cluster.errors import StoreFull
from manyhands.cluster.foreground import Signals, serve, tell
from manyhands.cluster.up import Ready, Up, UpSettings
from manyhands.core.errors import ManyhandsError
from tests.cluster.running import WAIT_S


class FakeUp:
    """Notes what is done with it; `stop` is what ends it."""

    def __init__(self, troubles=()):
        self.done = []
        self.is_stopping = False
        self._troubles = troubles
        self._stopped = threading.Event()

    def __enter__(self):
        self.done.append("open")
        return self

    def __exit__(self, *error):
        self.done.append("closed")

    def until_ready(self):
        return Ready(nodes=(), missing=())

    def until_stopped(self):
        assert self._stopped.wait(WAIT_S)

    def stop(self, reason):
        self.done.append(reason)
        self.is_stopping = True
        self._stopped.set()

    def hurry(self):
        self.done.append("hurry")

    def end(self):
        self.done.append("ended")
        return list(self._troubles)


@contextlib.contextmanager
def noting(up):
    up.done.append("beside")
    yield
    up.done.append("no more")


def test_what_is_beside_is_left_when_agents_have_gone_and_before_all_is_closed():
    up, said = FakeUp(["one had to be killed"]), []
    serve(up, lambda up, ready: os.kill(os.getpid(), signal.SIGTERM), said.append, beside=noting)
    assert up.done == ["open", "beside", "SIGTERM", "ended", "no more", "closed"]
    assert said[-1] == "warning: one had to be killed"
    assert "SIGTERM: going down" in said[0]


@pytest.mark.parametrize("is_heard", [True, False])  # False: stderr is a closed terminal
def test_a_part_that_fails_in_a_thread_ends_it(monkeypatch, is_heard):
    seen = []

    def hook(what):
        seen.append(what.exc_type)
        if not is_heard:
            raise OSError("no terminal")

    monkeypatch.setattr(threading, "excepthook", hook)

    def fail(up, ready):
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()

    before, up = threading.excepthook, FakeUp()
    with pytest.raises(ManyhandsError, match="ZeroDivisionError"):
        serve(up, fail, print)
    assert up.done[-2:] == ["ended", "closed"]
    assert threading.excepthook is before
    assert seen == [ZeroDivisionError]


class Failing(FakeUp):
    """Its coordinator fails before any agent has come."""

    def until_ready(self):
        return None

    def until_stopped(self):
        raise StoreFull("jobs.db")


def test_a_coordinator_that_fails_before_it_is_ready_is_an_error():
    up = Failing()
    with pytest.raises(StoreFull):
        serve(up, lambda up, ready: None, print)
    assert up.done == ["open", "ended", "closed"]


def test_to_hurry_before_it_is_open(tmp_path):
    up = Up(UpSettings(state=tmp_path, logdir=tmp_path), say=print)
    up.stop("Ctrl-C")
    up.hurry()
    assert up.is_stopping


class Silent:
    """A crew whose agent lives and is not heard."""

    troubles = ()

    def pid(self, host):
        return 4711


def test_who_is_not_heard_is_named_by_his_process(tmp_path):
    """It may be one of an earlier `up`, which dials another address."""
    up = Up(UpSettings(state=tmp_path, logdir=tmp_path), say=print)
    up.crew = Silent()
    (trouble,) = up._missing(["h"], 60.0)
    assert "no word from its agent (process 4711 here) within 60 s" in str(trouble)
    assert "an earlier `up`" in trouble.remedy


class Gone:
    """A crew and a coordinator that all have left, on a disk without room."""

    def __getattr__(self, name):
        return lambda **given: []

    def forget_hosts(self):
        raise StoreFull("jobs.db")


def test_a_full_disk_at_the_end_is_told_of(tmp_path):
    up = Up(UpSettings(state=tmp_path, logdir=tmp_path), say=print)
    up.crew = up.coordinator = Gone()
    (trouble,) = up.end()
    assert "no room for jobs.db" in trouble
    up.__exit__(None, None, None)


def test_signals_are_met_and_the_handlers_before_are_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Signals() as signals:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
            assert signals.next() is number
        signals.done()
        assert signals.next() is None
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_line_that_nobody_reads_is_no_error():
    reader, writer = os.pipe()
    with open(writer, "w") as stream:
        tell(stream, "hello")
        assert os.read(reader, 100) == b"hello\n"
        os.close(reader)
        for _ in range(2):
            tell(stream, "is anybody there?")
    tell(None, "`>&-`")


def test_a_line_for_which_there_is_no_room_is_lost_and_not_all_that_come(tmp_path):
    path: Path = tmp_path / "up.log"
    with path.open("w") as stream:
        full = Mock(wraps=stream, flush=Mock(side_effect=OSError(errno.ENOSPC, "full")))
        tell(full, "hello")
        tell(stream, "there is room again")
    assert path.read_text().endswith("there is room again\n")


WAITING = """
import signal
from manyhands.cluster.errors import StoreFull
from manyhands.cluster.foreground import Signals
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with Signals() as signals:
    print(flush=True)
    for _ in range(200):
        print(signals.next().name, flush=True)
"""


def test_no_signal_is_lost_however_near_it_is_to_the_wait():
    with subprocess.Popen(
        [sys.executable, "-c", WAITING], stdout=subprocess.PIPE, text=True
    ) as process:
        process.stdout.readline()
        for number in (signal.SIGINT, signal.SIGTERM) * 100:
            process.send_signal(signal.SIGHUP)  # which it was told to ignore
            process.send_signal(number)
            assert process.stdout.readline() == f"{number.name}\n"
        assert process.wait(WAIT_S) == 0
