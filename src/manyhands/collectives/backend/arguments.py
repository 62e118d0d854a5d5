"""Arguments: what torch's callers hand to an operation, checked before anything is sent.

A mistake that every rank makes alike is then an error of that call alone: the group goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from manyhands.collectives.reduction import Operator, arithmetic_for
from manyhands.core.errors import UsageError

_OPERATORS = {
    ReduceOp.SUM: Operator.SUM,
    ReduceOp.AVG: Operator.MEAN,
    ReduceOp.PRODUCT: Operator.PRODUCT,
    ReduceOp.MIN: Operator.MIN,
    ReduceOp.MAX: Operator.MAX,
    ReduceOp.BAND: Operator.AND,
    ReduceOp.BOR: Operator.OR,
    ReduceOp.BXOR: Operator.XOR,
}


def operator_of(opts: Any, dtype: torch.dtype) -> Operator:  # noqa: ANN401  (torch's own type)
    """Of torch's options, for tensors of that dtype; the sum where there are none."""
    op = ReduceOp.SUM if opts is None else opts.reduceOp
    for known, operator in _OPERATORS.items():
        if op == known:
            arithmetic_for(operator, dtype)  # or it says why not
            return operator
    name = "PREMUL_SUM" if op == ReduceOp.PREMUL_SUM else str(op)
    raise UsageError(f"{name} is not supported", hint=f"one of {', '.join(map(str, _OPERATORS))}")


def timeout_of(opts: Any, default_s: float) -> float:  # noqa: ANN401  (torch's own type)
    """Of torch's options, where it was set for this one operation."""
    timeout = getattr(opts, "timeout", None)
    if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
        return default_s
    return timeout.total_seconds()


def place_of(rank: int, size: int) -> int:
    """A place in a group of that size: what a caller has named as root, sender or receiver."""
    if not 0 <= rank < size:
        raise UsageError(f"rank {rank} of a group of {size}", hint="ranks count from 0")
    return rank


def only(items: Sequence[Any], what: str) -> Any:  # noqa: ANN401
    """torch passes a list of one: once there could be one for each GPU of a process."""
    if len(items) != 1:
        raise UsageError(f"{what} takes one tensor of each rank, not {len(items)}")
    return items[0]


def check_each(
    what: str,
    tensors: Sequence[Tensor],
    num: int,
    *,
    like: Tensor | None = None,
    sizes: bool = True,
) -> None:
    """One for each rank, of the dtype and (`sizes`) with as many values as `like`, or the first."""
    if len(tensors) != num:
        raise UsageError(f"{what}: {len(tensors)} tensors for {num} ranks")
    like = tensors[0] if like is None else like
    for place, tensor in enumerate(tensors):
        if tensor.dtype is not like.dtype:
            raise UsageError(
                f"{what}: the tensor for rank {place} is of {tensor.dtype}, not {like.dtype}"
            )
        if sizes and tensor.numel() != like.numel():
            raise UsageError(
                f"{what}: the tensor for rank {place} has {tensor.numel()} values, "
                f"not {like.numel()}",
                hint="all ranks give as much; all_to_all takes different sizes",
            )


def equal_chunks(what: str, flat: Tensor, like: Tensor, num: int) -> Sequence[Tensor]:
    """`flat` as one piece for each rank, each as large as `like`."""
    size = like.numel()
    if flat.dtype is not like.dtype:
        raise UsageError(f"{what}: a tensor of {flat.dtype} beside one of {like.dtype}")
    if flat.numel() != size * num:
        raise UsageError(
            f"{what}: {flat.numel()} values for {num} ranks of {size} values each",
            hint=f"the large tensor must have {size * num} values",
        )
    return _pieces(flat, [size] * num)


def split_chunks(
    what: str, tensor: Tensor, flat: Tensor, splits: Sequence[int], num: int
) -> Sequence[Tensor]:
    """`flat`, the values of `tensor`, as pieces of so many of its rows."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if not splits:
        if rows % num:
            raise UsageError(f"all_to_all: {what} of {rows} rows for {num} ranks, no splits")
        splits = [rows // num] * num
    if len(splits) != num or sum(splits) != rows:
        raise UsageError(f"all_to_all: {what} splits {list(splits)} for {rows} rows")
    width = flat.numel() // rows if rows else 0
    return _pieces(flat, [rows * width for rows in splits])


def _pieces(flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    ends = list(accumulate(sizes))
    return [flat[end - size : end] for end, size in zip(ends, sizes, strict=True)]
