"""Staging: memory of the CPU that a GPU writes to, used again from round to round."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Staging:
    """For tensors of always the same shapes. Used by one thread at a time."""

    def __init__(self) -> None:
        self._room: list[Tensor] = []

    @torch.no_grad()
    def fetch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The same values on the CPU; what is there already stays as it is, uncopied.

        Good until the next call. Whichever stream computes the tensors has come to its end.
        """
        room = self.room_for(tensors)
        for device in {t.device for t in tensors if t.is_cuda}:
            torch.cuda.synchronize(device)  # another thread's stream may have computed them
        for mine, tensor in zip(room, tensors, strict=True):
            if tensor.is_cuda:
                mine.copy_(tensor, non_blocking=True)
        for device in {t.device for t in tensors if t.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return room

    def room_for(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors like these on the CPU, contents undefined; those that are there themselves."""
        if len(self._room) != len(tensors):
            self._room = [_pinned_like(t) if t.is_cuda else t for t in tensors]
        return [
            mine if tensor.is_cuda else tensor
            for mine, tensor in zip(self._room, tensors, strict=True)
        ]


def _pinned_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
