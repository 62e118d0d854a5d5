"""Shelf: the values that go with a machine's book, filed under the same keys.

Contributions lie here until they are added up, results until their round is stable. All of it is
blocks of one pool. What a sender's contributions take up is counted, and it is told when they are
used (see flow).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from manyhands.collectives import events as e
from manyhands.collectives.flow import Receiving
from manyhands.collectives.messages import Part, Sum, Tag
from manyhands.collectives.pool import Block, Pool
from manyhands.collectives.results import Result
from manyhands.core.peers import ViewNumber


class PartKey(NamedTuple):
    """One contribution."""

    round: int
    attempt: Tag
    k: int
    sender: int

    @classmethod
    def of(cls, part: Part, sender: int) -> PartKey:
        """Where this one lies."""
        return cls(part.round, part.attempt, part.k, sender)


class SumKey(NamedTuple):
    """One result."""

    round: int
    attempt: Tag
    k: int

    @classmethod
    def of(cls, head: Sum) -> SumKey:
        """Where this one lies."""
        return cls(head.round, head.attempt, head.k)


class Filed(NamedTuple):
    """A contribution; without a block it is this peer's own, or has no values."""

    part: Part
    block: Block | None


class Shelf:
    """Not thread-safe. `told(sender, cut, total)` is called when a sender is due to be told."""

    def __init__(self, pool: Pool, told: Callable[[int, ViewNumber, int], None]) -> None:
        self._pool, self._told = pool, told
        self._allowance = 0  # of each sender; until an attempt begins, whatever comes is told
        self.parts: dict[PartKey, Filed] = {}
        self.sums: dict[SumKey, Block] = {}
        self._kept: Result | None = None
        self._accounts: dict[tuple[ViewNumber, int], Receiving] = {}

    # -- contributions --------------------------------------------------------------------------

    def add_part(self, sender: int, part: Part, block: Block | None, *, own: bool = False) -> bool:
        """File a contribution; False, and the block is free again, if it is there already."""
        if block is not None and not own:
            at = (part.attempt.cut, sender)
            account = self._accounts.setdefault(at, Receiving(self._allowance))
            account.came += block.tensor.numel()
        key = PartKey.of(part, sender)
        if key in self.parts:
            self._free(key, block)
            return False
        self.parts[key] = Filed(part, block)
        return True

    def contributions(self, head: Sum) -> dict[int, Filed]:
        """What goes into a result, by member, in roster order."""
        return {peer: self.parts[key] for peer, key in _keys(head).items()}

    def drop_contributions(self, head: Sum) -> None:
        """That result is made."""
        for key in _keys(head).values():
            self.drop_part(key)

    def drop_part(self, key: PartKey) -> None:
        """It has been added up, or will not be."""
        filed = self.parts.pop(key, None)
        if filed is not None:
            self._free(key, filed.block)

    def drop_parts(self, unwanted: Callable[[PartKey], bool]) -> None:
        """All of these."""
        for key in [key for key in self.parts if unwanted(key)]:
            self.drop_part(key)

    def _free(self, key: PartKey, block: Block | None) -> None:
        if block is None:
            return
        size = block.tensor.numel()
        self._pool.give(block)
        account = self._accounts.get((key.attempt.cut, key.sender))
        total = None if account is None else account.use(size)
        if total is not None:
            self._told(key.sender, key.attempt.cut, total)

    def begin(self, cut: ViewNumber, allowance: int) -> None:
        """An attempt begins: what came before this cut does not count, senders have so much."""
        self._allowance = allowance
        self._accounts = {key: a for key, a in self._accounts.items() if key[0] >= cut}
        for (of_cut, sender), account in self._accounts.items():
            total = account.resize(allowance)
            if total is not None:
                self._told(sender, of_cut, total)

    # -- results --------------------------------------------------------------------------------

    def add_sum(self, head: Sum, block: Block) -> bool:
        """File a result; False, and the block is free again, if it is there already."""
        key = SumKey.of(head)
        if key in self.sums:
            self._pool.give(block)
            return False
        self.sums[key] = block
        return True

    def drop_sums(self, unwanted: Callable[[SumKey], bool]) -> None:
        """These are not needed any more."""
        for key in [key for key in self.sums if unwanted(key)]:
            self._pool.give(self.sums.pop(key))

    def result(self, head: Sum) -> Block:
        """A result that is held, or kept from the last round."""
        held = self.sums.get(SumKey.of(head))
        if held is None:
            assert self._kept is not None, "the machine asks for what it holds or keeps"
            held = self._kept.block(head.k)
        return held

    def take_round(self, round_: int, attempt: Tag, num_parts: int) -> dict[int, Block]:
        """The results of a round that is committed; all else of it goes."""
        blocks = {k: self.sums.pop(SumKey(round_, attempt, k)) for k in range(num_parts)}
        self.drop_parts(lambda key: key.round <= round_)
        self.drop_sums(lambda key: key.round <= round_)
        return blocks

    def keep(self, result: Result | None) -> None:
        """Keep this result, for those who lack it, instead of the one before."""
        if self._kept is not None:
            self._kept.release()
        self._kept = result

    # -- both -----------------------------------------------------------------------------------

    def discard(self, arrival: e.Arrival) -> None:
        """What came with this event is not needed."""
        match arrival:
            case e.PartArrived():
                self.drop_part(PartKey.of(arrival.part, arrival.sender))
            case e.SumArrived() | e.Summed():
                self.drop_sums(SumKey.of(arrival.sum).__eq__)
            case e.FillArrived():
                self.drop_sums(SumKey.of(arrival.fill.sum).__eq__)

    def clear(self) -> None:
        """Start over."""
        self.drop_parts(lambda key: True)
        self.drop_sums(lambda key: True)
        self.keep(None)


def _keys(head: Sum) -> dict[int, PartKey]:
    peers = (share.peer for share in head.contributions)
    return {peer: PartKey(head.round, head.attempt, head.k, peer) for peer in peers}
