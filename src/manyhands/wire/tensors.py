"""Tensors as bytes: a spec that says what a tensor is, and its memory as a buffer.

    sender                                    receiver
    spec_of(tensor)   ── in a header ───────▶ tensor = empty(spec, limit_bytes)
    bytes_of(tensor)  ── in the payload ────▶ writable_bytes_of(tensor)
                                              verify_received(tensor)

Neither side copies a contiguous CPU tensor. A spec from outside is checked (dtype, shape, size)
before memory is taken. Bytes are little-endian, as every machine that torch trains on has them,
elements in row-major order. Errors the other side caused are WireErrors, errors of the caller
UsageErrors. The only wire module that imports torch.
"""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Annotated

import msgspec
import torch
from torch import Tensor

from manyhands.core.errors import Malformed, Oversized, Truncated, UsageError
from manyhands.wire.frames import Buffer, as_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_DIMS = 64  # torch's own operators take no more
_MAX_INDEX = 2**63 - 1

# What a plain strided tensor can have: all but the quantized dtypes, whose scale is not in their
# memory. Names, not torch's enum, so that releases may differ; a release lacks some of them.
_DTYPE_NAMES = (
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("float4_e2m1fn_x2", "bool", "uint8", "uint16", "uint32", "uint64"),
    *("int8", "int16", "int32", "int64", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
)


def _known_dtypes() -> dict[str, torch.dtype]:
    found = ((name, getattr(torch, name, None)) for name in _DTYPE_NAMES)
    return {name: dtype for name, dtype in found if isinstance(dtype, torch.dtype)}


DTYPES = _known_dtypes()
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# Stand-ins that every torch operator knows, to move elements of that size as they are.
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_Dim = Annotated[int, msgspec.Meta(ge=0, le=_MAX_INDEX)]


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a tensor is: name of its dtype, and shape. From outside, `check` it before use."""

    dtype: Annotated[str, msgspec.Meta(max_length=32)]
    shape: Annotated[tuple[_Dim, ...], msgspec.Meta(max_length=MAX_DIMS)]


def spec_of(tensor: Tensor) -> TensorSpec:
    """The spec of any tensor that can be sent. Raises UsageError, with the remedy, for others."""
    _refuse_special(tensor)
    spec = TensorSpec(_NAMES[tensor.dtype], tuple(tensor.shape))
    try:
        num_bytes(spec)
    except (Malformed, Oversized) as error:
        raise UsageError(f"this tensor cannot be sent: {error.message}") from None
    return spec


def num_bytes(spec: TensorSpec) -> int:
    """Bytes of memory of such a tensor.

    Raises Malformed for an unknown dtype, a negative dimension or more than 64 of them, and
    Oversized for a shape that no tensor can have.
    """
    dtype = dtype_named(spec.dtype)
    if len(spec.shape) > MAX_DIMS:
        raise Malformed(f"a tensor of {len(spec.shape)} dimensions; at most {MAX_DIMS} are taken")
    if any(dim < 0 for dim in spec.shape):
        raise Malformed(f"a tensor of shape {spec.shape}, with a negative dimension")
    # A zero counts as one: strides are products of the other dimensions, so torch overflows on
    # (0, 2**62, 2**62) although that has no elements.
    span = math.prod(max(dim, 1) for dim in spec.shape)
    if max(span, math.prod(spec.shape) * dtype.itemsize) > _MAX_INDEX:
        raise Oversized(f"a tensor of shape {spec.shape}, larger than any memory")
    return math.prod(spec.shape) * dtype.itemsize


def check(spec: TensorSpec, limit_bytes: int) -> None:
    """Refuse what `num_bytes` refuses, and with Oversized a tensor of more than `limit_bytes`."""
    size = num_bytes(spec)
    if size > limit_bytes:
        raise Oversized(f"a tensor of {size} bytes; at most {limit_bytes} are taken")


def bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's values as read-only bytes, for sending.

    A contiguous CPU tensor is not copied: the view shows its memory, keeps it alive, and shows
    later writes too, so leave the tensor alone until it is sent (its storage must not be
    resized). Others are copied, from a GPU too (this waits for it). Whether the tensor requires
    grad does not matter. Raises UsageError like `spec_of`.
    """
    _refuse_special(tensor)
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.device.type != "cpu" or not plain.is_contiguous():
        plain = _as_ints(plain).contiguous().cpu()
    return _memory_of(plain).toreadonly()


def writable_bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's own memory, for receiving straight into; the view keeps it alive.

    To autograd, making the view is one in-place write under `torch.no_grad()`: allowed on any
    tensor, not part of the graph, and a later backward that saved the old values raises. Writes
    through the view go unseen, so ask for a new view for every receive, and call
    `verify_received` after it. Raises UsageError for memory that does not hold the values in
    order: on another device, not contiguous, lazily conjugated or negated.
    """
    _refuse_special(tensor)
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        lacks = f"on {tensor.device}" if tensor.device.type != "cpu" else "not contiguous"
    elif tensor.is_conj() or tensor.is_neg():
        lacks = "a lazily conjugated or negated view"
    else:
        if not tensor.is_inference():  # those have no version to count
            torch.autograd.graph.increment_version(tensor)
        return _memory_of(tensor)
    raise UsageError(
        f"cannot receive into this tensor: it is {lacks}",
        hint="receive into manyhands.wire.tensors.empty(spec, limit_bytes), then tensor.copy_() it",
    )


def verify_received(tensor: Tensor) -> None:
    """Refuse bytes that are no value of the tensor's dtype, after receiving into its memory.

    Only bool has such bytes: torch's operators may do anything at all with a bool that is
    neither 0 nor 1. Raises Malformed then, with the tensor set to False throughout.
    """
    if tensor.dtype is torch.bool and tensor.numel():
        raw = tensor.detach().view(torch.uint8)
        if int(raw.max()) > 1:
            raw.zero_()
            raise Malformed("a bool tensor holds bytes other than 0 and 1")


def empty(spec: TensorSpec, limit_bytes: int) -> Tensor:
    """A CPU tensor of that spec, contents undefined; `check`s it first, and raises like it."""
    check(spec, limit_bytes)
    # Not torch.empty(shape, dtype=...): that warns of complex32.
    return _shaped(torch.empty(num_bytes(spec), dtype=torch.uint8), spec)


def from_bytes(spec: TensorSpec, data: Buffer) -> Tensor:
    """A tensor over `data` itself, which it keeps alive: writes to either show in both.

    `data` is copied when it is read-only, or not aligned for the dtype. Raises like `num_bytes`;
    Truncated or Malformed when `data` is shorter or longer than the spec says; Malformed for
    bools other than 0 and 1 (a sender of ours has none, so they are refused, not mended).
    """
    view, size = as_bytes(data), num_bytes(spec)
    if len(view) < size:
        raise Truncated(f"a tensor of {size} bytes, of which {len(view)} came")
    if len(view) > size:
        raise Malformed(f"{len(view)} bytes for a tensor of {size}")
    if size == 0:  # torch.frombuffer takes no empty buffer
        return _shaped(torch.empty(0, dtype=torch.uint8), spec)
    raw = torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)
    if raw.data_ptr() % dtype_named(spec.dtype).itemsize:
        raw = raw.clone()
    tensor = _shaped(raw, spec)
    # Not verify_received(): the memory is the caller's, and no tensor over it leaves here.
    if tensor.dtype is torch.bool and int(raw.max()) > 1:
        raise Malformed("a bool tensor holds bytes other than 0 and 1")
    return tensor


def pack(tensors: Sequence[Tensor]) -> tuple[tuple[TensorSpec, ...], list[memoryview]]:
    """Specs for a header and buffers for a payload, as `spec_of` and `bytes_of` give them."""
    return tuple(spec_of(tensor) for tensor in tensors), [bytes_of(tensor) for tensor in tensors]


def unpack_into(specs: Sequence[TensorSpec], tensors: Sequence[Tensor]) -> list[memoryview]:
    """Where the payload of `pack` goes, so that it arrives in `tensors`.

    Raises Malformed when the specs are not exactly those of `tensors`, before any is touched.
    Once the buffers are written, `verify_received` each tensor.
    """
    expected = [spec_of(tensor) for tensor in tensors]
    if len(specs) != len(expected):
        raise Malformed(f"{len(specs)} tensors came, {len(expected)} were expected")
    for index, (came, wanted) in enumerate(zip(specs, expected, strict=True)):
        if came != wanted:
            raise Malformed(f"tensor {index}: {came} came, {wanted} was expected")
    return [writable_bytes_of(tensor) for tensor in tensors]


def dtype_named(name: str) -> torch.dtype:
    """The dtype that a peer speaks of. Raises Malformed if there is none of that name."""
    dtype = DTYPES.get(name)
    if dtype is None:
        raise Malformed(
            f"a tensor of dtype {name[:32]!r}, unknown to torch {torch.__version__}",
            hint="install the same release of torch on both sides",
        )
    return dtype


def _shaped(raw: Tensor, spec: TensorSpec) -> Tensor:
    return raw.view(dtype_named(spec.dtype)).view(spec.shape)


def _as_ints(tensor: Tensor) -> Tensor:
    """The same elements as integers: some dtypes have no copy operator, these all do."""
    return tensor.view(_INTS.get(tensor.element_size(), tensor.dtype))


def _memory_of(tensor: Tensor) -> memoryview:
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(bytearray())
    array = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    # The view holds the array, and the array holds this alias of the tensor; an alias, since
    # `tensor.data = ...` would make the tensor itself let go of the memory.
    vars(array)["owner"] = tensor.detach()
    return as_bytes(memoryview(array))


def _dispatch_of(kind: type[Tensor]) -> object:
    return getattr(kind, "__torch_dispatch__", None)


def _refuse_special(tensor: Tensor) -> None:
    """Raise UsageError for a tensor that is more, or less, than one strided piece of memory."""
    if tensor.is_nested:
        what, hint = "a nested tensor", "send the tensors of tensor.unbind()"
    elif tensor.layout is not torch.strided:
        what, hint = f"a tensor of layout {tensor.layout}", "send tensor.to_dense()"
    elif tensor.is_quantized:
        what, hint = "a quantized tensor", "send tensor.int_repr(), and its scale and zero point"
    elif tensor.device.type == "meta":
        what, hint = "a tensor on the meta device", "it has no values; send its shape and dtype"
    # DTensor, FakeTensor and their like: operators they define, no memory of their own.
    elif _dispatch_of(type(tensor)) is not _dispatch_of(Tensor):
        what, hint = f"a {type(tensor).__name__}", "send the plain tensors it is made of"
    elif tensor.dtype not in _NAMES:
        what, hint = f"a tensor of {tensor.dtype}", "convert it to one of the dtypes in DTYPES"
    else:
        return
    raise UsageError(f"{what} has no plain memory to send or receive", hint=hint)
