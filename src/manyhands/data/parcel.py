"""Parcel: a batch on its way out of a worker process.

Its tensors travel side by side in one piece of memory that has no name: nothing is left of it
when the processes are gone, however they end. Small ones travel with the rest, by the pipe.
"""

from __future__ import annotations

import errno
import io
import os
import socket
import threading
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
from torch import Tensor

from manyhands.wire.tensors import (
    TensorSpec,
    bytes_of,
    from_bytes,
    num_bytes,
    spec_of,
    writable_bytes_of,
)

_INLINE = 1 << 16  # bytes that a pipe takes at once
_ALIGNED = 64  # bytes: whatever a tensor is of, it can be used where it lies
_MARK = b"m"  # goes with a descriptor, which cannot go alone


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


class Lost(OSError):
    """A batch has come, and this process could not take it. Nothing more can be read from the
    line: what is next on it is the rest of that batch.
    """


class Parcel:
    """A thing that is packed: from here on nothing can fail but the line. `close` it.

    Raises what pickling raises, and OSError where there is no memory for its tensors, or no
    descriptor for that.
    """

    def __init__(self, thing: Any) -> None:  # noqa: ANN401
        file = io.BytesIO()
        packer = _Packer(file)
        packer.dump(thing)
        self._body = file.getbuffer()
        self._specs = [spec_of(tensor) for tensor in packer.tensors]
        self._inline: bytes | None = None
        self._memory: int | None = None
        if _offsets(self._specs)[-1] <= _INLINE or not hasattr(os, "memfd_create"):
            self._inline = b"".join(_padded(packer.tensors))
        else:
            self._memory = _memory_of(packer.tensors)

    def send(self, line: Connection) -> None:
        """Blocks until the process at the other end has taken most of it. Raises OSError."""
        line.send(_Head(self._specs, self._inline))
        if self._memory is not None:
            with borrowed(line) as sock:
                socket.send_fds(sock, [_MARK], [self._memory])
        line.send_bytes(self._body)

    def close(self) -> None:
        """Idempotent. What was sent is the other side's."""
        memory, self._memory = self._memory, None
        if memory is not None:
            os.close(memory)


def send(line: Connection, thing: Any) -> None:  # noqa: ANN401
    """Pack it and send it. Raises as both do."""
    with closing(Parcel(thing)) as parcel:
        parcel.send(line)


def receive(line: Connection) -> Any:  # noqa: ANN401
    """What this process's own child has sent. Raises EOFError or OSError if that has died, and
    Lost, an OSError too: after any of these the line is of no use. What else unpacking raises
    leaves it as it should be.
    """
    head: _Head = line.recv()
    try:
        offsets = _offsets(head.specs)
        memory = _mapped(line, offsets[-1]) if head.inline is None else bytearray(head.inline)
        view = memoryview(memory)
        tensors = [
            from_bytes(spec, view[start : start + num_bytes(spec)])
            for spec, start in zip(head.specs, offsets, strict=False)
        ]
    except EOFError:
        raise
    except Exception as error:
        # Whatever it is: one that goes on to read would take this batch's body for the next one's
        # head, and from then on every batch for another.
        raise Lost(f"{type(error).__name__}: {error}") from error
    _ARRIVING.tensors = tensors
    try:
        return line.recv()
    except MemoryError as error:  # a part of it may be on the line yet
        raise Lost("no memory for a batch") from error
    finally:
        _ARRIVING.tensors = ()


@contextmanager
def borrowed(line: Connection) -> Generator[socket.socket]:
    """The line as a socket, without a descriptor of its own: there may be none left."""
    sock = socket.socket(fileno=line.fileno())
    try:
        sock.settimeout(None)  # a default of the user's would hold for the line too
        yield sock
    finally:
        sock.detach()


def _memory_of(tensors: Sequence[Tensor]) -> int:
    """Memory without a name that has these side by side."""
    memory = os.memfd_create("manyhands-batch", os.MFD_CLOEXEC)
    try:
        with os.fdopen(memory, "wb", closefd=False) as target:
            for piece in _padded(tensors):
                target.write(piece)
    except BaseException:
        os.close(memory)
        raise
    return memory


def _take_memory(line: Connection) -> int:
    """The descriptor that comes. Raises OSError if this process can have no more of them."""
    with borrowed(line) as sock:
        mark, found, _, _ = socket.recv_fds(sock, len(_MARK), 1, socket.MSG_CMSG_CLOEXEC)
    if not mark:
        raise EOFError
    if len(found) != 1:  # the system drops what it cannot hand over
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return found[0]


def _mapped(line: Connection, size: int) -> memoryview:
    """The memory whose descriptor comes. None stays open, however long the memory is used: an mmap
    of Python's would keep one for each batch.
    """
    memory = _take_memory(line)
    try:
        path = f"/proc/self/fd/{memory}"
        whole = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        return writable_bytes_of(whole)
    finally:
        os.close(memory)


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
