"""Uploads: the logs of ranks, from this host's disk to the coordinator, as they grow.

A rank writes its log itself, so that no death of ours loses a line or breaks its pipe. Nothing
here is then told of a write: the kernel would (inotify), but not for state folders on a network
disk, and once for every line of a rank that says much. So while ranks run, the sizes of their logs
are looked at a few times a second: some system calls each, and what a reader of `logs -f` sees is
late by no more than that. When no rank runs, nothing is looked at.

Nor is a rank told how much it may write. So where less than RESERVE_BYTES of the disk are free, a
log longer than that is its job's end, and is cut, if it is what took them: the job store may be
there. One that merely is long, while something else fills the disk, is let be.

And a rank may empty its own log: `echo oh > /dev/stderr` in a shell opens the file anew. What was
sent stays, and what is there now is sent after it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from manyhands.cluster.ledger import Key
from manyhands.cluster.line import Broken, Line, guarded
from manyhands.cluster.logs import RESERVE_BYTES
from manyhands.cluster.office import Office, OfficeRefused, OfficeUnreachable

CHUNK_BYTES = 1 << 20
LOOK_S = 0.2
_RETRY_S = 1.0  # when the office has no room for it
_JOIN_S = 0.2
_LEAST_PART = 4  # of what the disk lost, a log took that much: its copy may be on it too
_LEAST_RESERVE = 8  # and that much of the reserve: nobody is ended for a line
_LOOKS = 2
_TAIL_BYTES = 64
OTHER_BYTES = "other-bytes"  # the code of a refusal: the log has others where these would go


@dataclass(frozen=True, slots=True)
class LogSettled:
    """The logs of an attempt have all been sent to their end, or refused."""

    key: Key


@dataclass(frozen=True, slots=True)
class Flooded:
    """The log of this rank takes the last room of the disk: it is to be ended."""

    key: Key
    rank: int
    why: str


@dataclass(slots=True)
class _Upload:
    key: Key
    rank: int
    path: Path
    offset: int = 0
    """In the file: what is before it has been sent."""
    base: int = 0
    """Where the file, as it is now, begins in the coordinator's log."""
    tail: bytes = b""
    """The last of what was sent: if it is not before `offset` any more, the log was emptied."""
    astray: bool = False
    """It does not go on where the coordinator's log ends: it was emptied."""
    notice: bytes = b""
    """What its reader is to be told of that, before the first bytes of the file."""
    told: bool = False
    """There is such a notice, or was."""
    proven: bool = False
    """It was refused, and the coordinator has proved since that it knows us."""
    ended: bool = False
    """Nobody writes it any more."""
    settled: bool = False
    why: str = ""
    """It flooded the disk: said so, and at its end cut."""
    waits: bool = False
    """The office took nothing of the last chunk, or was not there."""
    size_then: int = 0
    free_then: int | None = None
    """When there was room last, or something else had taken it."""
    looks: int = 0
    """That found it to have taken the room, one after the other."""

    def grown_to(self, size: int, free: int, reserve: int) -> int:
        """What it has taken since then of a disk that has only `free` left; 0 if that is not to be
        laid to it.
        """
        if self.free_then is None:  # it is new: all of it has come just now
            self.free_then = free + size
        grown, lost = size - self.size_then, self.free_then - free
        if free >= reserve or not 0 <= lost <= _LEAST_PART * grown:
            self.size_then, self.free_then, self.looks = size, free, 0
        elif size >= reserve and grown * _LEAST_RESERVE >= reserve:
            self.looks += 1
        return grown if self.looks >= _LOOKS else 0


class Uploads:
    """A context manager with one thread, to be left after the line. `tell` is called by it."""

    def __init__(
        self,
        office: Callable[[], Office],
        line: Line,
        host: str,
        agent: str,
        tell: Callable[[Flooded | LogSettled | Broken], None],
        *,
        reserve_bytes: int = RESERVE_BYTES,
    ) -> None:
        self._office, self._line, self._tell = office, line, tell
        self._host, self._agent, self._reserve_bytes = host, agent, reserve_bytes
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
            # The disk fills whether there is a connection or not.
            self._keep_room(open_ones)
            for upload in open_ones:
                if upload.ended and upload.why:
                    self._cut(upload)
            if not open_ones or self._line.wait_connected(0.0) is None:
                for upload in open_ones:
                    upload.waits = False  # nobody was asked
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

    def _keep_room(self, uploads: Sequence[_Upload]) -> None:
        if any(upload.why for upload in uploads):
            return  # room comes with the end of that one
        written = [upload for upload in uploads if not upload.ended]
        free = _free_beside(written[0].path) if written else sys.maxsize  # all are on one disk
        sizes = [_size_of(upload.path) for upload in written]
        grown = [
            upload.grown_to(size, free, self._reserve_bytes)
            for upload, size in zip(written, sizes, strict=True)
        ]
        most = max(grown, default=0)
        if most == 0:
            return
        flood, size = written[grown.index(most)], sizes[grown.index(most)]
        flood.why = (
            f"rank {flood.rank} was ended: it has written {size >> 20} MiB, and the disk of its "
            f"host's agent has only {free >> 20} MiB free"
        )
        self._tell(Flooded(flood.key, flood.rank, flood.why))

    def _cut(self, upload: _Upload) -> None:
        """What was sent stays, so that nobody misses a piece. Of the rest, what there is room for
        twice: where the coordinator keeps it may be this disk.
        """
        lacking = self._reserve_bytes - _free_beside(upload.path)
        with contextlib.suppress(OSError), upload.path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            room = (size - upload.offset - lacking) // 2 - CHUNK_BYTES  # one more, to send the last
            end = upload.offset + max(0, min(room, size - upload.offset - CHUNK_BYTES))
            file.truncate(min(size, end))
            file.seek(0, os.SEEK_END)
            file.write(f"\nmanyhands: {upload.why}; the rest of this log is gone\n".encode())
        upload.why = ""

    def _advance(self, office: Office, upload: _Upload) -> bool:
        """Send one chunk; whether there is more to do at once. What was written meanwhile is not:
        a rank that writes line by line is not sent line by line.
        """
        if upload.settled:  # dropped a moment ago
            return False
        # Before the size is looked at: nothing is written after it. One that is still to be cut is
        # so at the next look, which its end has begun.
        ended = upload.ended and not upload.why
        data = upload.notice or self._next_chunk(upload)
        if not data and not upload.astray:
            if ended:
                self._settle(upload)
            return False
        at = upload.base + upload.offset
        try:
            has = office.send_log(
                *(self._host, self._agent, upload.key.job, upload.key.attempt, upload.rank),
                *(at, data),
            )
        except OfficeUnreachable:
            upload.waits = True
            return False
        except OfficeRefused as refusal:
            # Emptied when a piece had arrived whose answer was lost, or by the time of an agent
            # before this one. Once: of two agents that write one log, one is to give up.
            upload.astray = refusal.code == OTHER_BYTES and not upload.told
            return upload.astray or self._bear(upload)
        upload.proven = False
        if upload.astray:  # nothing was sent, but asked how much there is
            self._begin_anew(upload, has)
            return True
        if upload.notice:
            is_taken = has >= at + len(data)
            upload.waits = at <= has < at + len(data)
            if not upload.waits:  # else no more than a part of it had room
                upload.base, upload.notice = has, b"" if is_taken else data
            return not upload.waits
        is_taken, upload.waits = has == at + len(data), has == at
        # What was in the file before it was emptied cannot be sent again.
        upload.base = min(upload.base, has)
        upload.offset = has - upload.base
        upload.tail = data[-_TAIL_BYTES:] if is_taken else b""
        is_behind = len(data) == CHUNK_BYTES or not is_taken
        return not upload.waits and (is_behind or ended)

    def _begin_anew(self, upload: _Upload, has: int) -> None:
        """The file as it is now goes behind what the coordinator has, and what it had is gone."""
        if not upload.told:
            upload.notice, upload.told = _notice(upload), True
        upload.base, upload.offset, upload.tail = has, 0, b""
        upload.astray = False

    def _bear(self, upload: _Upload) -> bool:
        """Refused: by a coordinator that does not know us yet, perhaps; else for good."""
        if upload.proven:
            self._settle(upload)
            return False
        upload.proven = self._line.prove()
        return upload.proven

    def _next_chunk(self, upload: _Upload) -> bytes:
        """What is to be sent; nothing of a file that has been emptied, which is then `astray`."""
        try:
            with upload.path.open("rb") as file:
                file.seek(upload.offset - len(upload.tail))
                data = file.read(len(upload.tail) + CHUNK_BYTES)
        except OSError:  # not made yet, or its disk is gone: there is nothing to send
            return b""
        upload.astray = upload.astray or not data.startswith(upload.tail)
        return b"" if upload.astray else data[len(upload.tail) :]

    def _settle(self, upload: _Upload) -> None:
        upload.settled = True
        with self._changed:
            left = [other for other in self._uploads if other.key == upload.key]
        if all(other.settled for other in left):
            self._tell(LogSettled(upload.key))


def _notice(upload: _Upload) -> bytes:
    """For who reads the log, once."""
    end = b"" if upload.tail.endswith(b"\n") else b"\n"
    text = (
        f"manyhands: rank {upload.rank} has emptied its log, as `> /dev/stderr` does (`>&2` does "
        "not): what it wrote just before may be missing here\n"
    )
    return end + text.encode()


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _free_beside(path: Path) -> int:
    """Of the disk, also before there is a log; if it cannot be told, there is room."""
    try:
        disk = os.statvfs(path.parent)
    except OSError:
        return sys.maxsize
    return disk.f_bavail * disk.f_frsize
