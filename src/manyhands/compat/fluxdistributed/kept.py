"""Kept: a model's buffers as they were before a step, which may come to nothing."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from manyhands.stages.variables import version_of


class _Was(NamedTuple):
    tensor: Tensor
    version: int
    value: Tensor


class Kept:
    """BatchNorm writes its statistics in forward: what is undone must undo them, too."""

    def __init__(self, model: nn.Module) -> None:
        self._was = {
            name: _Was(buffer, version_of(buffer), buffer.detach().clone())
            for name, buffer in model.named_buffers()
        }

    def is_changed(self, name: str, tensor: Tensor) -> bool:
        """Whether that buffer, as it is now, was written since, or is another tensor."""
        was = self._was[name]
        return tensor is not was.tensor or version_of(tensor) != was.version

    @torch.no_grad()
    def restore(self, model: nn.Module) -> None:
        """The buffers as they were, and no gradients."""
        for name, buffer in model.named_buffers():
            if self.is_changed(name, buffer):
                buffer.copy_(self._was[name].value)
        for parameter in model.parameters():
            parameter.grad = None


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; each once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
