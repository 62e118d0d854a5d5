"""Tensors in a safetensors file, one by one: nothing is held twice, and all of it is hashed.

    8 bytes: length of the header | header, JSON: name -> dtype, shape, offsets | the values

Any reader of safetensors takes these files. The safetensors library itself writes and reads whole
states in memory, or files of this machine without a digest; the format is all we need of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import xxhash
from torch import Tensor

from manyhands.checkpoint.folder import File
from manyhands.core.errors import Malformed, Truncated
from manyhands.wire.frames import Buffer, as_bytes
from manyhands.wire.tensors import (
    DTYPES,
    TensorSpec,
    bytes_of,
    empty,
    num_bytes,
    spec_of,
    verify_received,
    writable_bytes_of,
)

CHUNK_BYTES = 4 << 20

_CODES = {
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
    "bool": "BOOL",
}


class Entry(NamedTuple):
    """One tensor of a file."""

    name: str
    spec: TensorSpec


class Seal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size and xxh3-128 of a whole file."""

    size: int
    digest: str


def entries_of(names: Sequence[str], tensors: Sequence[Tensor]) -> list[Entry]:
    """What a file of these tensors has in it. Raises UsageError for a tensor without memory."""
    return [
        Entry(name, spec_of(tensor)) for name, tensor in zip(_unique(names), tensors, strict=True)
    ]


def _unique(names: Iterable[str]) -> list[str]:
    """Places in a tree can read alike ({1: a, "1": b}), names in a file cannot."""
    taken = dict.fromkeys(["__metadata__"])
    for name in names:
        while name in taken:
            name += "'"
        taken[name] = None
    return list(taken)[1:]


def write_tensors(file: File, entries: Sequence[Entry], tensors: Sequence[Tensor]) -> Seal:
    """Write the file. Those not on the CPU or not contiguous are copied, one at a time."""
    digest, size = xxhash.xxh3_128(), 0

    def write(data: Buffer) -> None:
        nonlocal size
        view = as_bytes(data)
        for start in range(0, len(view), CHUNK_BYTES):
            chunk = view[start : start + CHUNK_BYTES]
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)

    write(_header_of(entries))
    for tensor in tensors:
        write(bytes_of(tensor))
    return Seal(size, digest.hexdigest())


def read_tensors(file: File, entries: Sequence[Entry], seal: Seal) -> list[Tensor]:
    """The tensors of a file of `seal.size` bytes. Raises WireError for a file that is not theirs.

    No more memory is taken than the file has bytes, whatever the entries say.
    """
    digest, header = xxhash.xxh3_128(), _header_of(entries)
    expected = len(header) + sum(num_bytes(spec) for _, spec in entries)
    if expected != seal.size:
        raise Malformed(f"its tensors make a file of {expected} bytes, it says {seal.size}")

    def read_into(target: memoryview) -> None:
        done = 0
        while done < len(target):
            chunk = file.read(min(CHUNK_BYTES, len(target) - done))
            if not chunk:
                raise Truncated("its tensor file ends too early")
            target[done : done + len(chunk)] = chunk
            digest.update(chunk)
            done += len(chunk)

    found = bytearray(len(header))
    read_into(memoryview(found))
    if bytes(found) != header:
        raise Malformed("the header of its tensor file is not what the manifest says")
    tensors = [empty(spec, seal.size) for _, spec in entries]
    for tensor in tensors:
        read_into(writable_bytes_of(tensor))
    if digest.hexdigest() != seal.digest:
        raise Malformed(
            f"its tensor file was changed: digest {digest.hexdigest()}, not {seal.digest}"
        )
    for tensor in tensors:
        verify_received(tensor)
    return tensors


def _header_of(entries: Sequence[Entry]) -> bytes:
    header: dict[str, object] = {}
    end = 0
    for name, spec in entries:
        start, end = end, end + num_bytes(spec)
        code, shape = _CODES.get(spec.dtype), list(spec.shape)
        if code is None:  # a dtype that the format lacks goes as bytes; the manifest knows it
            code, shape = "U8", [*shape, DTYPES[spec.dtype].itemsize]
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the values begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text
