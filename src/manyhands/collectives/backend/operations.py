"""Operations: each collective as an Exchange. Pure, but for the memory of the tensors.

All tensors here are flat, contiguous and on the CPU; `group` makes them so. Results are a function
of the contributions and the members' order, never of timing. Transfers of any dtype go as bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from manyhands.collectives.backend.exchange import GIVEN, RESULT, Exchange, Outgoing, Owned, Target
from manyhands.collectives.codecs import Codec, codec_for
from manyhands.collectives.parts import cut_parts
from manyhands.collectives.pool import Block, Pool
from manyhands.collectives.reduction import (
    Arithmetic,
    Contribution,
    Operator,
    PartSum,
    arithmetic_for,
)
from manyhands.wire.tensors import bytes_of, verify_received, writable_bytes_of

SMALL_BYTES = 32 << 10
"""Up to here a copy costs less than waiting until it has left."""
DIRECT_BYTES = 4 << 20
"""If all contributions of all to all are no more than this, everybody adds up: one hop, not two.
With many members that is so up to SMALL_BYTES each."""
LARGE_BYTES = 16 << 20
"""From here on it takes longer to copy the sums than to wait until they have left."""


@dataclass(frozen=True, slots=True)
class Maker:
    """Makes exchanges for one member (`me`-th of `members`) of one group."""

    members: Sequence[int]
    me: int
    pool: Pool
    part_bytes: int

    # -- sums -----------------------------------------------------------------------------------

    def all_reduce(self, flat: Tensor, operator: Operator, wire: str = "fp32") -> Exchange:
        """Every member ends with the same bits: the sum, encoded once, as its owner sent it; or, of
        little, as all of them make it from the same contributions in the same order.

        `wire` names the codec of contributions and sums; sums and means may have a lossy one.
        """
        made = self._new(
            "all_reduce", flat, operator.value if wire == "fp32" else f"{operator.value} as {wire}"
        )
        arithmetic = arithmetic_for(operator, flat.dtype)
        num = len(self.members)
        if num == 1 or flat.numel() == 0:
            return made
        values = flat.view(arithmetic.dtype)
        lossy = operator in (Operator.SUM, Operator.MEAN)
        codec = codec_for(wire if lossy else "fp32", values.dtype)
        if codec.raw and values.nbytes <= self._direct_bytes:
            return self._sum_everywhere(made, values, arithmetic, codec)
        parts = cut_parts(values.numel(), values.itemsize, num, self.part_bytes)
        memory, size = writable_bytes_of(values), values.itemsize
        # Each member begins with another owner, so that no owner is flooded while others wait.
        for part in sorted(parts, key=lambda p: (p.k // num, (p.owner - self.me) % num)):
            piece = values[part.start : part.stop]
            view = memory[part.start * size : part.stop * size]
            if part.owner == self.me:
                large = values.nbytes >= LARGE_BYTES
                made.owned[part.k] = self._own(
                    part.k, piece, arithmetic, codec, to_all=True, large=large
                )
            else:
                made.outgoing.append(self._coded(part.owner, part.k, piece, view, codec))
                made.targets[part.owner, RESULT, part.k] = self._result(piece, view, codec)
        return made

    def reduce_scatter(self, chunks: Sequence[Tensor], out: Tensor, operator: Operator) -> Exchange:
        """The sum of everybody's `chunks[i]` ends at member i."""
        sizes = ",".join(str(chunk.numel()) for chunk in _unless_equal(chunks))
        made = self._new("reduce_scatter", chunks[0], f"{operator.value} {sizes}")
        arithmetic = arithmetic_for(operator, out.dtype)
        for turn in range(1, len(self.members) + 1):
            owner = (self.me + turn) % len(self.members)
            self._reduce_to(made, owner, chunks[owner], out, arithmetic)
        return made

    def reduce(self, flat: Tensor, root: int, operator: Operator) -> Exchange:
        """The sum ends at `root`; the others' tensors stay as they are."""
        made = self._new("reduce", flat, f"{operator.value} to {root}")
        self._reduce_to(made, root, flat, flat, arithmetic_for(operator, flat.dtype))
        return made

    def _reduce_to(
        self, made: Exchange, owner: int, given: Tensor, out: Tensor, arithmetic: Arithmetic
    ) -> None:
        if len(self.members) == 1:
            made.last.append(_copier(out, given))
            return
        if owner != self.me:
            self._give(made, owner, given)
            return
        if not given.numel():
            for place in self._others:
                self._expect(made, place, given)
            return
        raw = codec_for("fp32", arithmetic.dtype)
        given = given.view(arithmetic.dtype)
        for k, start in enumerate(self._starts(given)):
            piece = given[start : start + self._elements(given)]
            final = out.view(arithmetic.dtype)[start : start + piece.numel()]
            made.owned[k] = self._own(k, piece, arithmetic, raw, to_all=False, final=final)

    def _sum_everywhere(
        self, made: Exchange, values: Tensor, arithmetic: Arithmetic, codec: Codec
    ) -> Exchange:
        made.outgoing.append(self._copy(values))  # the sum is made in `values`
        made.owned[0] = self._own(0, values, arithmetic, codec, to_all=False)
        return made

    @property
    def _direct_bytes(self) -> int:
        num = len(self.members)
        return min(max(SMALL_BYTES, DIRECT_BYTES // (num * (num - 1))), self.part_bytes)

    def _own(
        self,
        k: int,
        piece: Tensor,
        arithmetic: Arithmetic,
        codec: Codec,
        *,
        to_all: bool,
        large: bool = False,
        final: Tensor | None = None,
    ) -> Owned:
        """The sum of part k, whose own contribution is `piece`; it ends in `final` (or `piece`).

        `large`: it leaves from there too, and the operation waits until it has.
        """
        num, final = len(self.members), piece if final is None else final
        num_bytes = codec.num_bytes(piece.numel(), piece.dtype)
        scratch: list[Block] = []

        def room() -> Tensor:
            scratch.append(self.pool.take(piece.numel() * arithmetic.total_dtype.itemsize))
            return scratch[0].tensor.view(arithmetic.total_dtype)

        # Memory of its own only where the total is not what is sent.
        apart = arithmetic.narrow or not codec.raw
        in_place = final.data_ptr() == piece.data_ptr()
        memory = room if apart else None if in_place else lambda: final
        adding = PartSum(num, arithmetic, codec, memory)
        adding.offer(self.me, Contribution(piece, coded=False, release=_nothing, final=in_place))

        def finish() -> Sequence[Outgoing]:
            if arithmetic.operator is Operator.MEAN:
                _divide(adding.total, num)
            if not apart and not to_all:
                return ()
            if not apart and large:
                view = bytes_of(final)
                return (Outgoing(None, RESULT, k, num_bytes, lambda: view, settled=False),)
            wire = self.pool.take(num_bytes)
            if codec.raw:
                # Not the codec's rounding: what overflows must be inf, as in any torch backend.
                wire.tensor.view(piece.dtype).copy_(adding.total)
            else:
                codec.encode(adding.total, wire.tensor)
            for block in scratch:
                self.pool.give(block)
            if apart:
                with torch.no_grad():
                    codec.decode(wire.tensor, final)
            if not to_all:
                self.pool.give(wire)
                return ()
            return (
                Outgoing(
                    to=None,
                    step=RESULT,
                    k=k,
                    num_bytes=num_bytes,
                    prepare=lambda: wire.view,
                    settled=True,  # the memory is ours, and given back when it has left
                    release=lambda: self.pool.give(wire),
                ),
            )

        return Owned(adding, num_bytes, piece.dtype if codec.raw else None, finish)

    def _coded(self, to: int, k: int, piece: Tensor, view: memoryview, codec: Codec) -> Outgoing:
        """A contribution whose arrival its sum will show."""
        num_bytes = codec.num_bytes(piece.numel(), piece.dtype)
        if codec.raw:
            return Outgoing(to, GIVEN, k, num_bytes, lambda: view, settled=True)
        blocks: list[Block] = []

        def prepare() -> memoryview:
            blocks.append(self.pool.take(num_bytes))
            codec.encode(piece, blocks[0].tensor)
            return blocks[0].view

        def release() -> None:
            for block in blocks:
                self.pool.give(block)

        return Outgoing(to, GIVEN, k, num_bytes, prepare, settled=True, release=release)

    def _result(self, piece: Tensor, view: memoryview, codec: Codec) -> Target:
        num_bytes = codec.num_bytes(piece.numel(), piece.dtype)
        if codec.raw:
            return Target(num_bytes, into=view, verify=_verifier(piece))

        def take(block: Block) -> None:
            with torch.no_grad():
                codec.decode(block.tensor, piece)

        return Target(num_bytes, take=take)

    # -- transfers ------------------------------------------------------------------------------

    def broadcast(self, flat: Tensor, root: int) -> Exchange:
        """Everybody ends with the tensor of `root`."""
        made = self._new("broadcast", flat, f"from {root}")
        if root == self.me:
            self._give(made, None, flat)
        else:
            self._expect(made, root, flat)
        return made

    def all_gather(self, outs: Sequence[Tensor], given: Tensor) -> Exchange:
        """outs[i] := what member i gave."""
        made = self._new("all_gather", given)
        self._give(made, None, given)
        for place, out in enumerate(outs):
            self._place(made, place, out, given)
        return made

    def gather(self, outs: Sequence[Tensor], given: Tensor, root: int) -> Exchange:
        """At `root`: outs[i] := what member i gave."""
        made = self._new("gather", given, f"to {root}")
        if root == self.me:
            for place, out in enumerate(outs):
                self._place(made, place, out, given)
        else:
            self._give(made, root, given)
        return made

    def scatter(self, out: Tensor, chunks: Sequence[Tensor], root: int) -> Exchange:
        """out := the chunk that `root` has for this member."""
        made = self._new("scatter", out, f"from {root}")
        if root == self.me:
            for place, chunk in enumerate(chunks):
                if place == self.me:
                    made.last.append(_copier(out, chunk))
                else:
                    self._give(made, place, chunk)
        else:
            self._expect(made, root, out)
        return made

    def all_to_all(self, outs: Sequence[Tensor], chunks: Sequence[Tensor]) -> Exchange:
        """outs[i] := the chunk that member i has for this one. Sizes may differ."""
        made = self._new("all_to_all", outs[0], numel=False)
        for turn in range(len(self.members)):
            place = (self.me + turn) % len(self.members)
            if place != self.me:
                self._give(made, place, chunks[place])
            self._place(made, place, outs[place], chunks[self.me])
        return made

    def send(self, flat: Tensor, to: int) -> Exchange:
        """To one member, which receives into as much."""
        made = self._new("send", flat)
        self._give(made, to, flat)
        return made

    def receive(self, flat: Tensor, sender: int) -> Exchange:
        """From one member."""
        made = self._new("send", flat)  # both ends are one operation
        self._expect(made, sender, flat)
        return made

    def barrier(self) -> Exchange:
        """Done when everybody has come."""
        made = Exchange("barrier", self.members, self.me)
        made.outgoing.append(Outgoing(None, GIVEN, 0, 0, lambda: memoryview(b""), settled=True))
        for place in self._others:
            made.targets[place, GIVEN, 0] = Target(0, take=_nothing_of)
        return made

    @property
    def _others(self) -> Sequence[int]:
        return [place for place in range(len(self.members)) if place != self.me]

    def _place(self, made: Exchange, place: int, out: Tensor, own: Tensor) -> None:
        if place == self.me:
            made.last.append(_copier(out, own))
        else:
            self._expect(made, place, out)

    def _give(self, made: Exchange, to: int | None, flat: Tensor) -> None:
        if len(self.members) == 1:
            return  # nobody to give it to
        memory, size = bytes_of(flat), self._elements(flat) * flat.itemsize
        # Also of nothing, so that whoever expects more hears of it.
        for k, start in enumerate(range(0, len(memory), size) or (0,)):
            made.outgoing.append(self._plain(to, k, memory[start : start + size]))

    def _copy(self, flat: Tensor) -> Outgoing:
        """All of it to all others, from a copy."""
        if flat.nbytes <= SMALL_BYTES:
            return self._plain(None, 0, bytes_of(flat))
        block = self.pool.take(flat.nbytes)
        block.tensor.copy_(flat.view(torch.uint8))
        return Outgoing(
            to=None,
            step=GIVEN,
            k=0,
            num_bytes=flat.nbytes,
            prepare=lambda: block.view,
            settled=True,
            release=lambda: self.pool.give(block),
        )

    def _plain(self, to: int | None, k: int, view: memoryview) -> Outgoing:
        if len(view) <= SMALL_BYTES:
            view = memoryview(bytes(view))
            return Outgoing(to, GIVEN, k, len(view), lambda: view, settled=True)
        return Outgoing(to, GIVEN, k, len(view), lambda: view, settled=False)

    def _expect(self, made: Exchange, sender: int, flat: Tensor) -> None:
        if not flat.numel():
            made.targets[sender, GIVEN, 0] = Target(0, take=_nothing_of)
            return
        memory, size = writable_bytes_of(flat), flat.itemsize
        for k, start in enumerate(self._starts(flat)):
            piece = flat[start : start + self._elements(flat)]
            view = memory[start * size : start * size + piece.nbytes]
            target = Target(piece.nbytes, into=view, verify=_verifier(piece))
            made.targets[sender, GIVEN, k] = target

    def _elements(self, flat: Tensor) -> int:
        return max(1, self.part_bytes // flat.itemsize)

    def _starts(self, flat: Tensor) -> Iterator[int]:
        return iter(range(0, flat.numel(), self._elements(flat)))

    def _new(self, kind: str, flat: Tensor, more: str = "", *, numel: bool = True) -> Exchange:
        size = f"[{flat.numel()}]" if numel else ""
        dtype = str(flat.dtype).removeprefix("torch.")
        return Exchange(f"{kind} {dtype}{size} {more}".strip()[:200], self.members, self.me)


def _divide(total: Tensor, num: int) -> None:
    # As all_reduce does, which torch gives pairs of numbers: dividing complex ones has other last
    # bits.
    values = torch.view_as_real(total) if total.is_complex() else total
    if num & (num - 1):
        values.div_(num)
    else:
        values.mul_(1 / num)  # the same bits at half the price


def _unless_equal(chunks: Sequence[Tensor]) -> Sequence[Tensor]:
    return () if len({chunk.numel() for chunk in chunks}) == 1 else chunks


def _copier(out: Tensor, given: Tensor):  # noqa: ANN202
    def copy() -> None:
        with torch.no_grad():
            out.view(torch.uint8).copy_(given.view(torch.uint8))

    return copy


def _verifier(piece: Tensor) -> Callable[[], None] | None:
    """Only bools have bytes that are no value."""
    return partial(verify_received, piece) if piece.dtype is torch.bool else None


def _nothing() -> None:
    pass


def _nothing_of(block: Block) -> None:
    pass
