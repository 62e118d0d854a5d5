"""Moves: how the rows of a batch get from one split to the next. Pure; backward is the mirror."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from manyhands.core.plan import Stage


class Rows(NamedTuple):
    """Rows [start, end) of a microbatch."""

    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start

    def within(self, other: Rows) -> slice:
        """Where these rows lie in a tensor that holds `other`."""
        return slice(self.start - other.start, self.end - other.start)


class Move(NamedTuple):
    """Rows that peer `source` has and peer `target` needs; both may be the same peer."""

    source: int
    target: int
    rows: Rows


def cut_batch(num_rows: int, num_microbatches: int) -> tuple[Rows, ...]:
    """A batch in microbatches whose sizes differ by at most one, the larger ones first.

    A batch smaller than their number has empty ones at the end.
    """
    size, larger = divmod(num_rows, num_microbatches)
    sizes = [size + (index < larger) for index in range(num_microbatches)]
    return tuple(Rows(*pair) for pair in pairwise(accumulate(sizes, initial=0)))


def split_rows(num_rows: int, split: Sequence[float]) -> tuple[Rows, ...]:
    """Contiguous rows for each share: at most one row away from what the share says."""
    total = sum(split)
    bounds = [round(num_rows * done / total) for done in accumulate(split, initial=0.0)]
    bounds[-1] = num_rows
    return tuple(Rows(*pair) for pair in pairwise(bounds))


def rows_at(stage: Stage, peer: int, num_rows: int) -> Rows:
    """Which rows of a microbatch a peer of the stage holds."""
    return split_rows(num_rows, stage.split)[stage.peers.index(peer)]


def moves(source: Stage, target: Stage, num_rows: int) -> Iterator[Move]:
    """What must move so that a microbatch split as at `source` is split as at `target`.

    Ordered by the rows; every row of every target is covered exactly once. Backward, the same
    moves are made from target to source.
    """
    here, there = split_rows(num_rows, source.split), split_rows(num_rows, target.split)
    for target_peer, needed in zip(target.peers, there, strict=True):
        for source_peer, held in zip(source.peers, here, strict=True):
            rows = Rows(max(needed.start, held.start), min(needed.end, held.end))
            if rows.start < rows.end:
                yield Move(source_peer, target_peer, rows)
