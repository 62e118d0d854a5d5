"""Bank: what this peer has computed of a round, until the round is committed.

The tensors of the first pass are lent to the bank and sent from where they are; those of later
passes are added to them. They stay as they are while anybody may still ask for them: an attempt
that a death has made void is repeated with the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from manyhands.collectives.codecs import Codec, codec_for
from manyhands.collectives.feedback import Feedback
from manyhands.collectives.layout import Layout
from manyhands.collectives.pool import Pool, lasting_memory
from manyhands.collectives.results import join
from manyhands.collectives.staging import Staging
from manyhands.wire.tensors import bytes_of

_SPARE_BLOCKS = 16  # at least, besides those of one result
_MAX_PIECES = 64  # of one message: beyond that, one copy costs less than many small buffers

Coded = tuple[Sequence[memoryview], Callable[[], None]]


def pool_for(layout: Layout, wire: str, ahead_bytes: int) -> Pool:
    """Blocks for parts as they travel: of one result, and of so much that comes meanwhile."""
    sizes = (codec_for(wire, p.dtype).num_bytes(p.numel, p.dtype) for p in layout.parts)
    block_bytes = max(sizes)
    spare = max(_SPARE_BLOCKS, ahead_bytes // block_bytes)
    return Pool(block_bytes, layout.num_parts + spare)


class Bank:
    """One round's contribution of this peer. The engine's lock guards it."""

    def __init__(self, layout: Layout, wire: str, pool: Pool) -> None:
        self._layout, self._pool = layout, pool
        self.codecs: tuple[Codec, ...] = tuple(codec_for(wire, p.dtype) for p in layout.parts)
        self._raw: tuple[Codec, ...] = tuple(codec_for("fp32", p.dtype) for p in layout.parts)
        self.exact = False  # what is in here travels as it is
        # What int8 leaves out is too much to lose; the halves' rounding is noise of no bias.
        parts = [(part.numel, part.dtype) for part in layout.parts]
        self.feedback = Feedback(wire, parts) if wire == "int8" else None
        self._flats: list[Tensor] | None = None
        self._room: Tensor | None = None  # for one part
        self._staging = Staging()
        self._on_gpu = False  # some of the values
        self._tentative = False  # they are of a first pass that is not done
        self.weight = 0.0
        self.generation = 0  # grows when what was computed does not count any more

    def codecs_of(self, *, exact: bool) -> tuple[Codec, ...]:
        """Of the parts; `exact`: those that change nothing."""
        return self._raw if exact else self.codecs

    @property
    def empty(self) -> bool:
        """Whether there are no values: a contribution of weight 0."""
        return self._flats is None

    @property
    def flats(self) -> list[Tensor]:
        """All values, flat; none if it is empty."""
        return [] if self._flats is None else self._flats

    def num_bytes(self, k: int) -> int:
        """Of a contribution to part k on the wire; an empty bank sends none."""
        part = self._layout.parts[k]
        codec = self.codecs_of(exact=self.exact)[k]
        return 0 if self.empty else codec.num_bytes(part.numel, part.dtype)

    def begin(self, *, exact: bool) -> None:
        """An attempt begins: all is encoded, and owed, anew. Of an exact one nothing is."""
        self.exact = exact
        if self.feedback is not None:
            self.feedback.abandon()

    def show(self, flats: list[Tensor], weight: float) -> bool:
        """The tensors of a pass that is under way; False if others are in here already.

        So parts can be sent as they become final. A pass that is never done leaves no trace. Not
        those of a GPU, which would have to be waited for.
        """
        taken = self._flats is not None and not self._tentative
        if taken or any(flat.is_cuda for flat in flats):
            return False
        self._flats, self.weight, self._tentative = flats, weight, True
        return True

    def lend(self, flats: list[Tensor], weight: float) -> None:
        """Take in a pass: weighted sums. The tensors of the first are kept, not copied.

        Those of a GPU stay there until `fetch`.
        """
        if self._flats is None or self._tentative:
            self._flats, self.weight, self._tentative = flats, weight, False
            self._on_gpu = any(flat.is_cuda for flat in flats)
            return
        with torch.no_grad():
            for mine, more in zip(self._flats, flats, strict=True):
                mine.add_(more.to(mine.device))
        self.weight += weight

    def fetch(self) -> None:
        """From here on the values are on the CPU: they are to be sent, or added up."""
        if self._flats is not None and self._on_gpu:
            self._flats, self._on_gpu = self._staging.fetch(self._flats), False

    def clear(self) -> None:
        """Nothing in here counts; a pass that is under way will not either."""
        self._flats, self.weight, self._tentative = None, 0.0, False
        self.generation += 1
        if self.feedback is not None:
            self.feedback.abandon()  # what a codec left out of values that nobody counted

    def values(self, k: int) -> Tensor:
        """Part k as one flat tensor; if it spans several, a copy that is good until the next."""
        assert self._flats is not None
        slices = self._layout.slices(k, self._flats)
        if len(slices) == 1:
            return slices[0]
        part = self._layout.parts[k]
        if self._room is None:
            self._room = lasting_memory(max(part.num_bytes for part in self._layout.parts))
        values = self._room[: part.num_bytes].view(part.dtype)
        join(slices, values)
        return values

    def copies(self, k: int) -> bool:
        """Whether part k is sent from a copy, which is free again when it has left."""
        raw = self.codecs_of(exact=self.exact)[k].raw
        return not raw or len(self._layout.parts[k].slices) > _MAX_PIECES

    def coded(self, k: int) -> Coded:
        """Part k as it travels, and what to call when it has left."""
        assert self._flats is not None
        if not self.copies(k):
            return [bytes_of(piece) for piece in self._layout.slices(k, self._flats)], _nothing
        block = self._pool.take(self.num_bytes(k))
        self.encode(k, block.tensor)
        return [block.view], lambda: self._pool.give(block)

    def encode(self, k: int, wire: Tensor) -> None:
        """Part k as bytes of its codec."""
        if self.feedback is not None and not self.exact:
            self.feedback.encode(k, self.values(k), wire)
        else:
            self.codecs_of(exact=self.exact)[k].encode(self.values(k), wire)

    def committed(self) -> None:
        """The round counts, and with it what the codec has left out."""
        if self.feedback is not None:
            self.feedback.commit(self.values)
        self.clear()


def _nothing() -> None:
    pass
