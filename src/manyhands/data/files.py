"""Files: what tables read from: a path here, or a blob of a data set, wherever that is.

Both can be pickled: they know where they are, and have nothing open.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeGuard, cast

from manyhands.core.errors import UsageError
from manyhands.data.spec import parts_of


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
    """A file of this machine. `place` is given for what is only a copy of the data here."""

    def __init__(
        self, path: str | os.PathLike[str], name: str | None = None, place: str | None = None
    ) -> None:
        self.path = Path(path)
        self.name = self.path.name if name is None else name
        self.place = str(self.path) if place is None else place
        """Where it is, as messages say it."""

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
    """A folder of this machine as a tree. Links are followed; names only lead down."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            kind = "a file" if self.path.exists() else "not there"
            raise UsageError(f"{self.path} is {kind}", hint="give a folder that can be read")

    def __str__(self) -> str:
        return str(self.path)

    def __getitem__(self, name: str) -> LocalFile | Folder:
        path = self._at(name)
        try:
            mode = path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            raise KeyError(f"{self.path} has no {name}") from None
        return Folder(path) if stat.S_ISDIR(mode) else LocalFile(path, name)

    def read_bytes(self, name: str) -> bytes:
        """All of a file below. Raises FileNotFoundError."""
        return self._at(name).read_bytes()

    def _at(self, name: str) -> Path:
        return self.path.joinpath(*parts_of(name))

    def walk(self) -> Iterator[LocalFile]:
        """All files below, sorted. Raises UsageError if a link leads round in a circle."""
        return self._walk("", ())

    def _walk(self, below: str, above: tuple[tuple[int, int], ...]) -> Iterator[LocalFile]:
        here = self.path / below
        it = here.stat()
        if (it.st_dev, it.st_ino) in above:
            raise UsageError(f"{here} leads back to a folder above it", hint="remove that link")
        with os.scandir(here) as listed:
            entries = sorted(listed, key=lambda entry: entry.name)
        for entry in entries:
            name = f"{below}/{entry.name}" if below else entry.name
            if entry.is_dir():
                yield from self._walk(name, (*above, (it.st_dev, it.st_ino)))
            else:
                yield LocalFile(here / entry.name, name)


def as_file(source: Any) -> File:  # noqa: ANN401
    """A path, a URL, or anything like a blob. Raises UsageError, and NotThere for a URL."""
    if is_url(source):
        from manyhands.data.blobs import Blob

        source = Blob.at(source)
    if isinstance(source, str | os.PathLike):
        path = Path(cast("str", source))
        if not path.is_file():
            kind = "a folder" if path.is_dir() else "not there"
            raise UsageError(f"{path} is {kind}", hint="give a file that can be read")
        return LocalFile(path)
    if hasattr(source, "open") and hasattr(source, "read_bytes"):
        local: Path | None = getattr(source, "local", None)
        return source if local is None else LocalFile(local, source.name, source.place)
    raise UsageError(f"a {type(source).__name__} is no file", hint="give a path or a blob")


def as_tree(source: Any) -> Tree:  # noqa: ANN401
    """A folder by path or URL, or anything like a tree of blobs. Raises as `as_file` does."""
    if is_url(source):
        from manyhands.data.blobs import BlobTree

        return BlobTree.at(source)
    if isinstance(source, str | os.PathLike):
        return Folder(cast("str", source))
    if hasattr(source, "walk") and hasattr(source, "__getitem__"):
        return source
    raise UsageError(
        f"a {type(source).__name__} is no folder", hint="give the path of a folder, or a tree"
    )


def is_url(source: object) -> TypeGuard[str]:
    """Whether it says how to get there, and not only where."""
    return isinstance(source, str) and "://" in source


def place_in(tree: Tree, name: str) -> str:
    """Where a file of a tree is, as messages say it; it need not be there."""
    return f"{str(tree).rstrip('/')}/{name}"


def read_in(tree: Tree, name: str) -> bytes:
    """All of a file of a tree. Raises KeyError or FileNotFoundError if it is not there.

    A tree that can is asked for it at once: to ask first what is there is a second way to a
    bucket, for every sample.
    """
    read = getattr(tree, "read_bytes", None)
    return tree[name].read_bytes() if read is None else read(name)
