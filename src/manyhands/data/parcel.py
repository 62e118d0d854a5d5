"""Parcel: a batch on its way out of a worker process.

Its tensors travel side by side in one piece of memory that has no name: nothing is left of it
when the processes are gone, however they end. Small ones travel with the rest, by the pipe.
"""

from __future__ import annotations

import io
import mmap
import os
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler, recv_handle, send_handle
from typing import Any, NamedTuple

import torch
from torch import Tensor

from manyhands.wire.tensors import TensorSpec, bytes_of, from_bytes, num_bytes, spec_of

_INLINE = 1 << 16  # bytes that a pipe takes at once
_ALIGNED = 64  # bytes: whatever a tensor is of, it can be used where it lies


class _Head(NamedTuple):
    """What the other side must know before the rest comes."""

    specs: list[TensorSpec]
    inline: bytes | None  # the tensors; None: their memory follows


class _Packer(ForkingPickler):
    """Leaves the tensors out, and remembers them: for each there is its number."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, -1)
        self.tensors: list[Tensor] = []

    def reducer_override(self, obj: Any) -> Any:  # noqa: ANN401
        if type(obj) is not Tensor or not _is_plain(obj):
            return NotImplemented  # torch knows how
        if not obj.numel():
            return _empty, (tuple(obj.shape), obj.dtype)
        # In the order of its memory: what lies by channels comes to lie so again.
        order = sorted(range(obj.dim()), key=obj.stride, reverse=True)
        self.tensors.append(obj.resolve_conj().resolve_neg().permute(order).contiguous())
        return _tensor, (len(self.tensors) - 1, [order.index(dim) for dim in range(obj.dim())])


class _Arriving(threading.local):
    """The tensors of the parcel that this thread unpacks."""

    tensors: Sequence[Tensor] = ()


_ARRIVING = _Arriving()


def _tensor(number: int, order: list[int]) -> Tensor:
    return _ARRIVING.tensors[number].permute(order)


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def send(line: Connection, thing: Any, to: int) -> None:  # noqa: ANN401
    """Blocks until the process `to`, at the other end, has taken most of it."""
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(thing)
    specs = [spec_of(tensor) for tensor in packer.tensors]
    total = _offsets(specs)[-1]
    if total <= _INLINE or not hasattr(os, "memfd_create"):
        line.send(_Head(specs, b"".join(_padded(packer.tensors))))
    else:
        line.send(_Head(specs, None))
        _send_memory(line, packer.tensors, to)
    line.send_bytes(file.getbuffer())


def _send_memory(line: Connection, tensors: Sequence[Tensor], to: int) -> None:
    memory = os.memfd_create("manyhands-batch", os.MFD_CLOEXEC)
    try:
        with os.fdopen(memory, "wb", closefd=False) as target:
            for piece in _padded(tensors):
                target.write(piece)
        send_handle(line, memory, to)
    finally:
        os.close(memory)


def receive(line: Connection) -> Any:  # noqa: ANN401
    """What this process's own child has sent. Raises EOFError or OSError if that has died."""
    head: _Head = line.recv()
    offsets = _offsets(head.specs)
    if head.inline is not None:
        memory = memoryview(bytearray(head.inline))
    else:
        handle = recv_handle(line)
        try:
            memory = memoryview(mmap.mmap(handle, offsets[-1]))
        finally:
            os.close(handle)
    _ARRIVING.tensors = [
        from_bytes(spec, memory[start : start + num_bytes(spec)])
        for spec, start in zip(head.specs, offsets, strict=False)
    ]
    try:
        return line.recv()
    finally:
        _ARRIVING.tensors = ()


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_quantized
    )


def _offsets(specs: Sequence[TensorSpec]) -> list[int]:
    """Where each of them begins, and the end of all."""
    offsets = [0]
    for spec in specs:
        offsets.append(offsets[-1] + -(-num_bytes(spec) // _ALIGNED) * _ALIGNED)
    return offsets


def _padded(tensors: Sequence[Tensor]) -> list[Any]:
    pieces: list[Any] = []
    for tensor in tensors:
        data = bytes_of(tensor)
        pieces += [data, bytes(-len(data) % _ALIGNED)]
    return pieces
