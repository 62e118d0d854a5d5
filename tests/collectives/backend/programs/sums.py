"""all_reduce, reduce, reduce_scatter: every operator and dtype, sizes around every threshold."""

from __future__ import annotations

import hashlib
import time
import warnings

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from manyhands.core.errors import UsageError
from manyhands.wire.tensors import bytes_of
from tests.collectives.backend.programs.values import (
    COMPLEX,
    EIGHT_BIT_FLOATS,
    FLOATS,
    INTS,
    WIDE_UNSIGNED,
    all_gather_single,
    combined,
    given,
    reduce_scatter_single,
    refuses,
    same,
)

ARITHMETIC = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)
BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
SMALL = 32 << 10  # bytes: above, what leaves is no copy
DIRECT = 4 << 20  # bytes of all to all: above, a sum is cut up among the members
LARGE = 16 << 20  # from here on sums leave from the memory of the tensor
MEANINGFUL = (
    *((dtype, op) for dtype in FLOATS for op in (*ARITHMETIC, ReduceOp.AVG)),
    *((dtype, op) for dtype in EIGHT_BIT_FLOATS for op in (*ARITHMETIC, ReduceOp.AVG)),
    *((dtype, op) for dtype in COMPLEX for op in (ReduceOp.SUM, ReduceOp.AVG)),
    *((dtype, op) for dtype in INTS for op in (*ARITHMETIC, *BITWISE)),
    *((dtype, op) for dtype in WIDE_UNSIGNED for op in (ReduceOp.SUM, ReduceOp.PRODUCT)),
    *((torch.bool, op) for op in (*ARITHMETIC, *BITWISE)),
)


def all_reduce_every_dtype() -> None:
    """Equal to the roster-order result, bit for bit, one hop or two."""
    world = range(dist.get_world_size())
    for dtype, op in MEANINGFUL:
        for numel in (31, SMALL // dtype.itemsize + 1, DIRECT // 2 // dtype.itemsize + 1):
            every = [given(rank, numel, dtype) for rank in world]
            mine = every[dist.get_rank()].clone()
            dist.all_reduce(mine, op)
            same(mine, combined(op, every), (dtype, op, numel))


def large_sums_stay_the_users() -> None:
    """They leave from the user's memory: when the operation is done, it is the user's again."""
    world, rank = range(dist.get_world_size()), dist.get_rank()
    numel = LARGE // 4 + 7
    for salt in range(12):
        every = [given(r, numel, torch.float32, salt) for r in world]
        mine = every[rank].clone()
        hasty = rank == salt % len(world)
        if not hasty:
            time.sleep(0.05)  # who comes first gets all sums of the others before its last one left
        dist.all_reduce(mine)
        if hasty:
            for piece in reversed(mine.chunk(16)):
                piece.fill_(float("nan"))
        else:
            same(mine, combined(ReduceOp.SUM, every), salt)


def all_reduce_every_size() -> str:
    """Returns a digest of the results: it must be one on all ranks."""
    digest = hashlib.sha256()
    world = range(dist.get_world_size())
    border = SMALL // 4
    direct = DIRECT // len(world) // (len(world) - 1) // 4
    sizes = (0, 1, 31, border - 1, border, border + 1, direct - 1, direct, direct + 1, 1_500_007)
    for salt, numel in enumerate(sizes):
        every = [given(rank, numel, torch.float32, salt) for rank in world]
        mine = every[dist.get_rank()].clone()
        dist.all_reduce(mine)
        same(mine, combined(ReduceOp.SUM, every), numel)
        digest.update(bytes_of(mine))
    return digest.hexdigest()


def all_reduce_every_shape() -> None:
    """Views, transposed, strided, 0-dim, negated, requiring grad, in inference mode."""
    rank, world = dist.get_rank(), range(dist.get_world_size())

    def check(make, what):
        every = [make(r) for r in world]
        mine = make(rank)
        dist.all_reduce(mine)
        same(mine, combined(ReduceOp.SUM, [e.detach().clone() for e in every]), what)

    check(lambda r: given(r, 1, torch.float32).reshape(()), "0-dim")
    for numel in (600, 30_000):
        check(lambda r, n=numel: given(r, n, torch.float32).view(-1, 30).t(), "transposed")
        check(lambda r, n=numel: given(r, n, torch.float32)[1::3], "strided")
        check(lambda r, n=numel: given(r, n, torch.complex64).conj().imag, "negated")
        check(lambda r, n=numel: given(r, n, torch.float32).requires_grad_(), "leaf")

    base = given(rank, 20_000, torch.float32)
    before = base.clone()
    dist.all_reduce(base[100:15_000])
    want = combined(ReduceOp.SUM, [given(r, 20_000, torch.float32) for r in world])
    same(base[100:15_000], want[100:15_000], "a view")
    same(base[:100], before[:100], "what is before the view")
    same(base[15_000:], before[15_000:], "what is behind the view")
    with torch.inference_mode():
        check(lambda r: given(r, 9000, torch.float32), "inference")


def what_has_no_meaning_is_refused() -> None:
    """On every rank alike, before anything is sent; the group goes on."""
    rank = dist.get_rank()
    for dtype, op in (
        (torch.float32, ReduceOp.BAND),
        (torch.int32, ReduceOp.AVG),
        (torch.bool, ReduceOp.AVG),
        (torch.uint16, ReduceOp.MAX),
    ):
        for numel in (3, 40_000):
            tensor = given(rank, numel, dtype)
            refuses(UsageError, "hint:", call=lambda t=tensor, o=op: dist.all_reduce(t, o))
    refuses(
        ValueError,
        "complex",
        call=lambda: dist.all_reduce(given(rank, 3, torch.complex64), ReduceOp.MAX),
    )
    one = torch.ones(3)
    refuses(
        UsageError,
        "not supported",
        call=lambda: dist.all_reduce(one, dist._make_nccl_premul_sum(2.0)),
    )
    refuses(UsageError, "to_dense", call=lambda: dist.all_reduce(one.to_sparse()))
    refuses(UsageError, "meta", call=lambda: dist.all_reduce(one.to("meta")))
    refuses(UsageError, "expand", call=lambda: dist.all_reduce(torch.ones(1).expand(5)))
    dist.all_reduce(one)
    assert one[0] == dist.get_world_size()


def reduce_to_each_root() -> None:
    rank, world = dist.get_rank(), range(dist.get_world_size())
    for root in world:
        for numel in (0, 5, 9000, 300_001):
            for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.AVG):
                every = [given(r, numel, torch.float32, root) for r in world]
                mine = every[rank].clone()
                dist.reduce(mine, root, op)
                same(mine, combined(op, every) if rank == root else every[rank], (root, numel, op))
    for turn, (dtype, op) in enumerate(MEANINGFUL):
        root = turn % len(world)
        every = [given(r, 31, dtype) for r in world]
        mine = every[rank].clone()
        dist.reduce(mine, root, op)
        same(mine, combined(op, every) if rank == root else every[rank], (root, dtype, op))
    half = given(rank, 20_000, torch.bfloat16).view(100, 200).t()
    dist.reduce(half, 0)
    want = combined(ReduceOp.SUM, [given(r, 20_000, torch.bfloat16) for r in world])
    if rank == 0:
        same(half, want.view(100, 200).t(), "transposed root")


def reduce_scatter_lists_and_tensors() -> None:
    rank, num = dist.get_rank(), dist.get_world_size()
    for numel in (0, 7, 9001, 300_001):
        for dtype in (torch.float32, torch.float16, torch.int64):
            every = [given(r, num * numel, dtype) for r in range(num)]
            want = combined(ReduceOp.SUM, every)[rank * numel : (rank + 1) * numel]
            out = torch.empty(numel, dtype=dtype)
            dist.reduce_scatter(out, list(every[rank].split(numel)) if numel else [out] * num)
            same(out, want, ("list", numel, dtype))
            out = torch.empty(numel, dtype=dtype)
            reduce_scatter_single(out, every[rank])
            same(out, want, ("tensor", numel, dtype))
    for dtype, op in MEANINGFUL:
        every = [given(r, num * 31, dtype) for r in range(num)]
        out = torch.empty(31, dtype=dtype)
        reduce_scatter_single(out, every[rank], op)
        same(out, combined(op, every)[rank * 31 : (rank + 1) * 31], (dtype, op))
    # The other names of the same thing.
    every = [given(r, num * 9, torch.float32) for r in range(num)]
    want = combined(ReduceOp.AVG, every)[rank * 9 : (rank + 1) * 9]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for call in (dist.reduce_scatter_tensor, dist._reduce_scatter_base):
            out = torch.empty(9)
            call(out, every[rank], ReduceOp.AVG)
            same(out, want, call.__name__)
    stacked = torch.empty(3, 3)
    reduce_scatter_single(stacked, every[rank].view(num, 3, 3), ReduceOp.AVG)
    same(stacked, want.view(3, 3), "stacked")
    # A chunk of another size for each member.
    sizes = [10_000 + r for r in range(num)]
    chunks = [[given(r, size, torch.float32, size) for size in sizes] for r in range(num)]
    out = torch.empty(sizes[rank])
    dist.reduce_scatter(out, chunks[rank])
    same(out, combined(ReduceOp.SUM, [of[rank] for of in chunks]), "uneven")
    refuses(
        UsageError,
        "values",
        call=lambda: reduce_scatter_single(torch.empty(4), torch.empty(4 * num + 1)),
    )
    refuses(
        UsageError,
        "values",
        call=lambda: dist.reduce_scatter(torch.empty(5), [torch.empty(4)] * num),
    )


def coalesced() -> None:
    """Many tensors in one call, and torch's coalescing manager."""
    rank, num = dist.get_rank(), dist.get_world_size()
    sizes = (3, 9000, 100_000)

    def make(r, factor=1):
        return [given(r, n * factor, torch.float32, n) for n in sizes]

    columns = zip(*(make(r) for r in range(num)), strict=True)
    sums = [combined(ReduceOp.SUM, list(column)) for column in columns]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        mine = make(rank)
        dist.all_reduce_coalesced(mine)
        for got, want in zip(mine, sums, strict=True):
            same(got, want, "all_reduce_coalesced")
    for async_ops in (False, True):
        mine = make(rank)
        with dist._coalescing_manager(async_ops=async_ops) as manager:
            for tensor in mine:
                dist.all_reduce(tensor)
        if async_ops:
            manager.wait()
        for got, want in zip(mine, sums, strict=True):
            same(got, want, "coalesced all_reduce")
    scattered = [torch.empty(n) for n in sizes]
    with dist._coalescing_manager():
        for out, chunk in zip(scattered, make(rank, num), strict=True):
            reduce_scatter_single(out, chunk)
    for i, (got, n) in enumerate(zip(scattered, sizes, strict=True)):
        want = combined(ReduceOp.SUM, [make(r, num)[i] for r in range(num)])
        same(got, want[rank * n : (rank + 1) * n], "coalesced reduce_scatter")
    gathered = [torch.empty(n * num) for n in sizes]
    with dist._coalescing_manager():
        for out, own in zip(gathered, make(rank), strict=True):
            all_gather_single(out, own)
    for i, got in enumerate(gathered):
        same(got, torch.cat([make(r)[i] for r in range(num)]), "coalesced all_gather")
