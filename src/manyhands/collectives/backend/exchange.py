"""Exchange: one collective operation at one member, as what it sends, expects and adds up.

Every operation is put together from three things: pieces of memory that leave, pieces that arrive
in their place, and sums of contributions. `operations` builds them; `team` carries them out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from manyhands.collectives.reduction import Contribution
from manyhands.wire.tensors import verify_received

if TYPE_CHECKING:
    from manyhands.collectives.pool import Block, Pool
    from manyhands.collectives.reduction import PartSum

GIVEN, RESULT = 0, 1  # the steps: what a member gives, what an owner made of it


class Key(NamedTuple):
    """Names an operation at all its members: the `seq`-th of a stream that they share."""

    stream: int
    seq: int


NO_KEY = Key(0, 0)  # of an exchange that has not started


@dataclass(slots=True)
class Outgoing:
    """A piece that leaves for `to` (places in the members' order), or for all others (None).

    `prepare` is called when its turn comes, and gives the bytes. `settled`: nobody needs to wait
    for it, because an answer will show that it has arrived, or because the bytes are a copy.
    """

    to: int | None
    step: int
    k: int
    num_bytes: int
    prepare: Callable[[], memoryview]
    settled: bool
    release: Callable[[], None] | None = None

    @property
    def urgent(self) -> bool:
        """Whether it is all that others may wait for: a sum is, a contribution is not."""
        return self.step != GIVEN


@dataclass(slots=True)
class Target:
    """Where a piece goes: `into` memory if it can be received there as it is, or to `take`.

    `verify` raises if what has been received there cannot be.
    """

    num_bytes: int
    into: memoryview | None = None
    take: Callable[[Block], None] | None = None
    verify: Callable[[], None] | None = None

    def fill(self, block: Block | None) -> None:
        """The piece is here: in a block, or (None) in `into` already."""
        if block is not None and self.take is not None:
            self.take(block)
        elif block is not None and self.into is not None:
            self.into[:] = block.view
        if self.verify is not None:
            self.verify()


@dataclass(slots=True)
class Owned:
    """A sum that this member makes, and what happens to it: `finish` returns what then leaves."""

    adding: PartSum
    num_bytes: int  # of each contribution on the wire
    dtype: torch.dtype | None  # of contributions that come as they are; None: as a codec's bytes
    finish: Callable[[], Sequence[Outgoing]]

    def offer(self, place: int, block: Block, pool: Pool) -> bool:
        """Add a member's contribution, which is then the sum's or goes back to the pool.

        Returns whether the sum is complete. Raises Malformed for bytes that are no values.
        """
        values = block.tensor if self.dtype is None else block.tensor.view(self.dtype)
        verify_received(values)
        release = partial(pool.give, block)
        return self.adding.offer(place, Contribution(values, self.dtype is None, release))


@dataclass(slots=True, eq=False)
class Exchange:
    """One operation. `members` are ranks of the team, in the order of the operation's group."""

    form: str
    members: Sequence[int]
    me: int  # this member's place
    outgoing: list[Outgoing] = field(default_factory=list[Outgoing])
    targets: dict[tuple[int, int, int], Target] = field(
        default_factory=dict[tuple[int, int, int], Target]
    )  # (sender's place, step, k)
    owned: dict[int, Owned] = field(default_factory=dict[int, Owned])
    last: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])
    """Run when everything has arrived, before the operation counts as done."""
    # Kept by the team:
    key: Key = NO_KEY
    starting: bool = True  # what came early is not in its place: who seems missing may be here
    unsettled: int = 0
    shown: set[int] = field(default_factory=set[int])
    deadline_s: float = 0.0
    started_s: float = 0.0
    reported: bool = False  # that it waits for long
    done: Callable[[BaseException | None], None] = lambda error: None

    @property
    def arrived(self) -> bool:
        """Whether nothing is expected any more."""
        return not self.targets and not self.owned

    def waits_for(self) -> list[int]:
        """Ranks whose data is missing."""
        places = {sender for sender, _, _ in self.targets}
        for owned in self.owned.values():
            places.update(owned.adding.missing())
        places.discard(self.me)
        return sorted(self.members[place] for place in places)

    def readers(self) -> list[int]:
        """Ranks that data is for."""
        return sorted({rank for piece in self.outgoing for rank in self.readers_of(piece)})

    def readers_of(self, piece: Outgoing) -> list[int]:
        """Ranks that a piece is for."""
        if piece.to is not None:
            return [self.members[piece.to]]
        return [rank for place, rank in enumerate(self.members) if place != self.me]


class Wanted(NamedTuple):
    """A receive from whoever sends first.

    `keys` are the operations it could become now, and whose data each would take; `take` makes it
    one of them, unless another receive has that one already; `fail` says that nothing will come.
    """

    keys: Callable[[], Mapping[Key, int]]
    take: Callable[[Key], bool]
    fail: Callable[[BaseException], None]
    deadline_s: float
