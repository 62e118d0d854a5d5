"""Logs: what the ranks of jobs wrote, on the coordinator's disk.

    LOGDIR/job-17/attempt-0/rank-3.log

The length of a file is the only record of how far it is: a coordinator that was killed in the
middle of a write goes on from whatever the disk has. Files are opened for one read or write and
closed again, so there are never more descriptors than callers.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import NamedTuple

from manyhands.core.errors import ManyhandsError, SettingsError

RESERVE_BYTES = 64 << 20
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NUM_LOCKS = 64
_JOB = re.compile(r"job-\d+")
_OWNER = "cluster"  # a file with the name of the cluster whose logs these are
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class LogError(ManyhandsError):
    """A log cannot be written or read; `have` is its true length."""

    def __init__(self, message: str, *, have: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.have = have


class WrongOffset(LogError):
    """The piece begins behind the end of what is there: something between is missing."""


class OtherBytes(LogError):
    """The piece repeats a part of the log, with other bytes."""


class DiskFull(LogError):
    """There is no room for the piece; what did fit is there."""


class _NoLog(LogError):
    """There is none, or it was cleared away at this moment."""


class LogName(NamedTuple):
    """Which log: numbers only, so that no name of a user's ever becomes a path."""

    job: int
    attempt: int
    rank: int


class Logs:
    """The logs under one folder. All methods may be called from any thread.

    `listen` has a function called after every growth, with the log's name: those who follow a
    log wait for that.
    """

    def __init__(self, folder: Path, *, reserve_bytes: int = RESERVE_BYTES) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise SettingsError(
                f"logs cannot be kept in {folder}: {error.strerror}",
                hint="name a folder of yours with --logdir",
            ) from None
        self._folder, self._cluster = folder, ""
        self._reserve_bytes = reserve_bytes
        self._locks = tuple(threading.Lock() for _ in range(_NUM_LOCKS))
        self._listeners: tuple[Callable[[LogName], None], ...] = ()
        self._listening, self._owning = threading.Lock(), threading.Lock()

    def claim(self, cluster: str) -> None:
        """Logs here are this cluster's from now on. Raises SettingsError if they are another's,
        whose jobs have the same numbers.
        """
        self._cluster = cluster
        path = self._folder / _OWNER
        try:
            with contextlib.suppress(FileNotFoundError):
                owner = path.read_text(errors="replace")
                if owner == cluster:
                    return
                if owner or has_logs(self._folder):  # one that is empty was being written
                    raise _anothers(self._folder)
            if has_logs(self._folder):
                raise _anothers(self._folder)
            self._note_owner()
        except OSError as error:
            raise SettingsError(
                f"logs cannot be kept in {self._folder}: {error.strerror}",
                hint="name a folder of yours, on a disk that has room, with --logdir",
            ) from None

    def _note_owner(self) -> None:
        with self._owning:
            beside = self._folder / f".{_OWNER}-{self._cluster}"
            with beside.open("w") as file:
                file.write(self._cluster)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(self._folder / _OWNER)

    def path(self, name: LogName) -> Path:
        """Where the log is, or would be."""
        return self._folder.joinpath(*_parts(name))

    def length(self, name: LogName) -> int:
        """How many bytes there are; 0 for a log that was never written."""
        try:
            return self.path(name).stat().st_size
        except FileNotFoundError:
            return 0

    def append(self, name: LogName, offset: int, data: bytes) -> int:
        """Puts `data` at `offset` and returns the log's new length.

        Bytes that are there already are compared, not written: a repeated piece changes nothing.
        Raises WrongOffset, OtherBytes and DiskFull; each says how long the log is.
        """
        length = grown = 0
        try:
            with (
                self._locks[hash(name) % _NUM_LOCKS],
                _named(name, lambda: length),
                self._opened(name, writing=True) as file,
            ):
                length = os.fstat(file).st_size
                grown = length
                known = _compare(file, name, length, offset, data)
                if known < len(data):
                    self._make_room(name, length, len(data) - known)
                    grown = _write(file, length, memoryview(data)[known:], name)
        except DiskFull as error:
            grown = error.have
            raise
        finally:
            if grown > length:
                for heard in self._listeners:
                    heard(name)
        return grown

    def read(self, name: LogName, offset: int, limit: int) -> bytes:
        """Up to `limit` bytes from `offset`; none behind the end."""
        try:
            with _named(name, lambda: 0), self._opened(name, writing=False) as file:
                return _read(file, offset, limit)
        except _NoLog:
            return b""

    def listen(self, heard: Callable[[LogName], None]) -> Callable[[], None]:
        """Calls `heard` after every growth, from the thread that wrote; what is returned ends
        it.
        """
        with self._listening:
            self._listeners = (*self._listeners, heard)

        def end() -> None:
            with self._listening:
                self._listeners = tuple(other for other in self._listeners if other is not heard)

        return end

    @contextlib.contextmanager
    def _opened(self, name: LogName, *, writing: bool) -> Generator[int]:
        """No symbolic link is followed below our folder, and no pipe waited for: what is not a
        file of ours is not touched.
        """
        *folders, last = _parts(name)
        flags = os.O_RDWR | os.O_CREAT if writing else os.O_RDONLY
        with contextlib.ExitStack() as stack:

            def opened(part: str | Path, flags: int, at: int | None) -> int:
                made = os.open(part, flags | os.O_CLOEXEC, 0o600, dir_fd=at)
                stack.callback(os.close, made)
                return made

            if writing and not (self._folder / _OWNER).exists():  # somebody cleared it away
                self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                if self._cluster:
                    self._note_owner()
            at = opened(self._folder, os.O_DIRECTORY, None)
            for part in folders:
                try:
                    at = opened(part, _FOLDER, at)
                except FileNotFoundError:
                    if not writing:
                        raise
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, 0o700, dir_fd=at)
                    at = opened(part, _FOLDER, at)
            file = opened(last, flags | os.O_NOFOLLOW | os.O_NONBLOCK, at)
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise OSError(errno.EINVAL, "it is no file")
            yield file

    def _make_room(self, name: LogName, length: int, more: int) -> None:
        """A job that prints without end must not take the last block from the job store."""
        disk = os.statvfs(self._folder)
        if disk.f_bavail * disk.f_frsize < self._reserve_bytes + more:
            raise _full(name, length)


def _show(name: LogName) -> str:
    return f"of job {name.job}, attempt {name.attempt}, rank {name.rank}"


def _full(name: LogName, length: int) -> DiskFull:
    return DiskFull(
        f"the coordinator's disk is full: log {_show(name)} stays at {length} bytes",
        have=length,
        hint="make room where --logdir is; the rest is sent then",
    )


def _compare(file: int, name: LogName, length: int, offset: int, data: bytes) -> int:
    """How many bytes of `data` the log has already."""
    if offset > length:
        raise WrongOffset(
            f"log {_show(name)} has {length} bytes; a piece at {offset} leaves a gap",
            have=length,
            hint=f"send it from {length}",
        )
    known = min(length - offset, len(data))
    if known and _read(file, offset, known) != data[:known]:
        raise OtherBytes(
            f"log {_show(name)} has other bytes at {offset} than were sent now",
            have=length,
            hint="two agents write one log: end the older one",
        )
    return known


def has_logs(folder: Path) -> bool:
    """Whether a cluster has kept logs there. Others may have files that are called alike."""
    return any(_JOB.fullmatch(path.name) and path.is_dir() for path in folder.glob("job-*"))


def _anothers(folder: Path) -> SettingsError:
    return SettingsError(
        f"{folder} has the logs of another cluster, whose jobs have the same numbers",
        hint="name another folder with --logdir, or that cluster's --state; or move it away",
    )


def _parts(name: LogName) -> tuple[str, str, str]:
    job, attempt, rank = (int(part) for part in name)
    if min(job, attempt, rank) < 0:
        raise ValueError(f"no log has a negative number: {name}")
    return f"job-{job}", f"attempt-{attempt}", f"rank-{rank}.log"


@contextlib.contextmanager
def _named(name: LogName, length: Callable[[], int]) -> Generator[None]:
    """What a disk can do to us has a name, too."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise _full(name, length()) from None
        kind = _NoLog if error.errno == errno.ENOENT else LogError
        raise kind(
            f"log {_show(name)} cannot be used: {error.strerror}",
            have=length(),
            hint="look at the disk and the permissions of --logdir",
        ) from None


def _read(file: int, offset: int, limit: int) -> bytes:
    pieces: list[bytes] = []
    while limit > 0 and (piece := os.pread(file, limit, offset)):
        pieces.append(piece)
        offset += len(piece)
        limit -= len(piece)
    return b"".join(pieces)


def _write(file: int, length: int, data: memoryview, name: LogName) -> int:
    while data:
        try:
            done = os.pwrite(file, data, length)
        except OSError as error:
            if error.errno in _FULL:
                raise _full(name, length) from None
            raise
        length += done
        data = data[done:]
    return length
