"""Crew: threads that read batches ahead, and give them in the order in which they are asked for.

    read(request) ──▶ jobs, in order ──▶ todo ──▶ a hand's thread: reads, sets the job's result
         ▲                 │ the first of them, when it is done
         └─────────────────┘

A hand reads in its thread, or has a process that does. What comes after a request is guessed; a
wrong guess costs the reading, nothing else. At most `ahead` jobs are under way or wait to be taken.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from manyhands.data.fetch import Marks, Request, Rows, Spots

log = logging.getLogger(__name__)

_END_S = 30.0  # that `close` waits for all hands to finish the samples that they are at


class Hand(Protocol):
    """What reads. Used by one thread, but for `end`."""

    depth: int
    """Batches that it may be asked for at a time."""

    def begin(self) -> None:
        """Before the first batch. What it raises is raised in place of every batch."""
        ...

    def ask(self, marks: Marks) -> None:
        """For a batch."""
        ...

    def answer(self) -> Rows:
        """The first that was asked for and not answered. Raises what reading it raises."""
        ...

    def end(self) -> None:
        """No more is wanted: from any thread. A read under way may fail by it. Does not block."""
        ...

    def close(self) -> None:
        """After the last batch: let go of what `begin` has made, and wait for that."""
        ...


class _Job:
    """One batch to read."""

    def __init__(self, request: Request, marks: Marks) -> None:
        self.request, self.marks = request, marks
        self.dropped = False  # nobody wants it any more
        self.done = threading.Event()
        self.rows: Rows | None = None
        self.error: BaseException | None = None

    def run(self, hand: Hand, finish: Callable[[Rows], Rows]) -> None:
        """The hand was asked for it, and has answered whatever came before."""
        try:
            self.rows = finish(hand.answer())
        except BaseException as error:  # noqa: BLE001  (raised where the batch would have come)
            self.error = error
        self.done.set()

    def fail(self, error: BaseException) -> None:
        """Nobody can read it."""
        self.error = error
        self.done.set()

    def take(self) -> Rows:
        """Once it is done. Raises what reading has raised."""
        error, self.error = self.error, None  # its frames refer to this
        if error is not None:
            raise error
        assert self.rows is not None
        return self.rows


# A SimpleQueue may be put to in a finalizer, whatever the thread that runs it holds.
_Todo = queue.SimpleQueue["_Job | None"]


class Crew:
    """Used by one thread. `guess(request)` is what may be asked for after it.

    `finish` is done to a batch in the thread of the hand that has read it.
    """

    def __init__(
        self,
        hands: Sequence[Hand],
        spots: Spots,
        guess: Callable[[Request], Request],
        *,
        ahead: int,
        finish: Callable[[Rows], Rows] = lambda rows: rows,
    ) -> None:
        self._hands, self._spots, self._guess = list(hands), spots, guess
        self._ahead, self._finish = max(ahead, 1), finish
        self._jobs: deque[_Job] = deque()
        self._todo: _Todo = queue.SimpleQueue()
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._finalizer: weakref.finalize[..., Crew] | None = None

    def read(self, request: Request) -> Rows:
        """The batch. Raises what reading it has raised; what a wrong guess raises is nobody's
        business. Blocks until it is there.
        """
        if not self._threads:
            self._begin()
        while self._jobs and self._jobs[0].request != request:
            self._jobs.popleft().dropped = True
        if not self._jobs:
            self._issue(request)
        job = self._jobs[0]
        self._read_ahead()
        job.done.wait()
        self._jobs.popleft()
        self._read_ahead(job.request)
        return job.take()

    def glance(self) -> tuple[Request, Rows] | None:
        """What is guessed to be asked for next, if it has been read."""
        job = self._jobs[0] if self._jobs else None
        if job is None or not job.done.is_set() or job.rows is None:
            return None
        return job.request, job.rows

    def rest(self) -> None:
        """Nothing is wanted for a while: what was read ahead is let go."""
        while self._jobs:
            self._jobs.popleft().dropped = True

    def close(self) -> None:
        """End the threads, and wait for that. A later `read` begins anew. Idempotent."""
        self.rest()
        if self._finalizer is not None:
            self._finalizer.detach()
            self._finalizer = None
        threads, self._threads = self._threads, []
        self._end(threads)

    def _begin(self) -> None:
        """Raises RuntimeError if the system gives no more threads; then there are none."""
        self._todo, self._over = queue.SimpleQueue(), threading.Event()
        begun: list[threading.Thread] = []
        try:
            for number, hand in enumerate(self._hands):
                thread = threading.Thread(
                    target=_work,
                    args=(self._todo, self._over, hand, self._finish),
                    name=f"reader {number}",
                    daemon=True,  # of a loader that is not closed: the finalizer ends them at exit
                )
                thread.start()
                begun.append(thread)
        except BaseException:
            # With some of them missing, what was issued might wait for a thread that never comes.
            self._end(begun)
            raise
        self._threads = begun
        self._finalizer = weakref.finalize(self, _abandon, self._todo, self._over, begun)

    def _end(self, threads: Sequence[threading.Thread]) -> None:
        _stop(self._todo, self._over, threads)
        for hand in self._hands if threads else ():
            hand.end()
        _join(threads)

    def _issue(self, request: Request) -> None:
        job = _Job(request, self._spots.marks(request))
        self._jobs.append(job)
        self._todo.put(job)

    def _read_ahead(self, after: Request | None = None) -> None:
        last = self._jobs[-1].request if self._jobs else after
        while last is not None and len(self._jobs) < self._ahead:
            last = self._guess(last)
            self._issue(last)


def _work(todo: _Todo, over: threading.Event, hand: Hand, finish: Callable[[Rows], Rows]) -> None:
    asked: deque[_Job] = deque()
    try:
        hand.begin()
        _serve(todo, over, hand, finish, asked)
    except BaseException as error:  # noqa: BLE001  (raised where the batches would have come)
        # A thread that just ended would leave whoever waits for a batch waiting for ever.
        while asked:
            asked.popleft().fail(error)
        while (job := todo.get()) is not None:
            job.fail(error)
    finally:
        try:
            hand.close()
        finally:
            for left in asked:
                left.run(hand, finish)


def _serve(
    todo: _Todo,
    over: threading.Event,
    hand: Hand,
    finish: Callable[[Rows], Rows],
    asked: deque[_Job],
) -> None:
    """Until there is nothing to do any more. `asked` is what the hand was asked for."""
    job: _Job | None = None
    while True:
        if len(asked) < hand.depth:
            try:
                job = todo.get(block=not asked)
            except queue.Empty:
                pass  # of what is asked for the first is waited for, below
            else:
                if job is None:
                    return
                if not (job.dropped or over.is_set()):
                    asked.append(job)
                    hand.ask(job.marks)
                job = None  # the wait for the next one may be long
                continue
        asked.popleft().run(hand, finish)


def _stop(todo: _Todo, over: threading.Event, threads: Sequence[threading.Thread]) -> None:
    over.set()
    for _ in threads:
        todo.put(None)


def _abandon(todo: _Todo, over: threading.Event, threads: Sequence[threading.Thread]) -> None:
    """The crew is garbage, or the process ends: its threads end by themselves.

    They are waited for only at the exit: a collection may run in any thread, with any lock held.
    """
    _stop(todo, over, threads)
    if not threading.main_thread().is_alive():
        _join(threads)


def _join(threads: Sequence[threading.Thread]) -> None:
    """All of them, within one time."""
    deadline_s = time.monotonic() + _END_S
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
        if thread.is_alive():
            log.warning("%s is still at its sample after %g s: it is left", thread.name, _END_S)
