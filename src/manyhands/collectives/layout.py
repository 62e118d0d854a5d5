"""Layout: a list of tensors as the parts of one flat tensor.

Parts are slices in the order of the tensors; a part may span several small tensors but never two
dtypes, and never tensors whose norm counts beside others. All peers of a run must have the same
layout, so it depends on the tensors alone: not on the number of peers, which changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from manyhands.collectives.reduction import Operator, arithmetic_for
from manyhands.core.errors import UsageError
from manyhands.wire.tensors import spec_of

_ALIGN = 64  # elements: parts begin where vector units like it
_SMALL_BYTES = 64 << 10  # no part is cut smaller than this only to have more of them
_MIN_PARTS = 8  # for tensors that are large enough: that many peers share the adding evenly


class Slice(NamedTuple):
    """Elements [start, stop) of a tensor of the list, as if it were flat."""

    tensor: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class LayoutPart:
    """What part k is made of."""

    k: int
    dtype: torch.dtype
    numel: int
    slices: tuple[Slice, ...]

    @property
    def num_bytes(self) -> int:
        """Of its values in memory."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """Made by `Layout.of`."""

    shapes: tuple[tuple[torch.dtype, int], ...]  # of each tensor: dtype and number of elements
    parts: tuple[LayoutPart, ...]
    num_measured: int  # of the parts: the norm of a mean is that of the first so many

    @classmethod
    def of(
        cls, tensors: Sequence[Tensor], part_bytes: int, *, num_measured: int | None = None
    ) -> Layout:
        """Parts of at most `part_bytes`. The norm is of all tensors, or of the first so many.

        Raises UsageError for tensors that cannot be sent, or not be added up.
        """
        for tensor in tensors:
            spec_of(tensor)
            arithmetic_for(Operator.SUM, tensor.dtype)
        shapes = tuple((tensor.dtype, tensor.numel()) for tensor in tensors)
        parts: list[LayoutPart] = []
        numbered = list(enumerate(shapes))
        most = len(shapes) if num_measured is None else num_measured
        measured = 0
        for (dtype, counts), group in groupby(numbered, lambda item: (item[1][0], item[0] < most)):
            pieces = [(index, numel) for index, (_, numel) in group if numel]
            size = _part_size(sum(numel for _, numel in pieces), dtype.itemsize, part_bytes)
            for slices in _cut(pieces, size):
                numel = sum(s.stop - s.start for s in slices)
                parts.append(LayoutPart(len(parts), dtype, numel, tuple(slices)))
            measured = len(parts) if counts else measured
        if not parts:
            raise UsageError("no values to average: the tensors are empty")
        return cls(shapes, tuple(parts), measured)

    @property
    def num_parts(self) -> int:
        """Into how many parts the tensors are cut."""
        return len(self.parts)

    def check(self, tensors: Sequence[Tensor], *, on_gpu: bool = False) -> list[Tensor]:
        """The tensors flat, if they are those of the layout. Raises UsageError.

        `on_gpu`: they may be there.
        """
        if len(tensors) != len(self.shapes):
            raise UsageError(f"{len(tensors)} tensors came; the layout has {len(self.shapes)}")
        flats: list[Tensor] = []
        for index, (tensor, (dtype, numel)) in enumerate(zip(tensors, self.shapes, strict=True)):
            if tensor.dtype is not dtype or tensor.numel() != numel:
                raise UsageError(
                    f"tensor {index} is {tensor.dtype}[{tensor.numel()}], not {dtype}[{numel}]"
                )
            here = tensor.is_cpu or (on_gpu and tensor.is_cuda)
            if not here or not tensor.is_contiguous():
                raise UsageError(
                    f"tensor {index} is not one piece of CPU memory",
                    hint="copy it into one that is, and contribute that",
                )
            # A view also of a flat one: it keeps the memory that is lent, whatever its owner does.
            flats.append((tensor.detach() if tensor.requires_grad else tensor).view(-1))
        return flats

    def slices(self, k: int, flats: Sequence[Tensor]) -> list[Tensor]:
        """What of `flats` is part k."""
        return [flats[s.tensor][s.start : s.stop] for s in self.parts[k].slices]

    def tensor_at(self, k: int, place: int) -> int:
        """Which tensor of the list the value at this place of part k belongs to."""
        for piece in self.parts[k].slices:
            if place < piece.stop - piece.start:
                return piece.tensor
            place -= piece.stop - piece.start
        raise IndexError(f"part {k} ends before that")

    def ready_from(self, tensor: int) -> int:
        """The first part that needs no tensor before this one: it and later ones are then ready."""
        for part in self.parts:
            if part.slices[0].tensor >= tensor:
                return part.k
        return self.num_parts


def _part_size(numel: int, itemsize: int, part_bytes: int) -> int:
    """Elements of a part: as many as fit, or fewer, so that several peers can share the adding."""
    most = max(1, part_bytes // itemsize)
    num = max(-(-numel // most), min(_MIN_PARTS, numel * itemsize // _SMALL_BYTES), 1)
    size = -(-numel // num)
    return max(1, min(most, -(-size // _ALIGN) * _ALIGN))


def _cut(pieces: Sequence[tuple[int, int]], size: int) -> list[list[Slice]]:
    parts: list[list[Slice]] = []
    room = 0
    for index, numel in pieces:
        start = 0
        while start < numel:
            if room == 0:
                parts.append([])
                room = size
            stop = min(numel, start + room)
            parts[-1].append(Slice(index, start, stop))
            room -= stop - start
            start = stop
    return parts
