"""The coordinator: the book behind a lock, with a clock, a store, and a thread for what is due.

    submit, cancel, hello, status ──► queue ─┐ whoever has the lock works off the whole queue:
                                             ├─► book ─► one transaction ─► all are answered
    ticker: watch, decide, adopt ────────────┘

Every change is on disk before anybody is answered or hears of it: while the lock is free, the book
says nothing that is not stored. Many who come at once share one transaction. If it cannot be
stored, the book is as it was; each is then tried alone, so that one that does not fit fails alone.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Generic, Self, TypeVar, cast

from manyhands.cluster import schedule
from manyhands.cluster.book import Book, Decide
from manyhands.cluster.errors import (
    ClusterError,
    CoordinatorClosed,
    NoSuchJob,
    StillThere,
    StoreBusy,
    StoreError,
    StoreFull,
    StoreRefused,
)
from manyhands.cluster.hosts import Node
from manyhands.cluster.job import Job, Spec, State, Step
from manyhands.cluster.jobs import Changes
from manyhands.cluster.keeper import clock_s
from manyhands.cluster.messages import Hello, Status, Wants, Welcome
from manyhands.cluster.store import Store
from manyhands.cluster.task import Hub, no_hub
from manyhands.core.errors import UsageError

T = TypeVar("T")
log = logging.getLogger(__name__)
NO_CHANGES = Changes()
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_BORNE = (StoreFull, StoreBusy)
RETRY_S = 1.0
"""After a tick that could not be stored."""
LEAVE_S = 15.0
"""Agents have this long to go, beyond the grace of what they run and their lease."""
_VERSIONS = 1_000_000_000  # of wants in one generation; JSON keeps integers up to 2**53

Heard = Callable[[Collection[int | str] | None], None]


def steady_clock(store: Store) -> Callable[[], float]:
    """Seconds of the epoch that never jump: neither leases nor limits must end because somebody set
    the time, also not between two coordinators in the life of one machine.
    """
    boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
    offset_s = store.offset_s(boot, time.time() - clock_s(), clock_s())
    return lambda: offset_s + clock_s()


def nothing_more(spec: Spec) -> None:
    """No check of a submission beyond those of the book."""


class Coordinator:
    """See the module. Thread-safe; a context manager, which runs the ticker. The store stays the
    caller's, who closes it afterwards.

    `hub` gives the join code and the name of the run for an attempt. `check` may refuse a
    submission by raising a UsageError. `margin_s` is what an agent has, when its lease is over, to
    be rid of its processes: their slots are given to others after `lease_s + margin_s` of silence.
    `terms`: an agent of `up` with others is told to leave, and its jobs begin again. `asked`: the
    hosts that `up` starts agents on, which count for submissions before they have come; if these
    are none, jobs wait for the first host.
    """

    def __init__(
        self,
        store: Store,
        *,
        lease_s: float = 15.0,
        margin_s: float | None = None,
        hub: Hub = no_hub,
        check: Callable[[Spec], None] = nothing_more,
        decide: Decide = schedule.decide,
        terms: Mapping[str, str] | None = None,
        asked: Mapping[str, int | None] | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._store = store
        self._lease_s = lease_s
        self._margin_s = max(0.5, lease_s / 3) if margin_s is None else margin_s
        self._check = check
        self._decide = decide
        self._clock = clock or steady_clock(store)
        self._queue: deque[_Request[object]] = deque()
        self._lock = threading.Lock()
        self._due = threading.Condition(self._lock)
        self._news = threading.Condition(self._lock)
        self._listeners: dict[object, Heard] = {}
        self._failure: BaseException | None = None
        self._is_closing = False
        self._rest_until_s = 0.0
        self._poisoned: set[int] = set()
        self._borne: type[StoreError] | None = None
        jobs, hosts, next_id = store.load()
        self._book = Book(
            decide,
            now_s=self._clock(),
            lease_s=lease_s,
            margin_s=self._margin_s,
            jobs=jobs,
            hosts=hosts,
            next_id=next_id,
            version=store.generation * _VERSIONS,
            hub=hub,
            terms=terms,
            asked=asked,
        )
        self._book.refresh()
        self._ticker = threading.Thread(target=self._run, name="coordinator's ticker")

    def __enter__(self) -> Self:
        self._ticker.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the ticker and every wait. Jobs go on. Idempotent."""
        with self._lock:
            self._is_closing = True
            self._due.notify_all()
            self._news.notify_all()
            self._ring(None)
        if self._ticker.ident is not None:
            self._ticker.join()

    @property
    def failure(self) -> BaseException | None:
        """Why it can do nothing any more: it was fenced, or met a bug of ours."""
        return self._failure

    # -- users -----------------------------------------------------------------------------------

    def submit(self, spec: Spec, key: str = "") -> tuple[Job, bool]:
        """The job and whether it is new: a known key gives the job that has it.

        Raises BadJob, Unplaceable, KeyTaken, StoreFull.
        """
        self._check(spec)

        def change(now_s: float) -> tuple[Job, bool]:
            known = self._store.by_key(key) if key else None
            return self._book.submit(spec, key, now_s, known=known)

        return self._do(change)

    def cancel(self, id: int) -> Job:
        """Have it end, if it has not. Returns at once. Raises NoSuchJob, StoreFull."""

        def change(now_s: float) -> Job:
            return self._stored(id) if self._book.job(id) is None else self._book.cancel(id, now_s)

        return self._do(change)

    def job(self, id: int) -> Job:
        """Raises NoSuchJob."""
        with self._lock:
            job = self._book.job(id)
        # What is not in the book is over, or never was: neither changes.
        return job or self._stored(id)

    def jobs(self, *, states: Collection[State] = (), limit: int | None = None) -> Sequence[Job]:
        """The newest first; with `states`, those in one of them."""
        found = self._store.jobs(states, limit)
        with self._lock:
            live = [self._book.job(job.id) for job in found]
        # The book knows why a job waits; where it is further, what was found stands.
        return [
            now if now is not None and now.seq == then.seq else then
            for then, now in zip(found, live, strict=True)
        ]

    def history(self, id: int) -> Sequence[Step]:
        """Everything that happened to it. Raises NoSuchJob."""
        steps = self._store.history(id)
        if not steps:
            raise NoSuchJob(id)
        return steps

    def wait(self, id: int, timeout_s: float) -> Job:
        """Blocks until the job is over, or the time is; returns it as it is then."""
        end_s = time.monotonic() + timeout_s
        with self._lock:
            while (job := self._book.job(id)) is not None:
                rest_s = end_s - time.monotonic()
                if rest_s <= 0:
                    return job
                self._check_open()
                self._news.wait(rest_s)
        return self._stored(id)

    def nodes(self) -> Sequence[Node]:
        """All hosts, by name."""
        with self._lock:
            return self._book.nodes()

    def shut_down(self, limit_s: float | None = None) -> None:
        """Ask all to leave, and wait until every job has ended and every agent has been told.

        Jobs that ran are queued again. Raises StillThere when the limit is over; without one, that
        is the longest grace of a job, and a lease.
        """
        self._do(self._book.leave)
        with self._lock:
            if limit_s is None:
                grace_s = max((job.spec.grace_s for job in self._book.placed), default=0.0)
                limit_s = grace_s + self._lease_s + self._margin_s + LEAVE_S
            end_s = time.monotonic() + limit_s
            while any(lingering := self._book.lingering()):
                self._check_open()
                rest_s = end_s - time.monotonic()
                if rest_s <= 0:
                    raise StillThere(limit_s, *lingering)
                self._news.wait(rest_s)

    def forget_hosts(self) -> None:
        """All agents have gone: those that come next, in this life or another, are its hosts."""
        self._do(lambda now_s: self._book.forget_hosts())

    def listen(self, heard: Heard) -> Callable[[], None]:
        """Calls `heard` after every change, when it is on disk, with the numbers of the jobs and
        the names of the hosts that there is something new for; None: look at everything.

        Called under the lock: it must return at once, and call nothing here. What is returned ends
        it.
        """
        token = object()
        with self._lock:
            self._listeners[token] = heard

        def stop() -> None:
            with self._lock:
                self._listeners.pop(token, None)

        return stop

    # -- agents ----------------------------------------------------------------------------------

    def hello(self, hello: Hello) -> Welcome:
        """Raises BadReport, HostTaken."""
        self._do(lambda now_s: self._book.hello(hello, now_s))
        return Welcome(lease_s=self._lease_s, cluster=self._store.cluster)

    def status(self, host: str, status: Status) -> None:
        """Raises BadReport, NotAHost."""
        self._do(lambda now_s: self._book.status(host, status, now_s))

    def wants(
        self, host: str, agent: str, seen: int, timeout_s: float, *, again: bool = False
    ) -> Wants:
        """Blocks until there is something other than `seen`, or the time is over. `again`: the
        agent asked before, and its answer is held back; nobody knows whether it is still there.

        Raises NotAHost, Fenced.
        """
        end_s = time.monotonic() + timeout_s
        with self._lock:
            self._check_open()
            self._write(NO_CHANGES)
            if not again:
                self._book.host(host, agent, self._clock())
                if self._book.is_stale:
                    self._due.notify_all()
            while True:
                wants = self._book.wants(host, agent)
                rest_s = end_s - time.monotonic()
                if wants.version != seen or rest_s <= 0:
                    break
                self._news.wait(rest_s)
                self._check_open()
            wants = self._book.tell(host, seen)
            if wants.leave:
                self._news.notify_all()  # who waits for all to leave
                self._due.notify_all()
            return wants

    def check_sender(self, host: str, agent: str) -> None:
        """Raises NotAHost unless this agent holds the host. It is no word of the agent's."""
        with self._lock:
            self._book.wants(host, agent)

    def lost(self, host: str, agent: str) -> None:
        """The line on which this agent waited has ended: another may come for its host."""
        with self._lock:
            self._book.broke(host, agent)
            self._news.notify_all()  # who waits for all to leave
            if self._book.is_stale:
                self._due.notify_all()

    # -- changes ---------------------------------------------------------------------------------

    def _do(self, change: Callable[[float], T]) -> T:
        """The change, stored. Raises what it raises, or StoreError, and nothing has changed."""
        request = _Request(change)
        self._queue.append(cast("_Request[object]", request))
        with self._lock:
            if not request.is_done:
                batch = [self._queue.popleft() for _ in range(len(self._queue))]
                self._work(batch)
        return request.result()

    def _work(self, batch: Sequence[_Request[object]]) -> None:
        try:
            self._check_open()
            self._commit(batch)
        except BaseException as error:  # noqa: BLE001 - raised where it was asked for
            rest = [request for request in batch if not request.is_done]
            if not rest:
                self._fail(error)  # what is stored cannot be taken back
            # Alone each may fit; but each would wait as long for a file that is locked.
            alone = not isinstance(error, StoreBusy) and self._failure is None
            if len(rest) > 1 and alone and not self._is_closing:
                for request in rest:
                    self._work([request])
            else:
                for request in rest:
                    request.fail(error)

    def _commit(self, batch: Sequence[_Request[object]]) -> None:
        book, now_s = self._book, self._clock()
        try:
            for request in batch:
                request.run(now_s)
            changes = book.drain()
            self._write(changes)
        except BaseException:
            book.undo()
            raise
        book.keep()
        for request in batch:
            request.is_done = True  # whatever happens now: it is stored
        topics: set[int | str] = {job.id for job in changes.jobs}
        topics.update(book.refresh())
        if topics:
            self._news.notify_all()
            self._ring(topics)
        if book.is_stale:
            self._due.notify_all()

    def _ring(self, topics: Collection[int | str] | None) -> None:
        for heard in self._listeners.values():
            heard(topics)

    def _stored(self, id: int) -> Job:
        job = self._store.job(id)
        if job is None:
            raise NoSuchJob(id)
        return job

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._is_closing:
            raise CoordinatorClosed("the coordinator has been closed")

    def _write(self, changes: Changes) -> None:
        """Also where nothing changed: who is answered counts on a lease, which only the one whose
        store it is can give.
        """
        try:
            if changes:
                self._store.write(changes)
            else:
                self._store.check()
        except (*_BORNE, StoreRefused):
            raise
        except StoreError as error:
            # Fenced, or a disk that fails: after that not even a success means anything.
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """Nothing it says from here on could be relied on."""
        if self._failure is None:
            self._failure = error
            log.error("the coordinator cannot go on: %s", error)
        self._due.notify_all()
        self._news.notify_all()
        for heard in self._listeners.values():
            with contextlib.suppress(Exception):  # one that raised may be why
                heard(None)

    # -- the ticker ------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._wait_until_due():
            began_s = self._clock()
            try:
                self._tick(began_s)
                # A schedule of ten thousand jobs takes a while: users get as much time as it does.
                rest_s = min(1.0, self._clock() - began_s)
                self._borne = None
            except CoordinatorClosed:
                return
            except _BORNE as error:
                # Nothing has changed; the next tick finds it all again.
                if type(error) is not self._borne:
                    log.warning("jobs neither start nor end until this is mended: %s", error)
                self._borne, rest_s = type(error), RETRY_S
            except StoreError as error:
                with self._lock:
                    self._fail(error)  # who owns this coordinator is told
                return
            except BaseException as error:
                with self._lock:
                    self._fail(error)
                raise
            self._rest_until_s = self._clock() + rest_s

    def _tick(self, now_s: float) -> None:
        self._do(self._book.watch)
        with self._lock:
            self._news.notify_all()  # who waits for all to leave: one may have fallen silent
            for id in self._book.poisoned.keys() - self._poisoned:
                error = self._book.poisoned[id]
                log.error("job %d cannot go on, a bug of ours: %s", id, error, exc_info=error)
            self._poisoned = set(self._book.poisoned)
            question = self._book.ask(now_s)
        # Outside of the lock: nobody has to wait for it, and `adopt` looks at what still holds.
        decisions = self._decide(now_s, *question)

        def change(now_s: float) -> Collection[int | str]:
            before = self._book.waits
            self._book.adopt(decisions, now_s)
            return {id for id, why in self._book.waits.items() if before.get(id) != why}

        wait_otherwise = self._do(change)
        with self._lock:
            if wait_otherwise:
                self._ring(wait_otherwise)

    def _wait_until_due(self) -> bool:
        """Whether there is something to do; False: it is over."""
        with self._lock:
            while not self._is_closing and self._failure is None:
                now_s = self._clock()
                due_s = 0.0 if self._book.is_stale else self._book.next_due_s()
                if due_s is None:
                    self._due.wait()
                elif (at_s := max(due_s, self._rest_until_s)) > now_s:
                    self._due.wait(at_s - now_s)
                else:
                    return True
            return False


class _Request(Generic[T]):
    """A change that somebody waits for."""

    def __init__(self, change: Callable[[float], T]) -> None:
        self._change = change
        self._error: BaseException | None = None
        self._values: list[T] = []
        self.is_done = False

    def run(self, now_s: float) -> None:
        """Make the change. What it refuses is its answer; anything else fails the batch."""
        self._error, self._values = None, []
        try:
            self._values.append(self._change(now_s))
        except (UsageError, ClusterError) as error:
            if isinstance(error, StoreError):
                raise
            self._error = error

    def fail(self, error: BaseException) -> None:
        self._error, self.is_done = error, True

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._values[0]
