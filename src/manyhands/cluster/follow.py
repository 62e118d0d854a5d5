"""Following a job: what one rank writes, attempt after attempt, until the job is over.

A coordinator that is started again goes on where it was, and so does this.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

from manyhands.cluster.client import Cluster
from manyhands.cluster.code import PREFIX
from manyhands.cluster.desk import NO_SUCH_ATTEMPT
from manyhands.cluster.dial import CoordinatorRefused, CoordinatorUnreachable
from manyhands.cluster.job import Job

PATIENCE_S = 60.0
"""For a coordinator that was there, to be there again."""
_LOOK_S = 0.5
T = TypeVar("T")


class Follower:
    """Gives the log of one rank of one job to `write`, as it grows; `say` gets lines for people."""

    def __init__(
        self,
        cluster: Cluster,
        job: int,
        *,
        rank: int,
        write: Callable[[bytes], None],
        say: Callable[[str], None],
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._cluster, self._job, self._rank = cluster, job, rank
        self._write, self._say, self._patience_s = write, say, patience_s

    def run(self, *, first: int | None = None, last: int | None = None) -> Job:
        """Blocks until the job is over, or the attempt `last` is; what it is then.

        Begins with the attempt `first`, or with the present one.
        """
        job = self._ask(lambda: self._cluster.job(self._job))
        attempt = job.attempt if first is None else first
        while True:
            try:
                self._follow(attempt)
            except CoordinatorRefused as error:
                # It was to begin again, and was ended before it did; unless the user named this.
                if attempt == first or error.code != NO_SUCH_ATTEMPT:
                    raise
            job = self._ask(lambda: self._cluster.job(self._job))
            if attempt == last or (job.is_over and job.attempt <= attempt):
                return job
            if job.attempt > attempt or not job.is_over:
                self._say(f"job {job.id}: attempt {attempt} has ended, the next one follows")
            attempt += 1

    def _follow(self, attempt: int) -> None:
        seen = 0

        def rest() -> None:
            nonlocal seen
            for piece in self._pieces(attempt, seen):
                self._write(piece)
                seen += len(piece)

        self._ask(rest)

    def _pieces(self, attempt: int, offset: int) -> Iterator[bytes]:
        return self._cluster.logs(
            self._job, rank=self._rank, follow=True, attempt=attempt, offset=offset
        )

    def _ask(self, question: Callable[[], T]) -> T:
        """Ask again when a coordinator that had gone away is back."""
        while True:
            try:
                return question()
            except CoordinatorUnreachable as error:
                self._say("the coordinator does not answer; the job is not touched by that")
                self._await_coordinator(error)

    def _await_coordinator(self, error: CoordinatorUnreachable) -> None:
        deadline_s = time.monotonic() + self._patience_s
        while True:
            time.sleep(_LOOK_S)  # nobody is there who could say when
            try:
                self._cluster.info()
            except CoordinatorUnreachable:
                if time.monotonic() > deadline_s:
                    raise error from None
            else:
                return


def same_cluster(coordinator: str | None, state: Path | None) -> str:
    """What a command that is told to the user needs, to speak to this cluster too: ' --state S',
    or nothing. A code is a secret, and is not told again.
    """
    if coordinator:
        where = "CODE" if coordinator.strip().startswith(PREFIX) else shlex.quote(coordinator)
        return f" --coordinator {where}"
    return "" if state is None else f" --state {shlex.quote(str(state))}"


def goes_on(id: int, more: str) -> str:
    """For who stops following a job: it lives, and what to type. `more`: of `same_cluster`."""
    return (
        f"\njob {id} goes on; its output: manyhands logs{more} {id} -f\n"
        f"to end it: manyhands cancel{more} {id}"
    )


def to(stream: BinaryIO) -> Callable[[bytes], None]:
    """Writes and flushes: who follows a log wants to see it now."""

    def write(piece: bytes) -> None:
        stream.write(piece)
        stream.flush()

    return write
