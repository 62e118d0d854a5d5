"""Codecs: how the values of one part travel.

    part (own dtype) ──encode──▶ wire (bytes) ──add─────▶ total (accumulator)     at the owner
    total            ──encode──▶ wire         ──decode──▶ part                    at everyone

| name | wire of n values                       | error of a finite value x                 |
|------|----------------------------------------|-------------------------------------------|
| fp32 | their own memory, whatever the dtype   | none                                      |
| bf16 | 2n bytes                               | half a unit in the last place of bf16     |
| fp16 | 2n bytes                               | the same of fp16; beyond 65504: saturated |
| int8 | a float32 scale per 256 values, then n | largest magnitude of the 256 / 254        |

What every codec promises:
- The wire is a function of the values' bits, and what it decodes to is a function of the wire's:
  each step is one IEEE operation or an exact one, so CPUs and GPUs agree, vectorised or not.
  (Only the payload of a NaN is left to the device.)
- Finite values decode to finite ones. One overflowing gradient must not turn the model of every
  peer into NaN, so what is too large for the wire becomes the largest value it carries, as if
  clipped. Values that are not finite never look finite after decoding: a GradScaler must see them.
- What was decoded encodes to the same bytes again (but for int8 in parts of float16 or bfloat16,
  which round what they decode).
- Codecs have no state but room to work in, of each thread: any may use one, several at once. Wire
  and values must not overlap. Gradients are never recorded.
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Final, Protocol

import torch
from torch import Tensor

from manyhands.collectives.pool import lasting_memory
from manyhands.core.errors import UsageError
from manyhands.wire.tensors import verify_received

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# Values of one int8 scale. Measured at 1 MiB on one thread: finding the largest of each block
# takes 55, 41, 36, 34 and 32 us for blocks of 64, 128, 256, 512 and 1024, nothing else changes.
# 256 is where speed stops improving; the scales add 1.6 % to the wire.
BLOCK: Final = 256

_HALVES: Final = (torch.float16, torch.bfloat16)
_FLOATS: Final = (*_HALVES, torch.float32, torch.float64)
# Dtypes that can be added which torch adds as others only: complex numbers as their parts, bits
# modulo 2^n.
_STAND_INS: Final = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}

# Values worked on at a time, so that a temporary of 1 MiB does for a part of any size.
_PIECE: Final = 1024 * BLOCK


class Codec(Protocol):
    """How the values of one part travel.

    Tensors are 1-D and contiguous, on one device. `wire` is uint8, of exactly `num_bytes`, and
    starts at a multiple of 8 bytes. Values are of the part's dtype or of its accumulator's
    (`accumulator_of`). A tensor of another kind or size is a UsageError.
    """

    @property
    def name(self) -> str:
        """What `find_codec` calls it."""
        ...

    @property
    def raw(self) -> bool:
        """The wire is the memory of values of the part's dtype: send and receive that itself."""
        ...

    @property
    def max_error(self) -> float:
        """No value that is finite and not saturated is off by more, whatever its size."""
        ...

    def num_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """The exact size of `numel` values of a part of that dtype, on the wire."""
        ...

    def encode(self, values: Tensor, wire: Tensor) -> None:
        """Write `values` to `wire`."""
        ...

    def decode(self, wire: Tensor, values: Tensor) -> None:
        """Overwrite `values` with what `wire` holds."""
        ...

    def add(self, wire: Tensor, total: Tensor, *, sign: int = 1) -> None:
        """Add what `wire` holds to `total`, an accumulator; or subtract it, with `sign=-1`.

        The same bits as decoding into an accumulator and adding that.
        """
        ...


def find_codec(name: str) -> Codec:
    """The codec of that name, for parts of float32 or float64; `codec_for` serves any dtype.

    Raises UsageError, with the names there are.
    """
    codec = _CODECS.get(name)
    if codec is None:
        names = ", ".join(repr(known) for known in _CODECS)
        raise UsageError(f"no codec is called {name!r}", hint=f"choose one of {names}")
    return codec


def codec_for(name: str, dtype: torch.dtype) -> Codec:
    """The codec of that name for parts of `dtype`: a raw one where it would save nothing.

    That is for all but floats (an index or a counter must arrive as it is) and for floats that
    are as narrow as the codec already. Raises UsageError like `find_codec`.
    """
    codec = find_codec(name)
    if not codec.raw and dtype in _FLOATS and dtype.itemsize > _LOSSY_BYTES[name]:
        return codec
    return _Raw(dtype)


def accumulator_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which parts of `dtype` are added up: float32 for all narrower floats."""
    if dtype is torch.complex32:
        return torch.complex64
    narrow = dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize
    return torch.float32 if narrow else dtype


class _Raw:
    """Values as they are in memory; an accumulator wider than the part is rounded, as by a cast."""

    name = "fp32"
    raw = True
    max_error = 0.0

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype  # of the part; None: of the tensor at hand
        self._accumulator = None if dtype is None else accumulator_of(dtype)

    def num_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return numel * (self._dtype or dtype).itemsize

    @torch.no_grad()
    def encode(self, values: Tensor, wire: Tensor) -> None:
        self._check(wire, values)
        if self._is_own(values):
            wire.copy_(values.view(torch.uint8))
        else:
            _round(_plain(values), self._view(wire, values))

    @torch.no_grad()
    def decode(self, wire: Tensor, values: Tensor) -> None:
        self._check(wire, values)
        if self._is_own(values):
            values.view(torch.uint8).copy_(wire)
            verify_received(values)
        else:
            _plain(values).copy_(self._view(wire, values))

    @torch.no_grad()
    def add(self, wire: Tensor, total: Tensor, *, sign: int = 1) -> None:
        self._check(wire, total)
        _add(self._view(wire, total), _plain(total), sign)

    def _is_own(self, values: Tensor) -> bool:
        return self._dtype is None or values.dtype is self._dtype

    def _check(self, wire: Tensor, values: Tensor) -> None:
        _check(wire, values, self.num_bytes(values.numel(), values.dtype))
        if self._dtype not in (None, values.dtype) and values.dtype is not self._accumulator:
            raise UsageError(f"a tensor of {values.dtype} for a part of {self._dtype}")

    def _view(self, wire: Tensor, values: Tensor) -> Tensor:
        view = wire.view(self._dtype or values.dtype)
        verify_received(view)
        return _plain(view)


class _Cast:
    """Values rounded to a narrower float, to nearest, ties to even.

    What is too large saturates, NaN is the positive quiet one without payload. A float64 goes by
    way of float32, as torch casts it: rounded twice, off by at most 2^-12 of half a unit more.
    """

    raw = False

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self._dtype = dtype
        info = torch.finfo(dtype)
        # A unit in the last place of the largest value: twice what rounding can do.
        self.max_error = info.max * info.eps / 2

    def num_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return numel * self._dtype.itemsize

    @torch.no_grad()
    def encode(self, values: Tensor, wire: Tensor) -> None:
        _round(values, self._view(wire, values))

    @torch.no_grad()
    def decode(self, wire: Tensor, values: Tensor) -> None:
        values.copy_(self._view(wire, values))

    @torch.no_grad()
    def add(self, wire: Tensor, total: Tensor, *, sign: int = 1) -> None:
        _add(self._view(wire, total), total, sign)

    def _view(self, wire: Tensor, values: Tensor) -> Tensor:
        _check_float(values, self.name)
        _check(wire, values, self.num_bytes(values.numel(), values.dtype))
        return wire.view(self._dtype)


class _Int8:
    """A float32 scale per block of values, all scales first, then the values as int8 multiples.

    A scale is the block's largest magnitude / 127, rounded to 17 significant bits: times an int8
    that is exact in float32. So decoding rounds nothing, adding with or without a fused
    multiply-add is the same, and the largest magnitude decoded leads back to the same scale.

    Scales are normal numbers, at least 2^-126 even for a block of zeros: every operation here is
    safe under flush-to-zero, and a block of denormals is off by at most 2^-127. A block with a
    value that is not finite has the scale NaN, and decodes to NaN throughout: one inf leaves no
    scale that would serve its neighbours. Negative zero arrives as zero.
    """

    name = "int8"
    raw = False

    _STEPS = torch.int8
    # The largest scale of 17 bits that times 127 is still a float32.
    _MAX_SCALE = float.fromhex("0x1.0204p+121")
    _MIN_SCALE: Final = 2.0**-126
    # Not a division: on CUDA torch replaces one by a constant with this product, on the CPU it
    # does not. This float32 is 1/127 rounded; the product is rounded once everywhere.
    _INVERSE = float.fromhex("0x1.020408p-7")
    # What rounds the bits of a scale to 17: added, then masked.
    _ROUND, _MASK = 64, -128

    max_error = _MAX_SCALE

    def num_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return 4 * -(-numel // BLOCK) + self._STEPS.itemsize * numel

    @torch.no_grad()
    def encode(self, values: Tensor, wire: Tensor) -> None:
        for rows, scales, steps in self._pieces(values, wire):
            self._encode(rows.float() if rows.dtype in _HALVES else rows, scales, steps)

    @torch.no_grad()
    def decode(self, wire: Tensor, values: Tensor) -> None:
        for rows, scales, steps in self._pieces(values, wire):
            if rows.dtype in _HALVES:
                # Rounded like any total: the sum of many may be too large for float16.
                _round(steps.float().mul_(scales), rows)
            else:
                rows.copy_(steps).mul_(scales.to(rows.dtype))

    @torch.no_grad()
    def add(self, wire: Tensor, total: Tensor, *, sign: int = 1) -> None:
        for rows, scales, steps in self._pieces(total, wire):
            rows.addcmul_(_room_like(rows).copy_(steps), scales.to(rows.dtype), value=sign)

    def _encode(self, rows: Tensor, scales: Tensor, steps: Tensor) -> None:
        # Two reductions: aminmax and the infinity norm are 15 and 20 times slower along rows.
        peaks = torch.maximum(rows.amax(1, keepdim=True), rows.amin(1, keepdim=True).neg_())
        scales.copy_((peaks * self._INVERSE).clamp_(self._MIN_SCALE, self._MAX_SCALE))
        scales.view(torch.int32).add_(self._ROUND).bitwise_and_(self._MASK)
        # A product, not a quotient: a sixth faster, as exact to compute, and a step that is off
        # by 2^-23 only decides ties.
        work = torch.mul(rows, scales.to(rows.dtype).reciprocal(), out=_room_like(rows))
        if not math.isfinite(float(peaks.sum())):  # or their sum overflows: then nothing is filled
            broken = peaks.isfinite().logical_not_()
            scales.masked_fill_(broken, math.nan)
            work.masked_fill_(broken, 0.0)  # the cast of a NaN to an integer may give anything
        work.round_()
        if work.dtype is torch.float64:  # may exceed 127 times the largest scale
            most = torch.iinfo(self._STEPS).max
            work.clamp_(-most, most)
        steps.copy_(work)

    def _pieces(self, values: Tensor, wire: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Values by rows of a block, their scales as a column, their int8; the tail is a row."""
        numel = values.numel()
        _check_float(values, self.name)
        _check(wire, values, self.num_bytes(numel, values.dtype))
        num_scales = -(-numel // BLOCK)
        scales = wire[: 4 * num_scales].view(torch.float32).view(-1, 1)
        steps = wire[4 * num_scales :].view(self._STEPS)
        whole = numel - numel % BLOCK
        for start in range(0, whole, _PIECE):
            stop = min(start + _PIECE, whole)
            yield (
                values[start:stop].view(-1, BLOCK),
                scales[start // BLOCK : stop // BLOCK],
                steps[start:stop].view(-1, BLOCK),
            )
        if whole < numel:
            yield values[whole:].view(1, -1), scales[-1:], steps[whole:].view(1, -1)


class _Int16(_Int8):
    """The same with int16 and scales of 9 bits, rounded up so that no step exceeds 32767.

    For what a sender keeps of the values that int8 left out: half a step of int8 at most, which is
    kept to 2^-17 of one, as exactly as float32 adds it to a value of 127 steps. Not for the wire.
    """

    name = "int16"
    _STEPS = torch.int16
    _MAX_SCALE = max_error = 2.0**113  # no residual comes near 32767 times that
    _INVERSE = float.fromhex("0x1.0002p-15")
    _ROUND, _MASK = 2**15 - 1, -(2**15)


KEPT: Final[Codec] = _Int16()
"""How a residual is kept: in half the memory of the values."""

_CODECS: Final[Mapping[str, Codec]] = {
    "fp32": _Raw(),
    "fp16": _Cast("fp16", torch.float16),
    "bf16": _Cast("bf16", torch.bfloat16),
    "int8": _Int8(),
}
_LOSSY_BYTES: Final[Mapping[str, int]] = {"fp16": 2, "bf16": 2, "int8": 1}


def _check(wire: Tensor, values: Tensor, num_bytes: int) -> None:
    if values.dim() != 1 or not values.is_contiguous():
        raise UsageError(f"a part is 1-D and contiguous, not {tuple(values.shape)}")
    if wire.dtype is not torch.uint8 or wire.shape != (num_bytes,) or not wire.is_contiguous():
        raise UsageError(
            f"the wire of {values.numel()} values is {num_bytes} bytes, not {tuple(wire.shape)} "
            f"of {wire.dtype}",
            hint="take the codec of the part's dtype: codec_for(name, dtype)",
        )


def _check_float(values: Tensor, name: str) -> None:
    if values.dtype not in _FLOATS:
        raise UsageError(
            f"{name!r} carries no {values.dtype}", hint="take the codec that codec_for() names"
        )


def _plain(values: Tensor) -> Tensor:
    stand_in = _STAND_INS.get(values.dtype)
    return values if stand_in is None else values.view(stand_in)


class _Rooms(threading.local):
    """To work on a piece in, of each thread: made anew for each, they leave holes in the heap.

    With 128 MiB in int8 that had been 100 MiB after a few rounds.
    """

    def __init__(self) -> None:
        self.memory: dict[torch.dtype, Tensor] = {}


_rooms: Final = _Rooms()


def _room_like(rows: Tensor) -> Tensor:
    """Memory for rows of at most a piece; this thread's next call gives it again."""
    if not rows.is_cpu:
        return torch.empty_like(rows)
    room = _rooms.memory.get(rows.dtype)
    if room is None:
        with torch.inference_mode(False):  # the next one to use it may be outside of it
            room = lasting_memory(_PIECE * rows.dtype.itemsize).view(rows.dtype).view(-1, BLOCK)
        _rooms.memory[rows.dtype] = room
    if rows.shape == room.shape:  # most are
        return room
    return room.view(-1)[: rows.numel()].view(rows.shape)


def within(values: Tensor, limit: float) -> bool:
    """Whether no value is NaN or of a magnitude above `limit`."""
    if not values.numel():
        return True
    low, high = values.aminmax()
    return -limit <= float(low) and float(high) <= limit


def _round(values: Tensor, narrow: Tensor) -> None:
    """Round to a narrower float; finite values stay finite, others stay what they are."""
    narrow.copy_(values)
    # A sum is half the price of looking at each value, and never finite when one is not. It may
    # overflow without: then look.
    if narrow.dtype in _HALVES and math.isfinite(float(narrow.sum())):
        return
    limit = torch.finfo(narrow.dtype).max
    if within(values, limit):
        return
    narrow.copy_(torch.where(values.isfinite(), values.clamp(-limit, limit), values))
    if narrow.dtype in _HALVES:  # vectorised casts and others make different NaNs
        narrow.masked_fill_(values.isnan(), math.nan)


def _add(values: Tensor, total: Tensor, sign: int) -> None:
    """Add in the total's dtype. torch widens a half by itself, at the price of doing it first."""
    for start in range(0, values.numel(), _PIECE):
        source, target = values[start : start + _PIECE], total[start : start + _PIECE]
        try:
            target.add_(source if source.dtype in _FLOATS else source.to(target.dtype), alpha=sign)
        except NotImplementedError as error:
            raise UsageError(f"torch cannot add tensors of {values.dtype}") from error
