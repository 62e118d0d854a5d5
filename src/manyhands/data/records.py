"""Records: a file of one sample after another, read by their numbers through an index beside it.

A compressed file (.gz) has no places to go to: it can be read from its beginning only.
"""

from __future__ import annotations

import gzip
import os
import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from manyhands.core.errors import UsageError
from manyhands.data import index as indices
from manyhands.data.access import Access, Fingerprint, lines_of, open_access, stream
from manyhands.data.files import as_file, is_url
from manyhands.data.index import Found, Index
from manyhands.data.table import BadSample, Sequential, named

_BOM = b"\xef\xbb\xbf"
_BLANK = b" \t\r\n"
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")


class Records(ABC):
    """A table; subclasses say how a sample is found (`scan`) and what it is (`parse`).

    Once opened, the file stays the one that it was: one that is put in its place, or grows, does
    not mix with it. Pickled, a table takes its file's fingerprint with it: another process that
    finds another file there raises UsageError.

    `index` is where the index is to be: by default beside the file, or else in the user's cache.
    """

    kind: str
    """Of the samples: what an index of others is no use for."""

    def __init__(
        self,
        source: Any,  # noqa: ANN401
        *,
        transform: Callable[[Any], Any] | None,
        index: str | os.PathLike[str] | None,
    ) -> None:
        self._file = as_file(source)
        # Into the folders of a data set nothing is written, nor into those of a cache. Whole paths:
        # a worker process may begin in another folder than this one.
        self._own: Path | None = None
        if isinstance(source, str | os.PathLike) and not is_url(cast("object", source)):
            self._own = Path(os.path.abspath(cast("str", source)))
        self.place = self._file.place
        """Where the file is, as messages say it."""
        self.transform = transform
        self._index_path = None if index is None else Path(os.path.abspath(index))
        self._sequential = self._file.name.lower().endswith(".gz")
        self._expected: Fingerprint | None = None
        self._opening = threading.Lock()
        self._held: _Opened | None = None
        if not self._sequential:
            self._expected = self._open().access.fingerprint

    @abstractmethod
    def scan(self, lines: Iterable[bytes]) -> Iterator[Found]:
        """All samples of these lines, which begin with the file's first."""

    @abstractmethod
    def parse(self, text: bytes) -> Any:  # noqa: ANN401
        """The sample. `text` may end in blank lines. Raises ValueError, saying what is wrong."""

    def __len__(self) -> int:
        return len(self._open().index)

    def __getitem__(self, index: int | slice) -> Any:  # noqa: ANN401
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        opened = self._open()
        sample = range(len(opened.index))[index]
        start, stop = opened.index.span(sample)
        if not start <= stop <= opened.access.fingerprint.size:
            raise UsageError(f"{opened.index.path} is broken", hint="remove it: it is made anew")
        text = opened.access.read(start, stop)
        if len(text) < stop - start:
            raise BadSample(self.where(sample), "the file has become shorter since it was opened")
        return self.made(text, lambda: self.where(sample))

    def where(self, index: int) -> str:
        """The file and the line of a sample."""
        opened = self._open()
        return f"{self.place}:{opened.index.line(range(len(opened.index))[index])}"

    def __iter__(self) -> Iterator[Any]:
        """All samples in order. After a BadSample, the next one can still be asked for."""
        return _Samples(self)

    def lines(self) -> Iterator[bytes]:
        """Of the file from its beginning. Raises UsageError if it cannot be unpacked."""
        if self._sequential:
            return _unpacked(self._file.open("rb"), self.place)
        return iter(stream(self._open().access, self.place))

    def made(self, text: bytes, where: Callable[[], str]) -> Any:  # noqa: ANN401
        """The sample of these bytes, as the user gets it. Raises BadSample."""
        try:
            sample = self.parse(text)
        except ValueError as error:
            raise BadSample(where(), str(error)) from None
        if self.transform is None:
            return sample
        with named(where):
            return self.transform(sample)

    def _open(self) -> _Opened:
        if self._held is None:
            if self._sequential:
                raise Sequential(
                    f"{self.place} is compressed: it can be read from its beginning only",
                    hint=f"iterate over it, or unpack it first: gzip -dk {self.place}",
                )
            with self._opening:
                if self._held is None:
                    self._held = self._opened()
        return self._held

    def _opened(self) -> _Opened:
        access = open_access(self._file)
        state = access.fingerprint
        if self._expected not in (None, state):
            raise UsageError(
                f"{self.place} has changed since this table was made",
                hint="make the table anew, and leave its file alone while it is in use",
            )
        if self._index_path is None:
            places = indices.places_for(self.place, self.kind, beside=self._own)
        else:
            places = [self._index_path]
        found = indices.find(places, self.kind, state)
        if found is None:
            found = indices.build(
                places, self.kind, state, lambda: self.scan(stream(access, self.place))
            )
        return _Opened(access, found)

    def close(self) -> None:
        """Let go of the files, as happens by itself when nobody has the table any more.

        Used again, it opens them again.
        """
        with self._opening:
            self._held = None

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_held", "_opening")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._opening, self._held = threading.Lock(), None


@dataclass(frozen=True, slots=True)
class _Opened:
    access: Access
    index: Index


class _Samples:
    """An iteration, which an error does not end."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._found = records.scan(records.lines())

    def __iter__(self) -> _Samples:
        return self

    def __next__(self) -> Any:  # noqa: ANN401
        _, line, text = next(self._found)
        return self._records.made(text, lambda: f"{self._records.place}:{line}")


def numbered(lines: Iterable[bytes], place: str) -> Iterator[Found]:
    """All lines, each with its place and its number; a byte-order mark is no part of the first."""
    start = 0
    for number, line in enumerate(lines, start=1):
        if number == 1:
            if line.startswith(_UTF_16):
                raise UsageError(
                    f"{place} is UTF-16",
                    hint=f"make it UTF-8: iconv -f UTF-16 -t UTF-8 {place} > FILE",
                )
            if line.startswith(_BOM):
                start, line = len(_BOM), line[len(_BOM) :]
        yield start, number, line
        start += len(line)


def is_blank(line: bytes) -> bool:
    """Nothing but what separates words and lines."""
    return not line.strip(_BLANK)


def _unpacked(opened: Any, place: str) -> Iterator[bytes]:  # noqa: ANN401
    number = 0
    with opened, gzip.GzipFile(fileobj=opened) as file:
        try:
            for number, line in enumerate(lines_of(file.read1, place), start=1):  # noqa: B007
                yield line
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UsageError(f"{place} cannot be unpacked after line {number}: {error}") from error
