"""Results: the encoded parts of rounds, from the moment they arrive until nobody needs them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import xxhash
from torch import Tensor

from manyhands.collectives.layout import Layout
from manyhands.collectives.pool import Block, Pool, lasting_memory
from manyhands.core.errors import UsageError

if TYPE_CHECKING:
    from manyhands.collectives.codecs import Codec


_SHOWN_DTYPES = 4  # torch has dozens


def digest_of(block: Block) -> bytes:
    """What two peers compare instead of the values: not against malice, only against mistakes."""
    return xxhash.xxh3_128_digest(block.view)


@torch.no_grad()
def join(pieces: Sequence[Tensor], whole: Tensor) -> None:
    """whole := the pieces, one after the other."""
    torch.cat(list(pieces), out=whole)


def form_of(layout: Layout, wire: str) -> str:
    """What two peers compare instead of their tensors: in words, of at most FORM_CHARS.

    The digest is over each tensor and each part: other models may have as many values.
    """
    values: Counter[str] = Counter()
    for dtype, numel in layout.shapes:
        values[str(dtype).removeprefix("torch.")] += numel
    parts = [(part.dtype, part.numel) for part in layout.parts]
    digest = xxhash.xxh3_64_hexdigest(repr((layout.shapes, parts)).encode())
    counted = ", ".join(f"{numel} {dtype}" for dtype, numel in values.most_common(_SHOWN_DTYPES))
    counted += ", ..." if len(values) > _SHOWN_DTYPES else ""
    return (
        f"wire={wire!r}, {len(layout.shapes)} tensors ({counted}) in {layout.num_parts} parts, "
        f"digest {digest}"
    )


def has_mean(tensor: Tensor) -> bool:
    """Integers and booleans are added up, and that is all."""
    return tensor.is_floating_point() or tensor.is_complex()


class Own:
    """A weighted sum that is all there is of a round, in the memory that was lent for it."""

    def __init__(self, flats: Sequence[Tensor], weight: float) -> None:
        self._flats, self._weight = flats, weight

    @torch.no_grad()
    def read_into(self, tensors: Sequence[Tensor], layout: Layout) -> None:
        """The mean; into the lent tensors themselves costs nothing."""
        if self._weight != 1.0:
            means = [flat for flat in self._flats if has_mean(flat)]
            torch._foreach_div_(means, self._weight)  # pyright: ignore
            self._weight = 1.0
        if [t.data_ptr() for t in tensors] != [t.data_ptr() for t in self._flats]:
            for flat, mine in zip(layout.check(tensors), self._flats, strict=True):
                flat.copy_(mine)


class Result:
    """The average of one round, encoded; every member has the same bytes.

    Two hold it: the engine, until the round is stable, and the user, until `close`. Then its
    memory is used again.
    """

    def __init__(
        self,
        layout: Layout,
        codecs: Sequence[Codec],
        blocks: Mapping[int, Block],
        pool: Pool,
        own: Own | None = None,
    ) -> None:
        """`own`: of a round with a single contribution, that; its blocks are empty."""
        self._layout, self._codecs, self._pool = layout, codecs, pool
        self._blocks, self._own = dict(blocks), own
        self.alone = own is not None
        """Whether nobody else has it; such a round has no norm."""
        self._lock = threading.Lock()
        self._num_holders = 2
        self._closed = False

    def block(self, k: int) -> Block:
        """Part k as it travelled."""
        return self._blocks[k]

    def read_into(self, tensors: Sequence[Tensor]) -> None:
        """Decode into tensors like those that were contributed; often the very same.

        The mean of no samples at all is 0.
        """
        if self._closed:
            raise UsageError("this result was closed", hint="read it before you close it")
        if self._own is not None:
            self._own.read_into(tensors, self._layout)
            return
        flats = self._layout.check(tensors)
        room: Tensor | None = None
        with torch.no_grad():
            for part, codec in zip(self._layout.parts, self._codecs, strict=True):
                wire = self._blocks[part.k].tensor
                slices = self._layout.slices(part.k, flats)
                if not wire.numel():
                    for piece in slices:
                        piece.zero_()
                    continue
                if len(slices) == 1:
                    codec.decode(wire, slices[0])
                    continue
                if codec.raw and part.dtype is not torch.bool:
                    values = wire.view(part.dtype)
                else:
                    if room is None:  # for all parts; not of the heap, where it would leave holes
                        room = lasting_memory(max(p.num_bytes for p in self._layout.parts))
                    values = room[: part.num_bytes].view(part.dtype)
                    codec.decode(wire, values)
                at = 0
                for piece in slices:
                    piece.copy_(values[at : at + piece.numel()])
                    at += piece.numel()

    def close(self) -> None:
        """The user has read it. Idempotent."""
        with self._lock:
            first, self._closed, self._own = not self._closed, True, None
        if first:
            self.release()

    def release(self) -> None:
        """One of its two holders needs it no longer."""
        with self._lock:
            self._num_holders -= 1
            free = self._num_holders == 0
        if free:
            while self._blocks:  # what the pool does not keep is free at once
                self._pool.give(self._blocks.popitem()[1])
