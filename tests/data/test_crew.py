"""Threads and processes that read ahead: whatever goes wrong with them, nobody waits for ever."""

from __future__ import annotations

import multiprocessing
import multiprocessing.context
import threading

import pytest
import torch

from manyhands.data import Loader, crew, parcel
from manyhands.data.child import Child, WorkerDied, WorkerError, _packed
from manyhands.data.crew import Crew
from manyhands.data.fetch import Request, Rows, Spots
from manyhands.data.parcel import receive
from manyhands.data.source import Source
from tests.data import samples
from tests.data.test_loader import order

BATCH, SEED = 7, 5


class Hand:
    """Reads positions; fails where it is told to."""

    depth = 1

    def __init__(self, fails: str = "") -> None:
        self.fails, self.asked = fails, []
        self.closed = 0

    def _do(self, what):
        if self.fails == what:
            raise OSError(24, f"no more files to {what}")

    def begin(self):
        self._do("begin")

    def ask(self, marks):
        self._do("ask")
        self.asked.append(marks)

    def answer(self):
        marks = self.asked.pop(0)
        return Rows(marks.positions, len(marks.positions))

    def end(self):
        pass

    def close(self):
        self.closed += 1
        self._do("close")


def crew_of(*hands):
    source = Source(dataset=samples.Numbers(), batch=BATCH, collate=list)
    after = lambda request: Request(request.epoch, (request.positions[0] + 1,))  # noqa: E731
    return Crew(hands, Spots(source, SEED), after, ahead=2)


def request(position):
    return Request(0, (position,))


@pytest.mark.parametrize("what", ["begin", "ask"])
def test_a_hand_that_fails_says_so_in_place_of_every_batch(what):
    hand = Hand(what)
    made = crew_of(hand)
    for position in (0, 1, 20):
        with pytest.raises(OSError, match=f"no more files to {what}"):
            made.read(request(position))
    made.close()
    assert hand.closed == 1
    hand.fails = ""  # there are files again
    assert made.read(request(3)).batch == (3,)
    made.close()


@pytest.mark.parametrize("begun", [0, 1])
def test_threads_that_the_system_does_not_give(monkeypatch, begun):
    """Neither this read nor the next waits for one that never began; those that did are ended."""
    made, before = crew_of(Hand(), Hand()), set(threading.enumerate())
    start, calls = threading.Thread.start, []

    def failing(self):
        calls.append(self)
        if len(calls) > begun:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", failing)
    for _ in range(2):
        calls.clear()
        with pytest.raises(RuntimeError, match="can't start new thread"):
            made.read(request(0))
        assert set(threading.enumerate()) == before
    monkeypatch.undo()
    assert made.read(request(0)).batch == (0,)
    made.close()


class Clock:
    """A time that only passes while somebody waits for a thread."""

    def __init__(self) -> None:
        self.now_s, self.waits = 100.0, []

    def monotonic(self):
        return self.now_s


class Slow:
    """A thread that is at its sample."""

    name = "reader 0"

    def __init__(self, clock) -> None:
        self.clock = clock

    def join(self, timeout):
        self.clock.waits.append(timeout)
        self.clock.now_s += timeout

    def is_alive(self):
        return True


def test_all_hands_together_have_one_time_to_end(monkeypatch, caplog):
    clock = Clock()
    monkeypatch.setattr(crew, "time", clock)
    crew._join([Slow(clock) for _ in range(3)])
    assert clock.waits == [crew._END_S, 0, 0]
    assert len([r for r in caplog.records if "it is left" in r.getMessage()]) == 3


# -- processes ------------------------------------------------------------------------------------


def wide(**options):
    """A batch of it does not go by the pipe."""
    options = {"seed": SEED, "workers": 1, "kind": "process", **options}
    return Loader(samples.Wide(), BATCH, **options)


def test_a_batch_that_cannot_be_taken_is_an_error_and_shifts_no_other(monkeypatch):
    """As when this process has no descriptor left for its memory."""
    mapped, calls = parcel._mapped, []

    def failing(line, size):
        calls.append(size)
        if len(calls) == 2:
            raise RuntimeError("received 0 items of ancdata")
        return mapped(line, size)

    monkeypatch.setattr(parcel, "_mapped", failing)
    with wide() as loader:
        batches = iter(loader)
        assert next(batches)[0].tolist() == order(0)[:BATCH]
        with pytest.raises(WorkerDied, match="could not be taken, and was ended: RuntimeError"):
            next(batches)
        loader.load_state_dict(loader.state_dict())
        left = list(loader)
    assert [n for numbers, _ in left for n in numbers.tolist()] == order(0)[BATCH:]
    for numbers, images in left:
        assert torch.equal(images[:, 0, 0, 0], numbers.float())
    assert not multiprocessing.active_children()


def test_a_process_for_which_there_is_no_pipe_is_an_error(monkeypatch):
    """And not a thread that is gone, for whose batch the loop waits."""

    def failing(*_, **__):
        raise OSError(24, "Too many open files")

    loader = wide()
    with monkeypatch.context() as patch:
        patch.setattr(multiprocessing.context.BaseContext, "Pipe", failing)
        with pytest.raises(WorkerDied, match=r"cannot be started: .*Too many open files") as caught:
            next(iter(loader))
        assert "ulimit -n" in caught.value.hint
    loader.close()


def test_what_a_process_has_no_memory_for_is_told(monkeypatch):
    """The answer that goes by the line is the error, whole: its worker goes on."""

    def failing(*_):
        raise OSError(24, "Too many open files")

    rows = Rows(torch.rand(100_000), 1)
    with monkeypatch.context() as patch:
        patch.setattr("os.memfd_create", failing)
        packed = _packed(rows)
    mine, theirs = multiprocessing.Pipe()
    with mine, theirs:
        packed.send(theirs)
        packed.close()
        told = receive(mine)
    assert isinstance(told, WorkerError)
    assert "OSError in a worker process: [Errno 24] Too many open files" in str(told)
    assert any("ulimit -n" in note for note in told.__notes__)


def test_a_child_ends_without_a_descriptor_to_spare(monkeypatch):
    def failing(*_):
        raise OSError(24, "Too many open files")

    class Process:
        exitcode = 0

        def join(self, timeout=None):
            pass

        def close(self):
            pass

    mine, theirs = multiprocessing.Pipe()
    child = Child(None, 0, 1)
    child._line, child._process = mine, Process()
    with theirs, monkeypatch.context() as patch:
        patch.setattr("os.dup", failing)
        child.end()
        with pytest.raises(EOFError):
            theirs.recv()
        assert not mine.closed  # the crew's thread may be reading from it
        child.close()
    assert mine.closed
