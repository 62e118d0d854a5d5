"""Rows: a CSV file, each row a sample, read in any order from the plain file."""

from __future__ import annotations

import csv
import io
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from manyhands.core.errors import UsageError
from manyhands.data.index import Found
from manyhands.data.records import Records, is_blank, numbered

_TRUE = frozenset(("1", "true", "yes"))
_FALSE = frozenset(("0", "false", "no"))


class CsvTable(Records):
    """The rows of a .csv file: what `transform` makes of a dict by column.

    `source` is a path or a blob, in UTF-8. The first row names the columns, unless `columns` does:
    then it is a sample. `types` says what a column's texts are turned into (`int`, `float`, any
    function of a text, a mapping's `__getitem__` say, that raises ValueError, LookupError or
    ArithmeticError for what it cannot turn); bool knows 1, true, yes and 0, false, no. Quoted
    texts may have new lines in them. Blank lines are no samples. A row with another number of
    columns, with quotes that do not match, or with a text that cannot be turned, raises BadSample
    with file and line. A quote that nothing closes spoils the line in which it is opened, not the
    rest of the file.

    Where each row begins is found once, and kept in a file beside it (see `index`). A .csv.gz can
    only be iterated over.
    """

    def __init__(
        self,
        source: Any,  # noqa: ANN401
        *,
        columns: Sequence[str] | None = None,
        types: Mapping[str, Callable[[str], Any]] | None = None,
        delimiter: str = ",",
        quotechar: str = '"',
        transform: Callable[[Any], Any] | None = None,
        index: str | os.PathLike[str] | None = None,
    ) -> None:
        for name, value in (("delimiter", delimiter), ("quotechar", quotechar)):
            if len(value) != 1 or not value.isascii() or value in "\r\n":
                raise UsageError(f"{name}={value!r}", hint="one ASCII character")
        if delimiter == quotechar:
            raise UsageError(f"delimiter and quotechar are both {delimiter!r}", hint="two of them")
        self._delimiter, self._quotechar = delimiter, quotechar
        self._headed = columns is None
        self.kind = f"csv {delimiter}{quotechar} {'headed' if self._headed else 'bare'}"
        super().__init__(source, transform=transform, index=index)
        self.columns = self._header() if columns is None else tuple(columns)
        """Their names."""
        twice = sorted({name for name in self.columns if self.columns.count(name) > 1})
        if twice:
            raise UsageError(
                f"{self.place}: columns of one name: {', '.join(twice)}",
                hint="give them other names; if its first row has none, columns=[...]",
            )
        self._turns = self._by_column(types or {})

    @property
    def calls(self) -> bool:
        """Whether a function of the user's turns a column."""
        return any(turn not in (None, int, float, str, _to_bool) for turn in self._turns)

    def scan(self, lines: Iterable[bytes]) -> Iterator[Found]:
        found = self._split(lines)
        if self._headed:
            next(found, None)
        return found

    def parse(self, text: bytes) -> dict[str, Any]:
        cells = self._cells(text)
        if len(cells) != len(self.columns):
            raise ValueError(f"{len(cells)} columns, expected {len(self.columns)}")
        row: dict[str, Any] = {}
        for name, turn, cell in zip(self.columns, self._turns, cells, strict=True):
            try:
                row[name] = cell if turn is None else turn(cell)
            except (ValueError, LookupError, ArithmeticError) as error:
                kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
                raise ValueError(f"column {name}: {cell[:80]!r}: {kind}{error}") from None
        return row

    def _header(self) -> tuple[str, ...]:
        first = next(self._split(self.lines()), None)
        if first is None:
            raise UsageError(f"{self.place} is empty", hint="its first row names the columns")
        try:
            names = self._cells(first[2])
        except ValueError as error:
            raise UsageError(
                f"{self.place}:{first[1]}: the names of the columns: {error}"
            ) from None
        return tuple(names)

    def _by_column(
        self, types: Mapping[str, Callable[[str], Any]]
    ) -> list[Callable[[str], Any] | None]:
        unknown = [name for name in types if name not in self.columns]
        if unknown:
            raise UsageError(
                f"{self.place} has no column {', '.join(unknown)}",
                hint=f"it has {', '.join(self.columns)}",
            )
        turns = (types.get(name) for name in self.columns)
        return [_to_bool if turn is bool else turn for turn in turns]

    def _cells(self, text: bytes) -> list[str]:
        try:
            decoded = text.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8: {error.reason} in byte {error.start}") from None
        try:
            return next(self._reader(io.StringIO(decoded, newline="")))
        except csv.Error as error:
            more = f"; csv.field_size_limit allows {csv.field_size_limit()} characters in a cell"
            said = str(error) + (more if len(decoded) > csv.field_size_limit() else "")
            raise ValueError(f"not CSV: {said}") from None

    def _reader(self, lines: Iterable[str]) -> Iterator[list[str]]:
        # Not strict, it would take half a row for a whole one.
        return csv.reader(lines, delimiter=self._delimiter, quotechar=self._quotechar, strict=True)

    def _split(self, lines: Iterable[bytes]) -> Iterator[Found]:
        """The lines, those of a row put together."""
        feed = _Feed(numbered(lines, self.place))
        reader = self._reader(feed)
        while True:
            feed.taken.clear()
            try:
                next(reader)
            except StopIteration:
                return
            except csv.Error:
                feed.give_back_after_an_open_quote()
                reader = self._reader(feed)
            if feed.taken:
                start, number, first = feed.taken[0]
                if not is_blank(first):
                    yield start, number, b"".join(text for _, _, text in feed.taken)


class _Feed:
    """Lines for a reader, and which of them it has taken."""

    def __init__(self, source: Iterator[Found]) -> None:
        self._source, self._again = source, deque[Found]()
        self._ended = False
        self.taken: list[Found] = []

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._again.popleft() if self._again else next(self._source, None)
        if line is None:
            self._ended = True
            raise StopIteration
        self.taken.append(line)
        # One character a byte: what separates cells is ASCII, and nothing else matters here.
        return line[2].decode("latin-1")

    def give_back_after_an_open_quote(self) -> None:
        """All lines but the first, if it went on to the end, or as far as a text may go."""
        size = sum(len(text) for _, _, text in self.taken)
        if self._ended or size > csv.field_size_limit():
            self._again.extendleft(reversed(self.taken[1:]))
            del self.taken[1:]
            self._ended = False


def _to_bool(text: str) -> bool:
    word = text.strip().lower()
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise ValueError("neither true nor false")
