"""Buffers: the tensors of an operation as flat CPU memory, and the way back.

A contiguous CPU tensor is used as it is. Others get a stand-in: for a GPU a pinned one, copied on a
stream beside the user's, so that the GPU goes on and only whoever waits for the result waits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from manyhands.core.errors import UsageError
from manyhands.wire.tensors import spec_of

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class Buffers:
    """For one operation: ask for its tensors, `fetch`, run it, `put_back`."""

    def __init__(self, stream_for: Callable[[torch.device], torch.cuda.Stream]) -> None:
        self._stream_for = stream_for
        self._back: list[tuple[Tensor, Tensor]] = []  # (user's tensor, flat stand-in)
        self.device: torch.device | None = None  # a GPU, if a tensor is on one
        self._stream: torch.cuda.Stream | None = None

    def read(self, tensor: Tensor) -> Tensor:
        """Its values. The memory may be the tensor's own."""
        return self._flat(tensor, fill=True, back=False)

    def write(self, tensor: Tensor) -> Tensor:
        """Memory that becomes its values."""
        return self._flat(tensor, fill=False, back=True)

    def both(self, tensor: Tensor) -> Tensor:
        """Its values, to be replaced by what is written there."""
        return self._flat(tensor, fill=True, back=True)

    def _flat(self, tensor: Tensor, *, fill: bool, back: bool) -> Tensor:
        spec_of(tensor)  # refuses what has no plain memory
        plain = tensor.detach()
        if plain.is_inference():
            plain = _ordinary(plain)
        if plain.device.type == "cpu":
            if plain.is_contiguous() and not plain.is_conj() and not plain.is_neg():
                return plain.view(-1)
            stand_in = plain.resolve_conj().resolve_neg().contiguous().view(-1)
        elif plain.device.type == "cuda":
            stand_in = self._fetch(plain) if fill else self._pinned(plain)
        else:
            raise UsageError(
                f"a tensor on {plain.device}: this backend carries CPU and CUDA tensors"
            )
        if back:
            if any(step == 0 and plain.shape[dim] > 1 for dim, step in enumerate(plain.stride())):
                raise UsageError(
                    "a result cannot be written to a tensor that was expanded: its elements share "
                    "memory",
                    hint="pass tensor.contiguous()",
                )
            self._back.append((plain, stand_in))
        return stand_in

    def _pinned(self, plain: Tensor) -> Tensor:
        self._enter(plain.device)
        return torch.empty(plain.numel(), dtype=plain.dtype, pin_memory=True)

    def _fetch(self, plain: Tensor) -> Tensor:
        host = self._pinned(plain)
        stream = self._stream
        assert stream is not None
        with torch.cuda.stream(stream):
            host.view(plain.shape).copy_(plain, non_blocking=True)
        plain.record_stream(stream)
        return host

    def _enter(self, device: torch.device) -> None:
        if self._stream is None:
            self.device = device
            self._stream = self._stream_for(device)
            # The values are those that the user's stream will have computed by now.
            self._stream.wait_stream(torch.cuda.current_stream(device))
        elif device != self.device:
            raise UsageError(f"tensors of one operation on {self.device} and {device}")

    def arrival(self) -> Callable[[], None] | None:
        """A function that waits until the values are here; None when they already are."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self._stream)
        return event.synchronize

    def put_back(self) -> AbstractContextManager[object]:
        """Give the user's tensors what was written.

        What waits for it is to be told within the context that is returned.
        """
        if self._stream is None:
            with torch.no_grad():
                for tensor, flat in self._back:
                    tensor.copy_(flat.view(tensor.shape))
            return nullcontext()
        with torch.no_grad(), torch.cuda.stream(self._stream):
            for tensor, flat in self._back:
                tensor.copy_(flat.view(tensor.shape), non_blocking=True)
                if tensor.device.type == "cuda":
                    tensor.record_stream(self._stream)
        return torch.cuda.stream(self._stream)


def _ordinary(tensor: Tensor) -> Tensor:
    """The same memory, without the mark of inference mode: other threads may write to it."""
    with torch.inference_mode(mode=False):
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return alias.set_(
            tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        )
