"""Values that every rank can work out for all ranks, and what a collective must make of them."""

from __future__ import annotations

from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

SPLIT = 600_000  # floats: a sum of so many is cut up among the members, however few they are
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
COMPLEX = (torch.complex64, torch.complex128)
INTS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
WIDE_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
EIGHT_BIT_FLOATS = (
    *(torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)
ONLY_CARRIED = (torch.complex32, torch.float8_e8m0fnu)  # torch adds up neither
DTYPES = (
    *(*FLOATS, *COMPLEX, *INTS, *WIDE_UNSIGNED),
    *(*EIGHT_BIT_FLOATS, *ONLY_CARRIED, torch.bool),
)
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def given(rank: int, numel: int, dtype: torch.dtype, salt: int = 0) -> Tensor:
    """What `rank` brings along: the same wherever it is worked out."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype is torch.bool:
        return torch.randint(0, 2, (numel,), generator=generator).bool()
    if dtype.is_complex:
        parts = torch.randn(numel, 2, generator=generator, dtype=torch.float64)
        return torch.view_as_complex(parts).to(dtype)
    if dtype is torch.float8_e8m0fnu:  # powers of two, and no sign
        return torch.rand(numel, generator=generator).to(dtype)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator).to(dtype)
    whole = torch.randint(-100, 100, (numel,), generator=generator)
    if dtype in _SIGNED:
        return whole.to(_SIGNED[dtype]).view(dtype)
    return whole.to(dtype)


def combined(op: ReduceOp.RedOpType, values: list[Tensor]) -> Tensor:
    """The values of all members combined in their order: narrow floats in fp32, rounded once."""
    dtype = values[0].dtype
    if dtype.is_complex:  # as torch does it: a pair of numbers each
        parts = combined(op, [torch.view_as_real(value.resolve_conj()) for value in values])
        return torch.view_as_complex(parts)
    narrow = dtype.is_floating_point and dtype.itemsize < 4
    if narrow:
        values = [value.float() for value in values]
    if dtype in _SIGNED:
        values = [value.view(_SIGNED[dtype]) for value in values]
    if op in (ReduceOp.SUM, ReduceOp.AVG):
        total = reduce(torch.add, values)
        if op == ReduceOp.AVG:
            total = total / len(values)
    else:
        total = reduce(_FUNCTIONS[op], values)
    return total.view(dtype) if dtype in _SIGNED else total.to(dtype)


_FUNCTIONS = {
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


def same(left: Tensor, right: Tensor, what: object = "") -> None:
    """Bit for bit, in dtype and shape too."""
    assert left.dtype == right.dtype, (what, left.dtype, right.dtype)
    assert left.shape == right.shape, (what, left.shape, right.shape)
    raw = [bits(tensor) for tensor in (left, right)]
    if not torch.equal(*raw):
        wrong = (raw[0] != raw[1]).nonzero().flatten()
        raise AssertionError(
            f"{what}: {wrong.numel()} of {raw[0].numel()} bytes differ, the first at {wrong[0]}"
        )


def bits(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8)


def refuses(error: type[Exception] | tuple[type[Exception], ...], *words: str, call) -> str:
    """`call()` must raise that, with those words; returns its message."""
    try:
        call()
    except error as raised:
        text = str(raised)
        assert all(word in text for word in words), f"{words} are not all in: {text}"
        return text
    raise AssertionError(f"nothing was raised; expected {error} with {words}")


# The names of torch 2.12 and later; before, and with a FutureWarning since, they were others.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
