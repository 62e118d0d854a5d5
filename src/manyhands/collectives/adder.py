"""Adder: what an owner does with the contributions to a part."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor

from manyhands.collectives.bank import Bank
from manyhands.collectives.codecs import Codec, accumulator_of
from manyhands.collectives.layout import Layout
from manyhands.collectives.messages import Fault, Part, Sum
from manyhands.collectives.pool import Block, Pool
from manyhands.collectives.ranges import Ranges
from manyhands.collectives.reduction import Contribution, Operator, PartSum, arithmetic_for
from manyhands.collectives.shelf import Filed

_PIECE = 1 << 15  # values whose squares are added up at a time: few enough for fp32
_LEAST = 1e-25  # of such a sum: in a smaller one, squares that fp32 has not may count


class Adder:
    """Adds in roster order, divides by the weight, encodes once. Not thread-safe.

    `refuse`: contributions that are not finite make the attempt void, and so do finite ones whose
    mean is not. With a GradScaler such a result is to be seen instead, by everybody.
    """

    def __init__(self, layout: Layout, bank: Bank, pool: Pool, *, refuse: bool) -> None:
        self._layout, self._bank, self._pool, self._refuse = layout, bank, pool, refuse
        self._widest = max(part.numel for part in layout.parts)
        self._scratch: dict[torch.dtype, Tensor] = {}
        self._wide = torch.empty(_PIECE, dtype=torch.float64)

    def wire_bytes(self, k: int, *, exact: bool = False) -> int:
        """Of the values of part k; -1 for a part that there is not."""
        if k >= self._layout.num_parts:
            return -1
        part = self._layout.parts[k]
        return self._bank.codecs_of(exact=exact)[k].num_bytes(part.numel, part.dtype)

    def result_bytes(self, head: Sum) -> int:
        """What comes with this result; -1 for a part that there is not.

        The mean of nothing has no values. A closing round is one, and takes place while the user
        still reads the last result: two at a time would be more memory than is promised.
        """
        size = self.wire_bytes(head.k, exact=head.exact)
        return size if size < 0 or head.weight > 0 else 0

    def is_whole(self, part: Part, block: Block | None) -> bool:
        """Whether a contribution has the values that it should have."""
        size = 0 if block is None else block.tensor.numel()
        if size != (self.wire_bytes(part.k, exact=part.exact) if part.weight > 0 else 0):
            return False
        return block is None or not size or self._are_values(part.k, block.tensor)

    def is_own_whole(self, part: Part) -> bool:
        """The same of this peer's own, whose values are in the bank."""
        if part.weight <= 0 or self._bank.empty:
            return True
        if self._layout.parts[part.k].dtype is not torch.bool:
            return True  # without joining a part that spans several tensors
        return self._are_values(part.k, self._bank.values(part.k))

    def _are_values(self, k: int, data: Tensor) -> bool:
        """Only bools have bytes that are no value: torch may do anything with those."""
        if self._layout.parts[k].dtype is not torch.bool:
            return True
        return int(data.view(torch.uint8).max()) <= 1

    def add_up(self, head: Sum, filed: Mapping[int, Filed], me: int) -> tuple[Sum, Block]:
        """The head with all that the values say, and the encoded result. `filed` is by member."""
        # A float, as it arrives elsewhere: heads are hashed.
        weight = float(sum(filed[s.peer].part.weight for s in head.contributions))
        # What is refused so far has not the bytes that it should have. Nor has what is whole for a
        # round of the other kind.
        strays = (s.ranges for s in head.contributions if filed[s.peer].part.exact != head.exact)
        refused = head.refused | Ranges.union(strays)
        faults = [Fault(s.peer) for s in head.contributions if s.ranges & refused]
        head = msgspec.structs.replace(head, refused=refused, faults=tuple(faults))
        if weight <= 0:
            return msgspec.structs.replace(head, weight=weight), self._pool.take(0)
        shape = self._layout.parts[head.k]
        codec = self._bank.codecs_of(exact=head.exact)[head.k]
        arithmetic = arithmetic_for(Operator.SUM, shape.dtype)
        block = self._pool.take(self.wire_bytes(head.k, exact=head.exact))
        given = [
            s.peer
            for s in head.contributions
            if filed[s.peer].part.exact == head.exact and self._counts(filed[s.peer], s.peer == me)
        ]
        apart = arithmetic.narrow or not codec.raw  # the total is not what is sent
        total = (
            self._memory(shape.numel, arithmetic.total_dtype)
            if apart
            else block.tensor.view(arithmetic.total_dtype)
        )
        # What the codec leaves out of a sum is owed; one of this peer's own alone owes it already.
        feedback = None if codec.raw or given == [me] else self._bank.feedback
        adding = PartSum(max(1, len(given)), arithmetic, codec, lambda: total)
        if not given:
            total.zero_()
        for place, peer in enumerate(given):
            if peer == me and (codec.raw or feedback is not None):
                values = self._bank.values(head.k).view(arithmetic.dtype)
                adding.offer(place, Contribution(values, False, _nothing))
            else:
                adding.offer(place, self._contribution(head.k, codec, filed[peer], own=peer == me))
        owes = feedback is not None and feedback.compensate(head.k, total)
        if weight != 1.0 and (shape.dtype.is_floating_point or shape.dtype.is_complex):
            total.div_(weight)
        if apart:
            codec.encode(total, block.tensor)
        if feedback is not None and owes:
            codec.add(block.tensor, total, sign=-1)
            feedback.owe(head.k, total.mul_(weight))
        if head.exact:  # no mean: it is as it is, and nobody's fault
            return msgspec.structs.replace(head, weight=weight), block
        norm = self._squared_norm(head.k, block)
        if self._refuse and not math.isfinite(norm):
            more = self._at_fault(head.k, {peer: filed[peer] for peer in given}, block)
            refused |= more[0]
            faults += more[1]
        if not math.isfinite(norm) or head.k >= self._layout.num_measured:
            norm = 0.0
        found = {"refused": refused, "faults": tuple(faults)}
        return msgspec.structs.replace(head, weight=weight, squared_norm=norm, **found), block

    def _counts(self, filed: Filed, own: bool) -> bool:
        if filed.part.weight <= 0:
            return False
        if own:
            return not self._bank.empty and self.is_own_whole(filed.part)
        return self.is_whole(filed.part, filed.block)

    def _contribution(self, k: int, codec: Codec, filed: Filed, *, own: bool) -> Contribution:
        if not own:
            assert filed.block is not None
            dtype = arithmetic_for(Operator.SUM, self._layout.parts[k].dtype).dtype
            values = filed.block.tensor.view(dtype) if codec.raw else filed.block.tensor
            return Contribution(values, not codec.raw, _nothing)
        # As if it had travelled: the result must not depend on who adds it up.
        block = self._pool.take(self._bank.num_bytes(k))
        self._bank.encode(k, block.tensor)
        return Contribution(block.tensor, True, lambda: self._pool.give(block))

    def _memory(self, numel: int, dtype: torch.dtype) -> Tensor:
        if dtype not in self._scratch:
            with torch.inference_mode(False):  # the next one to use it may be outside of it
                self._scratch[dtype] = torch.empty(self._widest, dtype=dtype)
        return self._scratch[dtype][:numel]

    def _squared_norm(self, k: int, block: Block) -> float:
        """Of the decoded result; not finite if the result is not. Integers have none."""
        dtype = self._layout.parts[k].dtype
        if not (dtype.is_floating_point or dtype.is_complex):
            return 0.0
        values = self._decoded(k, block)
        exact = values.dtype in (torch.float32, torch.float64)
        squared = 0.0
        for start in range(0, values.numel(), _PIECE):
            piece = values[start : start + _PIECE]
            part = float(torch.dot(piece, piece)) if exact else 0.0
            if not _LEAST < part < math.inf:
                # Widened one after the other: torch's own norm in fp64 makes a copy of all of it,
                # of changing size, which leaves holes in the heap.
                wide = self._wide[: piece.numel()].copy_(piece)
                part = float(torch.dot(wide, wide))
            squared += part
        return squared

    def _decoded(self, k: int, block: Block) -> Tensor:
        """What everybody will read, as real numbers; good until the next part is added up."""
        shape, codec = self._layout.parts[k], self._bank.codecs[k]
        if codec.raw:
            return _reals(block.tensor.view(shape.dtype))
        values = self._memory(shape.numel, accumulator_of(shape.dtype))
        codec.decode(block.tensor, values)
        return values

    def _at_fault(
        self, k: int, filed: Mapping[int, Filed], block: Block
    ) -> tuple[Ranges, list[Fault]]:
        """The samples without which the result would be finite, of a result without a norm.

        If all contributions are finite and their mean is not, it is nobody's fault alone: none of
        them counts. If only the norm is too large for a number, all is well.
        """
        faults = self._not_finite(k, filed)
        if faults or bool(self._decoded(k, block).isfinite().all()):
            return Ranges.union(filed[fault.peer].part.ranges for fault in faults), faults
        return Ranges.union(one.part.ranges for one in filed.values()), []

    def _not_finite(self, k: int, filed: Mapping[int, Filed]) -> list[Fault]:
        """Those contributions that hold values which are not finite."""
        shape, codec = self._layout.parts[k], self._bank.codecs[k]
        faults: list[Fault] = []
        for peer, one in filed.items():
            values = torch.empty(shape.numel, dtype=shape.dtype)
            if one.block is None:
                values.copy_(self._bank.values(k))
            else:
                codec.decode(one.block.tensor, values)
            finite = _reals(values).isfinite()
            if not bool(finite.all()):
                place = int(finite.logical_not().nonzero()[0]) * values.numel() // finite.numel()
                faults.append(Fault(peer, self._layout.tensor_at(k, place)))
        return faults


def _reals(values: Tensor) -> Tensor:
    """What complex numbers are made of; the narrowest floats as ones that torch calculates with."""
    if values.dtype.is_complex:
        return values.view(values.dtype.to_real())
    return values.to(torch.float32) if values.dtype.itemsize == 1 else values


def _nothing() -> None:
    pass
