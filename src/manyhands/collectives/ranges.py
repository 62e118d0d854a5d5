"""Ranges: a set of sample positions of one round, as sorted [start, stop) spans.

Every set that the peers of a round exchange (shares, claims, quarantine, parts held) is one of
these. They are values: each operation returns a new one, and equal sets are equal values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec

MAX_SPANS = 1024  # of one set: what a round can fragment into before something is wrong

_Position = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
_Spans = Annotated[tuple[tuple[_Position, _Position], ...], msgspec.Meta(max_length=MAX_SPANS)]


class Ranges(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A set of positions. The spans are not empty, in order, and do not touch each other.

    Raises ValueError for spans that break this, so that a set has one form only; over the wire
    that is a schema error like any other. `Ranges.of` normalises.
    """

    spans: _Spans = ()

    def __post_init__(self) -> None:
        last = -1
        for start, stop in self.spans:
            if not last < start < stop:
                raise ValueError(f"spans {self.spans[:8]} are not in normal form")
            last = stop

    @classmethod
    def of(cls, *spans: tuple[int, int]) -> Ranges:
        """The union of any [start, stop) spans: empty ones, touching ones, in any order."""
        out: list[tuple[int, int]] = []
        for start, stop in sorted(spans):
            if start >= stop:
                continue
            if out and start <= out[-1][1]:
                out[-1] = (out[-1][0], max(stop, out[-1][1]))
            else:
                out.append((start, stop))
        return cls(tuple(out))

    @classmethod
    def whole(cls, count: int) -> Ranges:
        """The first `count` positions."""
        return cls(((0, count),)) if count else EMPTY

    @classmethod
    def union(cls, sets: Iterable[Ranges]) -> Ranges:
        """Everything that is in one of these sets."""
        return cls.of(*(span for ranges in sets for span in ranges.spans))

    def __bool__(self) -> bool:
        return bool(self.spans)

    def __len__(self) -> int:
        """How many positions, not how many spans."""
        return sum(stop - start for start, stop in self.spans)

    def __iter__(self) -> Iterator[int]:
        for start, stop in self.spans:
            yield from range(start, stop)

    def __contains__(self, position: int) -> bool:
        return any(start <= position < stop for start, stop in self.spans)

    def __or__(self, other: Ranges) -> Ranges:
        if not other.spans or self.spans == other.spans:
            return self
        return other if not self.spans else Ranges.of(*self.spans, *other.spans)

    def __sub__(self, other: Ranges) -> Ranges:
        if not other.spans or not self.spans:
            return self
        out: list[tuple[int, int]] = []
        holes = other.spans
        for start, stop in self.spans:
            at = start
            for low, high in holes:
                if high <= at:
                    continue
                if low >= stop:
                    break
                if low > at:
                    out.append((at, low))
                at = high
            if at < stop:
                out.append((at, stop))
        return Ranges(tuple(out))

    def __and__(self, other: Ranges) -> Ranges:
        return self - (self - other)

    def pieces(self, sizes: Iterable[int]) -> list[Ranges]:
        """Cut the set, in order of position, into pieces of these sizes; what is left is dropped.

        Sizes beyond the end of the set give smaller or empty pieces.
        """
        out: list[Ranges] = []
        spans = list(reversed(self.spans))
        for size in sizes:
            piece: list[tuple[int, int]] = []
            while size > 0 and spans:
                start, stop = spans.pop()
                if stop - start > size:
                    spans.append((start + size, stop))
                    stop = start + size
                piece.append((start, stop))
                size -= stop - start
            out.append(Ranges(tuple(piece)) if piece else EMPTY)
        return out

    def __str__(self) -> str:
        spans = (
            f"{start}-{stop - 1}" if stop - start > 1 else f"{start}" for start, stop in self.spans
        )
        return "{" + ", ".join(spans) + "}"


EMPTY = Ranges()
