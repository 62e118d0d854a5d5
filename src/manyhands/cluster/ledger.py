"""The ledger: what an agent has begun, on its disk, so that nothing is begun twice.

    STATE/lock                                   held by the agent; its process id
    STATE/id                                     drawn once for this folder, and kept for ever
    STATE/begun/CLUSTER/JOB-ATTEMPT              made before anything is started, and kept for ever
    STATE/attempts/CLUSTER/JOB-ATTEMPT/          removed when the attempt is forgotten
        task.json keeper.lock order.json record.json keeper.log rank-N.log
    STATE/work/CLUSTER/job-N/                    where jobs run that name no folder; kept

Files and folders are the agent's alone, except that the user whom jobs run as may pass through
STATE and work. All methods raise OSError for what the disk says (full, read-only).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import msgspec

from manyhands.cluster.keeper import RECORD, sync_folder, write_atomically
from manyhands.cluster.messages import Task
from manyhands.core.errors import ManyhandsError, UsageError

_KEEPER_LOCK = "keeper.lock"
_FOLDER = re.compile(r"(\d+)-(\d+)")
_CLUSTER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


class Key(NamedTuple):
    """One attempt of one job of one cluster."""

    cluster: str
    job: int
    attempt: int

    def __str__(self) -> str:
        return f"job {self.job}, attempt {self.attempt}"


class End(msgspec.Struct, frozen=True):
    """A rank's end, as the keeper writes it."""

    rank: int
    exit_code: int
    at_s: float


class Record(msgspec.Struct, frozen=True):
    """What the keeper knows: `keeper.Record`, checked."""

    groups: tuple[int, ...] = ()
    ends: tuple[End, ...] = ()
    failed: End | None = None
    cause: str = ""
    error: str = ""
    done: bool = False


class StateHeld(ManyhandsError):
    """Another agent works in this state folder."""


class AlreadyBegun(ManyhandsError):
    """An attempt was begun here before, and must not be again."""


class Ledger:
    """A context manager that holds the folder's lock. One thread."""

    def __init__(self, state: Path, *, passable: bool = False) -> None:
        """`passable`: another user may go through to its work folders."""
        self.state = state.absolute()
        self.id = ""
        """Of the folder, whoever works in it. Known once it is entered."""
        self._mode = 0o711 if passable else 0o700
        self._lock = -1

    def __enter__(self) -> Self:
        """Raises StateHeld, UsageError for a folder of somebody else's."""
        self._make()
        fd = os.open(self.state / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "?"
            os.close(fd)
            raise StateHeld(
                f"another agent (process {holder}) works in {self.state}",
                hint="end it, or give this one a folder of its own: --state DIR",
            ) from None
        except BaseException:
            os.close(fd)
            raise
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, b"%d\n" % os.getpid(), 0)
            self.id = self._drawn_id()
        except BaseException:
            os.close(fd)
            raise
        self._lock = fd
        return self

    def _make(self) -> None:
        """A folder that was there stays as open as it is: it may be more than ours."""
        try:
            self.state.mkdir(parents=True)
        except FileExistsError:
            owner = self.state.stat().st_uid
            if owner != os.geteuid():
                raise UsageError(
                    f"the state folder {self.state} belongs to user {owner}: they could say what "
                    f"this agent (user {os.geteuid()}) runs",
                    hint="give it a folder of its own: --state DIR",
                ) from None
        else:
            self.state.chmod(self._mode)

    def _drawn_id(self) -> str:
        path = self.state / "id"
        with contextlib.suppress(FileNotFoundError):
            if found := path.read_text(encoding="ascii", errors="replace").strip():
                return found
        drawn = secrets.token_hex(8)
        write_atomically(str(path), f"{drawn}\n".encode())
        return drawn

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._lock)

    def begin(self, key: Key, task: Task) -> Path:
        """The attempt's new folder, once in all: AlreadyBegun ever after."""
        begun = self._made(self.state / "begun" / _checked(key.cluster))
        try:
            fd = os.open(
                begun / f"{key.job}-{key.attempt}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600
            )
        except FileExistsError:
            raise AlreadyBegun(f"{key} was begun here before") from None
        os.close(fd)
        sync_folder(str(begun))
        folder = self.folder(key)
        self._made(folder.parent)
        folder.mkdir(mode=0o700)
        write_atomically(str(folder / "task.json"), msgspec.json.encode(_without_secrets(task)))
        sync_folder(str(folder.parent))
        return folder

    def folder(self, key: Key) -> Path:
        """Where it is, if it was begun and is not forgotten."""
        return self.state / "attempts" / _checked(key.cluster) / f"{key.job}-{key.attempt}"

    def forget(self, key: Key) -> None:
        """Remove everything but the fact that it was begun."""
        folder = self.folder(key)
        if folder.exists():
            shutil.rmtree(folder)

    def left(self) -> Iterator[Key]:
        """Attempts that are not forgotten, of all clusters."""
        for folder in sorted((self.state / "attempts").glob("*/*")):
            if found := _FOLDER.fullmatch(folder.name):
                yield Key(folder.parent.name, int(found[1]), int(found[2]))

    def task(self, key: Key) -> Task | None:
        """Without its secrets; None if the agent died before it was written."""
        try:
            return msgspec.json.decode((self.folder(key) / "task.json").read_bytes(), type=Task)
        except (OSError, msgspec.DecodeError):
            return None

    def record(self, key: Key) -> Record:
        """What the keeper wrote last; an empty one if it wrote nothing."""
        try:
            return read_record((self.folder(key) / RECORD).read_bytes())
        except FileNotFoundError:
            return Record()

    def keeper_lock(self, key: Key) -> int:
        """A descriptor with the lock that says: a keeper lives. It goes to the keeper."""
        fd = os.open(self.folder(key) / _KEEPER_LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def keeper_gone(self, key: Key, patience_s: float) -> bool:
        """Wait until no keeper has the attempt's lock; False if one still has after that."""
        try:
            fd = os.open(self.folder(key) / _KEEPER_LOCK, os.O_RDWR)
        except FileNotFoundError:
            return True  # none was ever started
        # A lock has no timeout, a thread has. One that waits in vain ends with the keeper.
        waiting = threading.Thread(target=_wait_for_lock, args=(fd,), daemon=True)
        waiting.start()
        waiting.join(patience_s)
        return not waiting.is_alive()

    def work_folder(self, key: Key, owner: tuple[int, int] | None) -> Path:
        """Where a job runs that names no folder: one for all its attempts here."""
        work = self.state / "work"
        self._made(work, self._mode)
        cluster = self._made(work / _checked(key.cluster), self._mode)
        folder = self._made(cluster / f"job-{key.job}")
        if owner is not None:
            os.chown(folder, *owner)
        return folder

    def _made(self, folder: Path, mode: int = 0o700) -> Path:
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
        if mode != 0o700:
            folder.chmod(mode)  # whatever the umask took
        return folder


def _wait_for_lock(fd: int) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)


def read_record(data: bytes) -> Record:
    """Empty if it cannot be read: then it was not written by a keeper to its end."""
    return decoded_record(data) or Record()


def decoded_record(data: bytes) -> Record | None:
    """None if it cannot be read."""
    try:
        return msgspec.json.decode(data, type=Record)
    except msgspec.DecodeError:
        return None


def _checked(cluster: str) -> str:
    """A name of a folder, from whoever welcomed us."""
    if not _CLUSTER.fullmatch(cluster):
        raise ManyhandsError(f"the coordinator calls its cluster {cluster[:80]!r}: no usable name")
    return cluster


def _without_secrets(task: Task) -> Task:
    spec = msgspec.structs.replace(task.spec, env={})
    return msgspec.structs.replace(task, hub="", spec=spec)
