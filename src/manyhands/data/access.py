"""Access: an open file that is read at any place, from any thread, in forked processes too.

None has a position that two could move at once. A random read costs what it asks for, no more.
"""

from __future__ import annotations

import hashlib
import io
import os
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from manyhands.core.errors import DataError, UsageError
from manyhands.data.files import File

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_PIECE = 1 << 16  # bytes of the head, and of the tail, that a fingerprint looks at
_BLOCK = 1 << 20  # bytes that are read ahead, from the beginning to the end
_FAR_BLOCK = 1 << 24  # of what may be far: each of its reads waits for an answer first
_LINE_BYTES = 1 << 30


class Fingerprint(NamedTuple):
    """What tells whether a file is still the one that it was."""

    size: int
    mtime_ns: int  # 0 where nobody knows
    ends: str  # digest of its first and its last bytes, and of what its store calls its version


class Access(Protocol):
    """One file. It is closed when nobody has it any more."""

    @property
    def block(self) -> int:
        """Bytes that whoever goes through all of it had better ask for at a time."""
        ...

    @property
    def fingerprint(self) -> Fingerprint:
        """Of what was opened."""
        ...

    def read(self, start: int, stop: int) -> bytes:
        """The bytes [start, stop), or fewer if it ends before."""
        ...


def open_access(file: File) -> Access:
    """By the system's own means if it is a file of this machine."""
    opened = file.open("rb")
    try:
        number: int = opened.fileno()
    except (AttributeError, io.UnsupportedOperation, OSError):
        return SharedAccess(file, opened)
    with opened:
        return LocalAccess(os.dup(number))


class LocalAccess:
    """A file of this machine. It stays the one that was opened, whatever its name comes to mean."""

    block = _BLOCK

    def __init__(self, number: int) -> None:
        self._number = number
        weakref.finalize(self, os.close, number)
        it = os.fstat(number)
        self.fingerprint = _fingerprint(self, it.st_size, it.st_mtime_ns)

    def read(self, start: int, stop: int) -> bytes:
        found = os.pread(self._number, stop - start, start)
        while len(found) < stop - start:  # the system gives at most 2 GiB at a time
            more = os.pread(self._number, stop - start - len(found), start + len(found))
            if not more:
                break
            found += more
        return found


class _Held(NamedTuple):
    """What a process has open of a file."""

    process: int
    opened: Any
    lock: threading.Lock  # of its position
    fetch: Callable[[int, int], bytes] | None  # without one


class SharedAccess:
    """A file behind a URL: where its place takes ranges, so many bytes are fetched and no more, by
    any number of threads at once. Others have one position, which one thread moves at a time.

    A forked process opens it anew: connections do not survive that, nor do locks that were held.
    """

    block = _FAR_BLOCK

    def __init__(self, file: File, opened: Any) -> None:  # noqa: ANN401
        self._file = file
        self._held = self._hold(opened)
        version = getattr(file, "version", "")  # not every kind of blob has one
        said = version if isinstance(version, str) else ""
        self._size: int = opened.seek(0, os.SEEK_END)
        self.fingerprint = _fingerprint(self, self._size, 0, said)

    def read(self, start: int, stop: int) -> bytes:
        if self._held.process != os.getpid():
            self._held = self._hold(self._file.open("rb"))
        held = self._held
        if held.fetch is not None:
            return self._fetched(held.fetch, start, min(stop, self._size))
        with held.lock:
            held.opened.seek(start)
            return held.opened.read(stop - start)

    def _fetched(self, fetch: Callable[[int, int], bytes], start: int, stop: int) -> bytes:
        found = b""
        while start + len(found) < stop:  # a server may give a part of what was asked for
            asked = stop - start - len(found)
            more = fetch(stop - asked, stop)
            if not more:
                break
            if len(more) > asked:
                raise DataError(
                    f"{self._file.place} cannot be read: {asked} bytes were asked for, and "
                    f"{len(more)} came",
                    hint="its server does not take ranges: read a copy of the file",
                )
            found += more
        return found

    def _hold(self, opened: Any) -> _Held:  # noqa: ANN401
        weakref.finalize(self, opened.close)
        fetch = getattr(getattr(opened, "raw", None), "fetch", None)
        return _Held(os.getpid(), opened, threading.Lock(), fetch)


def stream(access: Access, place: str) -> io.BufferedReader:
    """The lines from the beginning: of what it was when it was opened, not what came to its end
    since. As `lines_of`.
    """
    at, size = 0, access.fingerprint.size

    def read(num: int) -> bytes:
        nonlocal at
        found = access.read(at, min(at + num, size))
        at += len(found)
        return found

    return lines_of(read, place, access.block)


def lines_of(read: Callable[[int], bytes], place: str, block: int = _BLOCK) -> io.BufferedReader:
    """The lines of what `read(num)` gives: at most so many bytes, none at the end.

    With a position of its own; one thread at a time. Raises UsageError where a line does not end:
    it would have to fit into memory, and a small file that is unpacked may have a very long one.
    """
    return io.BufferedReader(_Stream(read, place), block)


class _Stream(io.RawIOBase):
    def __init__(self, read: Callable[[int], bytes], place: str) -> None:
        self._read, self._place = read, place
        self._open = 0  # bytes since the last line ended

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer)
        found = self._read(len(view))
        view[: len(found)] = found
        end = found.rfind(b"\n")
        self._open = self._open + len(found) if end < 0 else len(found) - end - 1
        if self._open > _LINE_BYTES:
            raise UsageError(
                f"{self._place} has a line of more than {_LINE_BYTES} bytes",
                hint="is it a file of lines, one for each sample?",
            )
        return len(found)


def _fingerprint(
    access: LocalAccess | SharedAccess, size: int, mtime_ns: int, version: str = ""
) -> Fingerprint:
    digest = hashlib.blake2b(digest_size=16)
    digest.update(access.read(0, min(size, _PIECE)))
    digest.update(access.read(max(0, size - _PIECE), size))
    digest.update(version.encode())
    return Fingerprint(size, mtime_ns, digest.hexdigest())
