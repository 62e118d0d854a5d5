"""Kept: a model's buffers as they were before a step, which may come to nothing."""

from __future__ import annotations

from collections import defaultdict
from typing import cast

import torch
from torch import Tensor, nn

_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Kept:
    """BatchNorm writes its statistics in forward: what is undone must undo them, too."""

    def __init__(self, model: nn.Module) -> None:
        self._was = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}

    def changed(self, model: nn.Module) -> set[str]:
        """The names of buffers that are not as they were, to the bit.

        torch's count of writes does not tell: batch_norm's go uncounted.
        """
        flags: dict[torch.device, dict[str, Tensor]] = defaultdict(dict)
        for name, buffer in model.named_buffers():
            differs = (_bits(buffer) != _bits(self._was[name])).any()
            flags[buffer.device][name] = differs
        names: set[str] = set()
        for some in flags.values():  # one wait for each device
            found = cast("list[bool]", torch.stack(list(some.values())).tolist())  # pyright: ignore[reportUnknownMemberType]
            names |= {name for name, differs in zip(some, found, strict=True) if differs}
        return names

    @torch.no_grad()
    def restore(self, model: nn.Module) -> None:
        """The buffers as they were, and no gradients."""
        for name, buffer in model.named_buffers():
            buffer.copy_(self._was[name])
        for parameter in model.parameters():
            parameter.grad = None


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; each once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def real(tensor: Tensor) -> Tensor:
    """The same memory, as real numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _bits(tensor: Tensor) -> Tensor:
    """For comparison: of floats, a NaN is equal to itself, and 0 is not -0."""
    plain = real(tensor.detach())
    return plain.view(_INTS[plain.element_size()]) if plain.is_floating_point() else plain
