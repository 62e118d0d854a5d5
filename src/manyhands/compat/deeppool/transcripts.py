"""Transcripts: cpprt<slot>.out, what the ranks in one slot have written, job after job.

    LOGDIR/job-7/attempt-0/rank-2.log ─┐
    LOGDIR/job-9/attempt-0/rank-0.log ─┴─►  LOGDIR/cpprt2.out

Slots are counted over all hosts, in the order of the hostfile. A slot has one job at a time, and
its file takes them in that order; after each comes one line that says that it is gone, and how many
jobs of the cluster are not over. The logs that these are copies of stay where they are.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from manyhands.cluster.errors import ClusterError
from manyhands.cluster.job import PLACED, TERMINAL, Job, State
from manyhands.cluster.logs import LogError, LogName

_FILE = re.compile(r"cpprt\d+\.out")
_CHUNK_BYTES = 1 << 20
_ENDS: Mapping[State, str] = {
    State.SUCCEEDED: "completed",
    State.FAILED: "failed",
    State.TIMEOUT: "timed out",
    State.CANCELLED: "cancelled",
}
_LIVE = frozenset(State) - TERMINAL

Slots = Sequence[tuple[str, int]]
"""(host, index of a slot there)."""


class Jobs(Protocol):
    """What is needed of a coordinator."""

    def job(self, id: int) -> Job: ...

    def jobs(
        self, *, states: Collection[State] = (), limit: int | None = None
    ) -> Sequence[Job]: ...

    def listen(
        self, heard: Callable[[Collection[int | str] | None], None]
    ) -> Callable[[], None]: ...


class Logs(Protocol):
    """What is needed of the logs on its disk."""

    def read(self, name: LogName, offset: int, limit: int) -> bytes: ...

    def listen(self, heard: Callable[[LogName], None]) -> Callable[[], None]: ...


@dataclass(slots=True)
class _Tape:
    """One rank's log, on its way into a slot's file."""

    name: LogName
    offset: int = 0
    is_whole_line: bool = True
    """Whether what was copied ends with a line's end."""


class Transcripts:
    """Keeps the files up to date while it is entered. Those of an earlier time are removed.

    `slots` gives all that the cluster has, in their order; asked by a thread of this object.
    `say` gets one line if the files cannot be written: they are left alone from then on, and the
    cluster goes on.
    """

    def __init__(
        self,
        jobs: Jobs,
        logs: Logs,
        folder: Path,
        slots: Callable[[], Slots],
        say: Callable[[str], None],
        *,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._source, self._logs, self._folder = jobs, logs, folder
        self._slots, self._say, self._clock_ns = slots, say, clock_ns
        self._numbers: dict[tuple[str, int], int] = {}
        self._live: dict[int, Job] = {}
        self._begun: dict[int, int] = {}
        """Job -> the last of its attempts that has tapes."""
        self._ended: dict[tuple[int, int], str] = {}
        """(job, attempt) whose log is whole -> how it ended, while a tape is left of it."""
        self._tapes: dict[int, deque[_Tape]] = {}
        self._news = threading.Condition()
        self._stirred: set[int] = set()
        self._all = self._grown = self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="transcripts")
        self._stops: list[Callable[[], None]] = []

    def __enter__(self) -> Self:
        for path in self._folder.iterdir():
            if _FILE.fullmatch(path.name):
                path.unlink()
        self._stops = [self._source.listen(self._on_change), self._logs.listen(self._on_growth)]
        self._live = {job.id: job for job in self._source.jobs(states=_LIVE)}
        self._stirred.update(self._live)
        self._count_slots()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for stop in self._stops:
            stop()
        with self._news:
            self._is_closing = True
            self._news.notify_all()
        self._thread.join()

    def place(self, number: int) -> Path:
        """The file of a slot."""
        return self._folder / f"cpprt{number}.out"

    # -- what happens ---------------------------------------------------------------------------

    def _on_change(self, topics: Collection[int | str] | None) -> None:
        """Under the coordinator's lock."""
        with self._news:
            if topics is None:
                self._all = True
            else:
                self._stirred.update(topic for topic in topics if isinstance(topic, int))
            self._news.notify_all()

    def _on_growth(self, name: LogName) -> None:
        with self._news:
            self._grown = True
            self._news.notify_all()

    def _run(self) -> None:
        try:
            while True:
                with self._news:
                    self._news.wait_for(
                        lambda: self._stirred or self._all or self._grown or self._is_closing
                    )
                    is_last, stirred = self._is_closing, self._stirred
                    if self._all:
                        stirred |= set(self._live)
                    self._stirred, self._all, self._grown = set(), False, False
                self._look(stirred)
                if is_last:
                    return
        except (OSError, LogError) as error:
            self._say(f"cpprt files are not written any more: {error}")
        except ClusterError:
            return  # the store is closed: nothing happens any more

    def _look(self, ids: Collection[int]) -> None:
        """These jobs may have changed, and any log may have grown."""
        for id in sorted(ids):
            try:
                job = self._source.job(id)
            except ClusterError:
                continue  # its submission was undone; or the store fails: what is written counts
            self._note(job)
        for number, tapes in self._tapes.items():
            while tapes:
                self._copy(number, tapes[0])
                if (end := self._ended.get(tapes[0].name[:2])) is None:
                    break
                self._close(number, tapes.popleft(), end)
        left = {tape.name[:2] for tapes in self._tapes.values() for tape in tapes}
        self._ended = {key: end for key, end in self._ended.items() if key in left}

    def _note(self, job: Job) -> None:
        # An attempt that comes and goes between two looks is not seen: its slots are not known any
        # more. Starting a process takes longer than a look, so that is one that never began.
        self._live[job.id] = job
        if job.is_over:
            del self._live[job.id]
        before = self._begun.get(job.id)
        if before is not None and before < job.attempt:
            self._ended[job.id, before] = "preempted"  # or its host was lost: it goes on
        if job.places and before != job.attempt:
            self._begin(job)
        if job.id in self._begun and job.state not in PLACED:
            self._ended[job.id, self._begun[job.id]] = _ENDS.get(job.state, "preempted")
        if job.is_over:
            self._begun.pop(job.id, None)

    def _begin(self, job: Job) -> None:
        self._begun[job.id] = job.attempt
        where = [(place.host, slot) for place in job.places for slot in place.slots]
        for rank, slot in enumerate(where):
            if slot not in self._numbers:
                self._count_slots()
            number = self._numbers.setdefault(slot, len(self._numbers))
            tapes = self._tapes.setdefault(number, deque())
            tapes.append(_Tape(LogName(job.id, job.attempt, rank)))

    def _count_slots(self) -> None:
        """Slots keep their numbers; those of hosts that have come since get the next ones."""
        for slot in self._slots():
            number = self._numbers.setdefault(slot, len(self._numbers))
            self.place(number).touch(mode=0o600)  # somebody may want to follow it

    # -- files ----------------------------------------------------------------------------------

    def _copy(self, number: int, tape: _Tape) -> None:
        with self.place(number).open("ab") as file:
            while data := self._logs.read(tape.name, tape.offset, _CHUNK_BYTES):
                file.write(data)
                tape.offset += len(data)
                tape.is_whole_line = data.endswith(b"\n")

    def _close(self, number: int, tape: _Tape, end: str) -> None:
        line = ending_line(self._clock_ns(), tape.name.job, end, remaining=len(self._live))
        with self.place(number).open("ab") as file:
            file.write(b"" if tape.is_whole_line else b"\n")
            file.write(line.encode())


def ending_line(now_ns: int, job: int, end: str, *, remaining: int) -> str:
    """What a slot's file says when a job is gone, in the form that DeepPool's users look for."""
    seconds, nanoseconds = divmod(now_ns, 10**9)
    return (
        f"{seconds}.{nanoseconds:09} job {job} in poll NOTICE[1]: Removed the {end} job. "
        f"Remaining: {remaining}\n"
    )
