"""Order: which sample comes when in an epoch; a permutation that is computed, not stored.

It is a pure function of seed, epoch and the number of samples, the same on every machine and in
every release: a run that is resumed must meet the samples that are left, so the numbers here are
part of the format of checkpoints.
"""

from __future__ import annotations

import hashlib
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from manyhands.core.errors import UsageError

MAX_SIZE = 1 << 48
_ROUNDS = 8
_WORD = (1 << 32) - 1
_FACTOR = 0x45D9F3B  # odd, and so small that no product of it with a word exceeds an int64

_Numbers = TypeVar("_Numbers", int, Tensor)


class Positions(Protocol):
    """Which sample comes when in one epoch."""

    def indices(self, start: int, stop: int) -> Tensor:
        """The samples at positions [start, stop), as int64."""
        ...


@runtime_checkable
class Ordered(Protocol):
    """A table that has an order of its own, which no shuffling may change.

    `order_digest`, if it has one, is a text by which a state knows that order again.
    """

    def order_of_epoch(self, epoch: int) -> Positions:
        """Of one epoch."""
        ...


class Order:
    """The order of one epoch over `size` samples; without `shuffle` it is theirs.

    A Feistel network permutes the smallest power of four that holds them all; what falls outside is
    sent through it again until it does not. Memory and time for a position do not grow with `size`.
    """

    def __init__(self, size: int, *, seed: int | str, epoch: int, shuffle: bool = True) -> None:
        if not 0 < size <= MAX_SIZE:
            raise UsageError(f"an order of {size} samples: 1 to {MAX_SIZE} are possible")
        self.size, self._shuffle = size, shuffle
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)  # bits of either half
        digest = hashlib.blake2b(f"{seed}:{epoch}".encode(), digest_size=4 * _ROUNDS).digest()
        self._keys = [int.from_bytes(digest[i : i + 4], "little") for i in range(0, len(digest), 4)]

    def __len__(self) -> int:
        return self.size

    def indices(self, start: int, stop: int) -> Tensor:
        """The samples at positions [start, stop), as int64."""
        if not 0 <= start <= stop <= self.size:
            raise UsageError(f"positions {start} to {stop} of an order of {self.size} samples")
        return self.at(torch.arange(start, stop))

    def at(self, positions: Tensor) -> Tensor:
        """The samples at these positions, all of which must be some."""
        if not self._shuffle or self.size == 1:
            return positions.clone()
        values = self._permute(positions)
        while True:
            outside = (values >= self.size).nonzero().flatten()
            if not len(outside):
                return values
            values[outside] = self._permute(values[outside])

    def place(self, position: int) -> int:
        """The sample at one position. Without tensors, which for a single one take much longer."""
        if not 0 <= position < self.size:
            raise UsageError(f"position {position} of an order of {self.size} samples")
        if not self._shuffle or self.size == 1:
            return position
        value = self._permute(position)
        while value >= self.size:
            value = self._permute(value)
        return value

    def _permute(self, values: _Numbers) -> _Numbers:
        low = (1 << self._half) - 1
        left, right = values >> self._half, values & low
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) >> (32 - self._half))
        return (left << self._half) | right


def _mix(words: _Numbers) -> _Numbers:
    """Every bit of a 32-bit word depends on every bit of it."""
    for _ in range(2):
        words = ((words ^ (words >> 16)) * _FACTOR) & _WORD
    return words ^ (words >> 16)
