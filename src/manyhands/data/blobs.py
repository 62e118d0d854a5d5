"""Blobs: a file (Blob) or a folder (BlobTree) of a data set, wherever it lies. Read only.

    with dataset("imagenet").open() as tree:
        tree["train/n01440764"].keys()
        tree["LOC_synset_mapping.txt"].read_text()

Both are plain values that say where something is: they hold nothing open, can be used after the
block and from any thread, and can be pickled into another process, which opens what it needs.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Literal, Self, TextIO, cast, overload

from manyhands.core.errors import NotThere, UsageError
from manyhands.data.spec import parts_of
from manyhands.data.stores import Kind, Store, store_at

_PIECE = 1 << 16  # bytes that are asked for first, of a file of any size


@dataclass(frozen=True, slots=True)
class _Place:
    """A place: `key` in `store`. `name` is its path inside the tree that gave it."""

    store: Store = field(repr=False)
    key: str
    name: str = field(compare=False)

    @property
    def place(self) -> str:
        """Where it lies, for messages: without secrets."""
        return self.store.place(self.key)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Nothing is held open."""

    def __str__(self) -> str:
        return self.place


class Blob(_Place):
    """A file."""

    __slots__ = ()

    @classmethod
    def at(cls, place: str | os.PathLike[str], **options: object) -> Blob:
        """The file at a path or fsspec URL, with options for its file system. Raises NotThere."""
        root = root_of(store_at(place, options))
        if not isinstance(root, cls):
            raise UsageError(f"{root} is a folder, not a file", hint="BlobTree.at(...) takes it")
        return root

    @property
    def size(self) -> int:
        """In bytes."""
        return self.store.size(self.key)

    @property
    def version(self) -> str:
        """What is another text when the file has changed, where its place says so; else ''."""
        return self.store.version(self.key)

    @property
    def local(self) -> Path | None:
        """The file of this machine that this is, or None. With a cache: fetched if need be."""
        return self.store.local(self.key)

    @overload
    def open(self, mode: Literal["rb"] = "rb") -> BinaryIO: ...
    @overload
    def open(self, mode: Literal["r", "rt"], *, encoding: str = "utf-8") -> TextIO: ...
    def open(self, mode: str = "rb", *, encoding: str = "utf-8") -> BinaryIO | TextIO:
        """To read: "rb" for bytes, "r" for text. The caller closes it. Raises DataError."""
        if mode not in ("rb", "r", "rt"):
            raise UsageError(f"{self.place}: mode {mode!r}", hint='data sets are read: "rb" or "r"')
        file = self.store.open(self.key)
        return file if mode == "rb" else io.TextIOWrapper(file, encoding)

    def read_bytes(self) -> bytes:
        """All of it. Raises DataError."""
        with self.store.open(self.key) as file:
            return file.read()

    def read_text(self, encoding: str = "utf-8") -> str:
        """All of it as text, line ends as they are. Raises DataError."""
        return self.read_bytes().decode(encoding)

    def isdir(self) -> bool:
        """No."""
        return False


class BlobTree(_Place):
    """A folder."""

    __slots__ = ()

    @classmethod
    def at(cls, place: str | os.PathLike[str], **options: object) -> BlobTree:
        """The folder at a path or fsspec URL, with options for its file system. Raises NotThere."""
        root = root_of(store_at(place, options))
        if not isinstance(root, cls):
            raise UsageError(f"{root} is a file, not a folder", hint="Blob.at(...) takes it")
        return root

    def __getitem__(self, path: str | os.PathLike[str]) -> Blob | BlobTree:
        """The file or folder at `path` below this one. Raises NotThere, a KeyError."""
        name = "/".join(parts_of(os.fspath(path)))
        key = self._key(name)
        kind = self.store.kind(key)
        if kind is None:
            raise NotThere(f"{self.place} has no {name!r}")
        return (BlobTree if kind == "folder" else Blob)(self.store, key, name)

    def read_blob(self, path: str | os.PathLike[str], most: int | None = None) -> bytes:
        """All of the file at `path` below this one, at once: nothing asks first what is there.

        Of one that has more than `most` bytes, so many. Raises DataError; NotThere, a KeyError, if
        nothing is.
        """
        with self.store.open(self._key("/".join(parts_of(os.fspath(path))))) as file:
            return file.read() if most is None else _read_some(file, most)

    def blob(self, path: str | os.PathLike[str]) -> Blob:
        """The file at `path`, and nothing else. Raises NotThere."""
        found = self[path]
        if not isinstance(found, Blob):
            raise NotThere(f"{found} is a folder, not a file")
        return found

    def tree(self, path: str | os.PathLike[str]) -> BlobTree:
        """The folder at `path`, and nothing else. Raises NotThere."""
        found = self[path]
        if not isinstance(found, BlobTree):
            raise NotThere(f"{found} is a file, not a folder")
        return found

    def joinpath(self, *names: str | os.PathLike[str]) -> Blob | BlobTree:
        """`tree[a/b]`, with the path in pieces."""
        return self["/".join(os.fspath(name) for name in names)]

    def __contains__(self, path: object) -> bool:
        if not isinstance(path, (str, os.PathLike)):
            return False
        try:
            parts = parts_of(os.fspath(cast("str | os.PathLike[str]", path)))
        except UsageError:
            return False  # no tree has anything there
        return self.store.kind(self._key("/".join(parts))) is not None

    def isdir(self, path: str | os.PathLike[str] = "") -> bool:
        """Whether there is a folder at `path` below this one."""
        return self.store.kind(self._key("/".join(parts_of(os.fspath(path))))) == "folder"

    def keys(self) -> list[str]:
        """The names in this folder, sorted."""
        return list(self.store.entries(self.key))

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def __bool__(self) -> bool:
        return True  # an empty folder is one, and nothing is listed to say so

    def values(self) -> list[Blob | BlobTree]:
        """What is in this folder, by name."""
        return [value for _, value in self.items()]

    def items(self) -> list[tuple[str, Blob | BlobTree]]:
        """The names in this folder, sorted, with what they are."""
        return [
            (name, (BlobTree if kind == "folder" else Blob)(self.store, self._key(name), name))
            for name, kind in self.store.entries(self.key).items()
        ]

    def walk(self) -> Iterator[Blob]:
        """All files below, in the order of their names as text; empty folders give nothing."""
        pending: list[tuple[str, Kind]] = [("", "folder")]
        while pending:
            name, kind = pending.pop()
            if kind == "file":
                yield Blob(self.store, self._key(name), name)
                continue
            above = f"{name}/" if name else ""
            found = self.store.entries(self._key(name)).items()
            # A folder sorts as what is in it will: with the slash that follows its name.
            found = sorted(found, key=lambda e: e[0] + "/" * (e[1] == "folder"), reverse=True)
            pending.extend((above + entry, kind) for entry, kind in found)

    def _key(self, name: str) -> str:
        return f"{self.key}/{name}" if self.key and name else self.key or name


def _read_some(file: BinaryIO, most: int) -> bytes:
    """The first `most` bytes. Memory is asked for as they come, whatever the file claims to be."""
    first = file.read(min(_PIECE, most))
    if len(first) < _PIECE:  # most files
        return first
    found, size = bytearray(first), _PIECE
    while len(found) < most and (piece := file.read(min(size, most - len(found)))):
        found += piece
        size = len(found)
    return bytes(found)


def root_of(store: Store) -> Blob | BlobTree:
    """What a store is the place of: a file or a folder. Raises NotThere."""
    kind = store.kind("")
    place = store.place("")
    if kind is None:
        raise NotThere(f"{place}: there is no such file or folder")
    name = place.rstrip("/").rpartition("/")[2]
    return Blob(store, "", name) if kind == "file" else BlobTree(store, "", name)
