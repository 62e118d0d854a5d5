"""Files: what tables read from: a path here, or a blob of a data set, wherever that is.

A table may be read from several threads and in worker processes, forked or spawned. So nothing
here has a position that two could move, and what is open is opened anew in another process.
"""

from __future__ import annotations

import hashlib
import io
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, cast

from manyhands.core.errors import UsageError

_PIECE = 1 << 16  # bytes of the head, and of the tail, that a fingerprint looks at


class File(Protocol):
    """What of a blob counts here."""

    @property
    def name(self) -> str:
        """Its path inside its tree."""
        ...

    @property
    def place(self) -> str:
        """Where it is, as messages say it."""
        ...

    @property
    def size(self) -> int:
        """In bytes."""
        ...

    def open(self, mode: str = "rb") -> Any:  # noqa: ANN401
        """As a file of bytes."""
        ...

    def read_bytes(self) -> bytes:
        """All of it."""
        ...


class Tree(Protocol):
    """What of a tree of blobs counts here. A name that is none raises a KeyError."""

    def __getitem__(self, name: str, /) -> Any:  # noqa: ANN401
        """The file, or the tree, of that name."""
        ...

    def walk(self) -> Iterable[Any]:
        """All files below."""
        ...


class LocalFile:
    """A file of this machine."""

    def __init__(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        self.path = Path(path)
        self.name = self.path.name if name is None else name

    @property
    def place(self) -> str:
        """Its path."""
        return str(self.path)

    @property
    def size(self) -> int:
        """In bytes."""
        return self.path.stat().st_size

    def open(self, mode: str = "rb") -> BinaryIO:
        """Only to be read."""
        return cast("BinaryIO", self.path.open(mode))

    def read_bytes(self) -> bytes:
        """All of it."""
        return self.path.read_bytes()


class Folder:
    """A folder of this machine as a tree. Links are followed."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            kind = "a file" if self.path.exists() else "not there"
            raise UsageError(f"{self.path} is {kind}", hint="give a folder that can be read")

    def __str__(self) -> str:
        return str(self.path)

    def __getitem__(self, name: str) -> LocalFile | Folder:
        path = self.path / name
        if path.is_dir():
            return Folder(path)
        if not path.is_file():
            raise KeyError(f"{self.path} has no {name}")
        return LocalFile(path, name)

    def walk(self) -> Iterator[LocalFile]:
        """All files below, sorted. Raises UsageError if a link leads round in a circle."""
        return self._walk("", ())

    def _walk(self, below: str, above: tuple[tuple[int, int], ...]) -> Iterator[LocalFile]:
        here = self.path / below
        stat = here.stat()
        if (stat.st_dev, stat.st_ino) in above:
            raise UsageError(f"{here} leads back to a folder above it", hint="remove that link")
        with os.scandir(here) as listed:
            entries = sorted(listed, key=lambda entry: entry.name)
        for entry in entries:
            name = f"{below}/{entry.name}" if below else entry.name
            if entry.is_dir():
                yield from self._walk(name, (*above, (stat.st_dev, stat.st_ino)))
            else:
                yield LocalFile(here / entry.name, name)


def as_file(source: Any) -> File:  # noqa: ANN401
    """A path, or anything like a blob. Raises UsageError."""
    if isinstance(source, str | os.PathLike):
        path = Path(cast("str", source))
        if not path.is_file():
            kind = "a folder" if path.is_dir() else "not there"
            raise UsageError(f"{path} is {kind}", hint="give a file that can be read")
        return LocalFile(path)
    if hasattr(source, "open") and hasattr(source, "read_bytes"):
        return source
    raise UsageError(f"a {type(source).__name__} is no file", hint="give a path or a blob")


def as_tree(source: Any) -> Tree:  # noqa: ANN401
    """A path of a folder, or anything like a tree of blobs. Raises UsageError."""
    if isinstance(source, str | os.PathLike):
        return Folder(cast("str", source))
    if hasattr(source, "walk") and hasattr(source, "__getitem__"):
        return source
    raise UsageError(
        f"a {type(source).__name__} is no folder", hint="give the path of a folder, or a tree"
    )


def place_in(tree: Tree, name: str) -> str:
    """Where a file of a tree is, as messages say it; it need not be there."""
    return f"{str(tree).rstrip('/')}/{name}"


class Fingerprint(NamedTuple):
    """What tells whether a file is still the one that it was."""

    size: int
    mtime_ns: int  # 0 where nobody knows
    ends: str  # digest of its first and last bytes


class Reader(Protocol):
    """A file that is open, to be read at any place from any thread."""

    @property
    def fingerprint(self) -> Fingerprint:
        """Of what was opened."""
        ...

    def read(self, start: int, stop: int) -> bytes:
        """The bytes [start, stop), or fewer if it ends before."""
        ...

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        ...


def open_reader(file: File) -> Reader:
    """By the system's own means where it is a file of this machine."""
    opened = file.open("rb")
    try:
        number = opened.fileno()
    except (AttributeError, io.UnsupportedOperation, OSError):
        return _Shared(opened)
    return _Local(opened, number)


class _Local:
    """A file of this machine. It stays the one that was opened, whatever its name comes to mean."""

    def __init__(self, opened: Any, number: int) -> None:  # noqa: ANN401
        self._opened, self._number = opened, number
        stat = os.fstat(number)
        self.fingerprint = _fingerprint(self, stat.st_size, stat.st_mtime_ns)

    def read(self, start: int, stop: int) -> bytes:
        found = os.pread(self._number, stop - start, start)
        while len(found) < stop - start:  # the system gives at most 2 GiB at a time
            more = os.pread(self._number, stop - start - len(found), start + len(found))
            if not more:
                break
            found += more
        return found

    def close(self) -> None:
        self._opened.close()


class _Shared:
    """A file that has one position, which one thread moves at a time."""

    def __init__(self, opened: Any) -> None:  # noqa: ANN401
        self._opened, self._lock = opened, threading.Lock()
        self.fingerprint = _fingerprint(self, opened.seek(0, os.SEEK_END), 0)

    def read(self, start: int, stop: int) -> bytes:
        with self._lock:
            self._opened.seek(start)
            return self._opened.read(stop - start)

    def close(self) -> None:
        self._opened.close()


def _fingerprint(reader: _Local | _Shared, size: int, mtime_ns: int) -> Fingerprint:
    digest = hashlib.blake2b(digest_size=16)
    digest.update(reader.read(0, min(size, _PIECE)))
    digest.update(reader.read(max(0, size - _PIECE), size))
    return Fingerprint(size, mtime_ns, digest.hexdigest())
