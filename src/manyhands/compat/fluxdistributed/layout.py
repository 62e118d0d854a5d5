"""Layout: where each tensor of a model that devices put together lies, in a few flat ones.

Leaves are the gradients of the parameters and, after them, the model's buffers (BatchNorm's
statistics): all that a step changes on one device must be the same on the others afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from manyhands.wire.tensors import DTYPES


class Leaf(msgspec.Struct, frozen=True):
    """One tensor: its place in the flat one of its dtype."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    numel: int
    gradient: bool  # of a parameter; else a buffer
    summed: bool  # by weight; else it is the value of one device that has changed it


class Layout(msgspec.Struct, frozen=True):
    """The leaves of a model; the same on all devices, and small enough to be told to others."""

    leaves: tuple[Leaf, ...]

    @property
    def flats(self) -> dict[str, int]:
        """The number of elements of the flat tensor of each dtype."""
        sizes: dict[str, int] = {}
        for leaf in self.leaves:
            sizes[leaf.dtype] = leaf.start + leaf.numel
        return sizes

    @property
    def given(self) -> list[int]:
        """Places of the leaves that cannot be averaged."""
        return [place for place, leaf in enumerate(self.leaves) if not leaf.summed]

    def start_of_buffers(self, dtype: str) -> int:
        """Where in the flat tensor of a dtype the gradients end: they come first."""
        return sum(leaf.numel for leaf in self.leaves if leaf.gradient and leaf.dtype == dtype)

    def moved(self, used: Sequence[bool]) -> list[str]:
        """The dtypes whose flat tensors must be put together, when these leaves were used."""
        wanted = {leaf.dtype for leaf, is_used in zip(self.leaves, used, strict=True) if is_used}
        return [dtype for dtype in self.flats if dtype in wanted]


class Views(NamedTuple):
    """Flat tensors on one device, and the leaves in them."""

    flats: dict[str, Tensor]
    leaves: dict[str, Tensor]


def layout_of(model: nn.Module) -> Layout:
    """Of the parameters that are trained, and all buffers."""
    sizes: dict[str, int] = {}
    leaves: list[Leaf] = []

    def add(name: str, tensor: Tensor, *, gradient: bool) -> None:
        # Bools are carried as bytes: nothing adds them up.
        kind = torch.uint8 if tensor.dtype is torch.bool else tensor.dtype
        dtype = str(kind).removeprefix("torch.")
        start = sizes.get(dtype, 0)
        sizes[dtype] = start + tensor.numel()
        shape = tuple(tensor.shape)
        summed = tensor.is_floating_point() or tensor.is_complex()
        leaves.append(Leaf(name, dtype, shape, start, tensor.numel(), gradient, summed))

    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            add(name, parameter, gradient=True)
    for name, buffer in model.named_buffers():
        add(name, buffer, gradient=False)
    return Layout(tuple(leaves))


def views_of(layout: Layout, device: torch.device) -> Views:
    """Zeros for all leaves on this device."""
    flats = {
        dtype: torch.zeros(numel, dtype=DTYPES[dtype], device=device)
        for dtype, numel in layout.flats.items()
    }
    leaves = {
        leaf.name: flats[leaf.dtype][leaf.start : leaf.start + leaf.numel].view(leaf.shape)
        for leaf in layout.leaves
    }
    return Views(flats, leaves)
