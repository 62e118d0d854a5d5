"""Early: what has come for operations that this member has not started, and which it has finished.

Members run ahead of each other, so data and words of an operation come before its start. After its
end nothing can come: whatever does was sent by a member that called it with other sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from manyhands.collectives.backend.failure import TeamFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from manyhands.collectives.backend import messages as words
    from manyhands.collectives.backend.exchange import Key
    from manyhands.collectives.pool import Block

# How far two members can be apart: words for operations to come, and operations that are done.
_MAX_KEYS = 4096


class Arrival(NamedTuple):
    """A piece of a rank's, in a block."""

    sender: int
    piece: words.Piece
    block: Block


class Placed(NamedTuple):
    """A piece whose buffer is being received: in its target's memory, or (with it) in a block."""

    piece: words.Piece
    block: Block | None


class Early:
    """By operation. How many bytes are kept here, `flow` bounds. Not thread-safe."""

    def __init__(self) -> None:
        self._arrivals: dict[Key, list[Arrival]] = {}
        self._shown: dict[Key, set[int]] = {}
        self._finished: dict[Key, None] = {}

    def keep(self, key: Key, arrival: Arrival) -> None:
        """Until its operation starts. Raises TeamFailed if that one has finished without it."""
        if key in self._finished:
            piece = arrival.piece
            raise TeamFailed(
                f"rank {arrival.sender} sent piece {piece.k} of `{piece.form}`, which this rank "
                f"has finished: it expects no bytes there",
                hint="sizes given to one operation must agree between its members",
            )
        self._arrivals.setdefault(key, []).append(arrival)

    def show(self, key: Key, rank: int) -> None:
        """That rank is at work on it. A word for one that has finished came too late to matter."""
        if key not in self._finished:
            self._shown.setdefault(key, set()).add(rank)
            _forget_oldest(self._shown)

    def waiting(self) -> Sequence[Key]:
        """The operations that data has come for."""
        return list(self._arrivals)

    def take(self, key: Key) -> tuple[Sequence[Arrival], set[int]]:
        """An operation starts: what has come for it, and the ranks that are at work on it."""
        arrivals = self._arrivals.pop(key, [])
        shown = self._shown.pop(key, set[int]())
        return arrivals, shown.union(arrival.sender for arrival in arrivals)

    def finish(self, key: Key) -> None:
        """An operation that was taken has ended well: nothing is missing from it."""
        self._finished[key] = None
        _forget_oldest(self._finished)

    def clear(self) -> None:
        """Nothing starts any more."""
        self._arrivals.clear()


def _forget_oldest(keys: dict[Key, set[int]] | dict[Key, None]) -> None:
    if len(keys) > _MAX_KEYS:
        del keys[next(iter(keys))]
