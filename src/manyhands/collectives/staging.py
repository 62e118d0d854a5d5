"""Staging: memory of the CPU that a GPU writes to and reads, used again from round to round."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class Staging:
    """For lists of tensors, most often of the same shapes. Used by one thread at a time."""

    def __init__(self) -> None:
        self._room: list[Tensor | None] = []  # None: a tensor that was there itself
        self._leaving: Sequence[torch.Event] = ()  # what `send` has copied is read by then

    @torch.no_grad()
    def send(self, tensors: Sequence[Tensor], fill: Callable[[list[Tensor]], None]) -> None:
        """tensors := what `fill` writes, before anything that this thread asks of a GPU next."""
        for event in self._leaving:
            event.synchronize()  # a GPU may be more than a round behind
        room = self._room_for(tensors)
        fill(room)
        for mine, tensor in zip(room, tensors, strict=True):
            if tensor.is_cuda:
                tensor.copy_(mine, non_blocking=True)
        devices = {t.device for t in tensors if t.is_cuda}
        self._leaving = [torch.cuda.current_stream(device).record_event() for device in devices]

    @torch.no_grad()
    def fetch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The same values on the CPU; what is there already stays as it is, uncopied.

        Good until the next call. Whichever stream computes the tensors has come to its end.
        """
        room = self._room_for(tensors)
        for device in {t.device for t in tensors if t.is_cuda}:
            torch.cuda.synchronize(device)  # another thread's stream may have computed them
        for mine, tensor in zip(room, tensors, strict=True):
            if tensor.is_cuda:
                mine.copy_(tensor, non_blocking=True)
        for device in {t.device for t in tensors if t.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return room

    def _room_for(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors like these on the CPU, contents undefined; those that are there themselves.

        Never the tensors of another call: their owner has them back.
        """
        before = self._room if len(self._room) == len(tensors) else [None] * len(tensors)
        self._room = [
            None if not tensor.is_cuda else mine if _fits(mine, tensor) else _pinned_like(tensor)
            for mine, tensor in zip(before, tensors, strict=True)
        ]
        return [
            tensor if mine is None else mine
            for mine, tensor in zip(self._room, tensors, strict=True)
        ]


def _fits(mine: Tensor | None, tensor: Tensor) -> bool:
    return mine is not None and mine.shape == tensor.shape and mine.dtype is tensor.dtype


def _pinned_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
