"""Mixture: several tables as one, mixed by weights; which sample comes when is computed.

A mixture is an endless sequence: a pure function from a position to (table, sample). In any prefix
each table has its share of the positions, to within a sample or so. A table is gone through without
repetition; once through, it is shuffled anew and begun again.

An *epoch* is a stretch of this sequence: epoch e is positions [e n, (e + 1) n), where n is `len()`.
Without weights the shares are the sizes, and every sample of every table comes once in an epoch.
With weights an epoch has by default as many samples as the tables together: of some tables there
are then more than one pass in it, of others only a part, and the next epoch goes on from there.

So a mixture has an order of its own, and to shuffle its positions once more would undo the shares.
`order_of_epoch` is how a loader asks for it.

The numbers here, like those of Order, are part of the format of checkpoints.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from manyhands.core.errors import UsageError
from manyhands.data.order import Order
from manyhands.data.source import check_whole
from manyhands.data.table import place_of

if TYPE_CHECKING:
    from torch import Tensor

_REMEMBERED = 64  # orders of tables: each has its keys, which take longer to make than to use


class Drawn(NamedTuple):
    """What comes at a position: which table, and which of its samples."""

    table: int
    sample: int


class Mixture:
    """Tables, and any map-style data sets, as one table. Weights are relative, and positive.

    `size` is the length of an epoch. `shuffle=False` goes through each table in its own order.
    Samples are handed on as their tables have them. Positions beyond an epoch's are those of the
    next.
    """

    def __init__(
        self,
        tables: Sequence[Any],
        weights: Sequence[float] | None = None,
        *,
        seed: int = 0,
        size: int | None = None,
        shuffle: bool = True,
    ) -> None:
        if not tables:
            raise UsageError("a mixture of no tables", hint="give one or more")
        self._tables, self._sizes = list(tables), [len(table) for table in tables]
        for number, length in enumerate(self._sizes):
            if not length:
                raise UsageError(f"table {number} of the mixture is empty", hint="leave it out")
        size = None if size is None else check_whole("size", size)
        if size is not None and size < 1:
            raise UsageError(f"an epoch of {size} samples", hint="1 or more")
        self._size = sum(self._sizes) if size is None else size
        self._seed, self._shuffle = seed, shuffle
        self._shares = self._sizes if weights is None else _whole(weights, len(self._tables))
        self._turns = _Turns.over(self._shares)

    def __len__(self) -> int:
        """Samples of an epoch."""
        return self._size

    def __getitem__(self, position: int) -> Any:  # noqa: ANN401
        table, sample = self.drawn(position)
        return self._tables[table][sample]

    def __iter__(self) -> Iterator[Any]:
        return (self[position] for position in range(self._size))

    def where(self, position: int) -> str:
        """The file of the sample at a position, and its place there."""
        table, sample = self.drawn(position)
        return place_of(self._tables[table], sample)

    def drawn(self, position: int) -> Drawn:
        """What comes at a position."""
        if position < 0:
            raise IndexError(f"position {position} of a mixture: they begin with 0")
        table, turn = self._turns.at(position)
        lap, place = divmod(turn, self._sizes[table])
        if not self._shuffle:
            return Drawn(table, place)
        return Drawn(table, _order(self._sizes[table], f"{self._seed}:{table}", lap).place(place))

    def drawn_from(self, position: int) -> tuple[Any, int]:
        """The table of the sample at a position, and its number there."""
        table, sample = self.drawn(position)
        return self._tables[table], sample

    @property
    def order_digest(self) -> str:
        """Of what its sequence depends on: seed, sizes, shares, length of an epoch."""
        known = (self._seed, self._sizes, self._shares, self._size, self._shuffle)
        return hashlib.blake2b(repr(known).encode(), digest_size=8).hexdigest()

    def order_of_epoch(self, epoch: int) -> EpochOrder:
        """The positions of an epoch, for a loader."""
        return EpochOrder(self._size, epoch)


class EpochOrder:
    """Positions of one epoch of an endless sequence, in their order."""

    def __init__(self, size: int, epoch: int) -> None:
        self.size, self._first = size, size * epoch

    def __len__(self) -> int:
        return self.size

    def indices(self, start: int, stop: int) -> Tensor:
        """Those at places [start, stop) of the epoch, as int64."""
        import torch

        if not 0 <= start <= stop <= self.size:
            raise UsageError(f"positions {start} to {stop} of an epoch of {self.size} samples")
        return torch.arange(self._first + start, self._first + stop)


class _Turns:
    """Whose turn it is. A tree: at each fork, the positions are dealt out to two sides.

    Of the first p positions of a fork, the left side with share a of a + b has p a / (a + b),
    rounded. So a side is never off its share of the fork by more than half a sample, and a table
    of k, whose fork is at most log2 k (rounded up) deep, by no more than half of that.
    """

    def __init__(self, first: int, shares: Sequence[int]) -> None:
        self._first, self._total = first, sum(shares)
        self._sides: tuple[_Turns, _Turns] | None = None
        if len(shares) > 1:
            middle = (len(shares) + 1) // 2
            self._left = sum(shares[:middle])
            self._sides = _Turns(first, shares[:middle]), _Turns(first + middle, shares[middle:])

    @classmethod
    def over(cls, shares: Sequence[int]) -> _Turns:
        """Of tables with these shares."""
        return cls(0, shares)

    def at(self, position: int) -> tuple[int, int]:
        """The table at a position, and how often it came before."""
        node = self
        while node._sides is not None:
            before, after = node._to_left(position), node._to_left(position + 1)
            if after > before:
                node, position = node._sides[0], before
            else:
                node, position = node._sides[1], position - before
        return node._first, position

    def _to_left(self, number: int) -> int:
        """Of the first positions."""
        return (2 * number * self._left + self._total) // (2 * self._total)


@lru_cache(maxsize=_REMEMBERED)
def _order(size: int, seed: str, lap: int) -> Order:
    return Order(size, seed=seed, epoch=lap)


def _whole(weights: Sequence[float], number: int) -> list[int]:
    """Whole numbers in the same proportion, exactly."""
    if len(weights) != number:
        raise UsageError(f"{len(weights)} weights for {number} tables", hint="one for each")
    wrong = [w for w in weights if not (math.isfinite(w) and w > 0)]
    if wrong:
        raise UsageError(
            f"weights {wrong}", hint="positive numbers; a table without weight is left out"
        )
    exact = [Fraction(w) for w in weights]
    scale = math.lcm(*(w.denominator for w in exact))
    whole = [int(w * scale) for w in exact]
    common = math.gcd(*whole)
    return [w // common for w in whole]
