"""Uploads: the logs of ranks, from this host's disk to the coordinator, as they grow.

A rank writes its log itself, so that no death of ours loses a line or breaks its pipe. Nothing
here is then told of a write: the kernel would (inotify), but not for state folders on a network
disk, and once for every line of a rank that says much. So while ranks run, the sizes of their logs
are looked at a few times a second: some system calls each, and what a reader of `logs -f` sees is
late by no more than that. When no rank runs, nothing is looked at.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from manyhands.cluster.ledger import Key
from manyhands.cluster.line import Broken, Line, guarded
from manyhands.cluster.office import Office, OfficeRefused, OfficeUnreachable

CHUNK_BYTES = 1 << 20
LOOK_S = 0.2
_RETRY_S = 1.0  # when the office has no room for it
_JOIN_S = 0.2


@dataclass(frozen=True, slots=True)
class LogSettled:
    """The logs of an attempt have all been sent to their end, or refused."""

    key: Key


@dataclass(slots=True)
class _Upload:
    key: Key
    rank: int
    path: Path
    offset: int = 0
    proven: bool = False
    """It was refused, and the coordinator has proved since that it knows us."""
    ended: bool = False
    """Nobody writes it any more."""
    settled: bool = False
    waits: bool = False
    """The office took nothing of the last chunk, or was not there."""


class Uploads:
    """A context manager with one thread, to be left after the line. `tell` is called by it."""

    def __init__(
        self,
        office: Callable[[], Office],
        line: Line,
        host: str,
        agent: str,
        tell: Callable[[LogSettled | Broken], None],
    ) -> None:
        self._office, self._line, self._tell = office, line, tell
        self._host, self._agent = host, agent
        self._changed = threading.Condition()
        self._uploads: list[_Upload] = []
        self._closing = self._woken = False
        work = guarded(self._work, tell)
        self._thread = threading.Thread(target=work, name="agent uploads", daemon=True)

    def add(self, key: Key, logs: dict[int, Path]) -> None:
        """Logs that are, or will be."""
        with self._changed:
            self._uploads += [_Upload(key, rank, path) for rank, path in logs.items()]
            self._wake()

    def end(self, key: Key) -> None:
        """No more will be written to the logs of this attempt."""
        with self._changed:
            for upload in self._uploads:
                upload.ended = upload.ended or upload.key == key
            self._wake()

    def drop(self, key: Key) -> None:
        """They are not to be sent any more."""
        with self._changed:
            for upload in self._uploads:
                upload.settled = upload.settled or upload.key == key
            self._uploads = [upload for upload in self._uploads if upload.key != key]

    def _wake(self) -> None:
        self._woken = True
        self._changed.notify_all()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(_JOIN_S)

    def _work(self) -> None:
        office = self._office()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._woken, self._look_s())
                if self._closing:
                    return
                self._woken = False
                open_ones = [upload for upload in self._uploads if not upload.settled]
            if not open_ones or self._line.wait_connected() is None:
                continue
            # One chunk of each, and then all anew: nobody who has much to say keeps the others.
            more = [self._advance(office, upload) for upload in open_ones]
            with self._changed:
                self._woken = self._woken or any(more)

    def _look_s(self) -> float | None:
        """Until the next look; for ever when there is nothing to look at."""
        left = [upload for upload in self._uploads if not upload.settled]
        if not left:
            return None
        return _RETRY_S if all(upload.waits for upload in left) else LOOK_S

    def _advance(self, office: Office, upload: _Upload) -> bool:
        """Send one chunk; whether there is more to do at once. What was written meanwhile is not:
        a rank that writes line by line is not sent line by line.
        """
        if upload.settled:  # dropped a moment ago
            return False
        ended = upload.ended  # before the size is looked at: nothing is written after it
        data = self._next_chunk(upload)
        if not data:
            if ended:
                self._settle(upload)
            return False
        try:
            has = office.send_log(
                *(self._host, self._agent, upload.key.job, upload.key.attempt, upload.rank),
                *(upload.offset, data),
            )
        except OfficeUnreachable:
            upload.waits = True
            return False
        except OfficeRefused:
            return self._bear(upload)
        upload.waits = has == upload.offset
        is_behind = len(data) == CHUNK_BYTES or has != upload.offset + len(data)
        upload.offset, upload.proven = has, False
        return not upload.waits and (is_behind or ended)

    def _bear(self, upload: _Upload) -> bool:
        """Refused: by a coordinator that does not know us yet, perhaps; else for good."""
        if upload.proven:
            self._settle(upload)
            return False
        upload.proven = self._line.prove()
        return upload.proven

    def _next_chunk(self, upload: _Upload) -> bytes:
        try:
            with upload.path.open("rb") as file:
                file.seek(upload.offset)
                return file.read(CHUNK_BYTES)
        except OSError:  # not made yet, or its disk is gone: there is nothing to send
            return b""

    def _settle(self, upload: _Upload) -> None:
        upload.settled = True
        with self._changed:
            left = [other for other in self._uploads if other.key == upload.key]
        if all(other.settled for other in left):
            self._tell(LogSettled(upload.key))
