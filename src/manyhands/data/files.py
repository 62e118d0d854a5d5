"""Files: what tables read from: a path here, or a blob of a data set, wherever that is.

Either is a blob: it can be pickled, knows where it is, and has nothing open.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Protocol, TypeGuard, cast

from manyhands.core.errors import UsageError
from manyhands.data.blobs import Blob, BlobTree
from manyhands.data.stores import LocalStore


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

    def open(self, mode: Literal["rb"] = "rb") -> Any:  # noqa: ANN401
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


def as_file(source: Any) -> File:  # noqa: ANN401
    """A path, a URL, or anything like a blob. Raises UsageError, and NotThere for a URL."""
    if is_url(source):
        return Blob.at(source)
    if isinstance(source, str | os.PathLike):
        path = Path(cast("str", source))
        if not path.is_file():
            kind = "a folder" if path.is_dir() else "not there"
            raise UsageError(f"{path} is {kind}", hint="give a file that can be read")
        return Blob(LocalStore(os.path.abspath(path)), "", path.name)
    if hasattr(source, "open") and hasattr(source, "read_bytes"):
        return source
    raise UsageError(
        f"a {type(source).__name__} is no file",
        hint="give a path or a blob; of a data set, what its open() gives",
    )


def as_tree(source: Any) -> Tree:  # noqa: ANN401
    """A folder by path or URL, or anything like a tree of blobs. Raises as `as_file` does."""
    if is_url(source):
        return BlobTree.at(source)
    if isinstance(source, str | os.PathLike):
        path = Path(cast("str", source))
        if not path.is_dir():
            kind = "a file" if path.exists() else "not there"
            raise UsageError(f"{path} is {kind}", hint="give a folder that can be read")
        return BlobTree(LocalStore(os.path.abspath(path)), "", path.name)
    if hasattr(source, "walk") and hasattr(source, "__getitem__"):
        return source
    raise UsageError(
        f"a {type(source).__name__} is no folder",
        hint="give the path of a folder, or a tree; of a data set, what its open() gives",
    )


def is_url(source: object) -> TypeGuard[str]:
    """Whether it says how to get there, and not only where."""
    return isinstance(source, str) and "://" in source


def place_in(tree: Tree, name: str) -> str:
    """Where a file of a tree is, as messages say it; it need not be there."""
    return f"{str(tree).rstrip('/')}/{name}"


def read_in(tree: Tree, name: str, most: int) -> bytes:
    """All of a file of a tree, or its first `most` bytes. Raises KeyError or FileNotFoundError if
    it is not there.

    A tree that can is asked for it at once: to ask first what is there is a second way to a
    bucket, for every sample.
    """
    read = getattr(tree, "read_blob", None)
    return tree[name].read_bytes()[:most] if read is None else read(name, most)
