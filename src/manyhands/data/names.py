"""Names: a list of texts in two pieces of memory.

A million Python strings would be copied into every worker process, one by one, as their reference
counts change; these stay where they are.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import overload


class Names(Sequence[str]):
    """As many texts as there are, by number."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        text, ends = bytearray(), array("Q", [0])
        for name in names:
            # A file's name need not be UTF-8: what is not comes back as it was.
            text += name.encode("utf-8", "surrogateescape")
            ends.append(len(text))
        self._text, self._ends = bytes(text), ends

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int, /) -> str: ...
    @overload
    def __getitem__(self, index: slice, /) -> list[str]: ...
    def __getitem__(self, index: int | slice, /) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        place = range(len(self))[index]
        piece = self._text[self._ends[place] : self._ends[place + 1]]
        return piece.decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))
