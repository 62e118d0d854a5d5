"""Everything that moves tensors and adds nothing up."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist

from manyhands.core.errors import UsageError
from tests.collectives.backend.programs.values import (
    DTYPES,
    all_gather_single,
    given,
    refuses,
    same,
)

SIZES = (0, 1, 8193, 300_001)


def _place() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def broadcast() -> None:
    rank, num = _place()
    for root in range(num):
        for numel in SIZES:
            tensor = given(rank, numel, torch.float32)
            dist.broadcast(tensor, root)
            same(tensor, given(root, numel, torch.float32), (root, numel))
    for dtype in DTYPES:
        tensor = given(rank, 20_000, dtype)
        dist.broadcast(tensor, 1)
        same(tensor, given(1, 20_000, dtype), dtype)
    columns = given(rank, 40_000, torch.float32).view(200, 200)[:, ::3]
    dist.broadcast(columns, 0)
    same(columns, given(0, 40_000, torch.float32).view(200, 200)[:, ::3], "strided")
    leaf = torch.zeros(10_000, requires_grad=True)
    with torch.no_grad():
        leaf.fill_(rank)
    dist.broadcast(leaf, 1)
    assert leaf.requires_grad
    assert (leaf == 1).all()


def all_gather() -> None:
    rank, num = _place()
    for dtype in DTYPES:
        for numel in (3, 20_000):
            outs = [torch.empty_like(given(r, numel, dtype)) for r in range(num)]
            dist.all_gather(outs, given(rank, numel, dtype))
            for r, out in enumerate(outs):
                same(out, given(r, numel, dtype), (dtype, numel, r))
    for numel in SIZES:
        want = torch.cat([given(r, numel, torch.float32) for r in range(num)])
        out = torch.empty(num * numel)
        all_gather_single(out, given(rank, numel, torch.float32))
        same(out, want, numel)
        # In place: the input is a piece of the output.
        inside = torch.empty(num * numel)
        own = inside[rank * numel : (rank + 1) * numel]
        own.copy_(given(rank, numel, torch.float32))
        all_gather_single(inside, own)
        same(inside, want, ("in place", numel))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for call in (dist.all_gather_into_tensor, dist._all_gather_base):
            out = torch.empty(num, 5)
            call(out, given(rank, 5, torch.float32))
            same(out, torch.stack([given(r, 5, torch.float32) for r in range(num)]), "old name")
        lists = [[torch.empty(4), torch.empty(20_000)] for _ in range(num)]
        mine = [given(rank, n, torch.float32, n) for n in (4, 20_000)]
        dist.all_gather_coalesced(lists, mine)
        for r, pair in enumerate(lists):
            for out, n in zip(pair, (4, 20_000), strict=True):
                same(out, given(r, n, torch.float32, n), ("coalesced", r))
    views = [torch.empty(100, 90).t() for _ in range(num)]
    dist.all_gather(views, given(rank, 9000, torch.float32).view(90, 100))
    for r, view in enumerate(views):
        same(view, given(r, 9000, torch.float32).view(90, 100), "non-contiguous")


def wrong_sizes_are_refused() -> None:
    """On every rank alike, before anything is sent; the group goes on."""
    rank, num = _place()
    one = torch.ones(4)

    def refused(*words, call):
        refuses(UsageError, *words, call=call)

    refused("all_gather", call=lambda: dist.all_gather([torch.empty(3)] * num, one))
    uneven = [torch.empty(4 + r) for r in range(num)]
    refused("all_gather", call=lambda: dist.all_gather(uneven, one))
    refused("all_gather", call=lambda: dist.all_gather([torch.empty(4)] * (num + 1), one))
    refused("all_gather", call=lambda: all_gather_single(torch.empty(4 * num + 1), one))
    group = dist.distributed_c10d._get_default_group()
    short = [torch.empty(4, dtype=torch.int32)] * num  # as many bytes, but not floats
    refused("int32", "float32", call=lambda: group.allgather([short], [one]))
    wide = torch.empty(2 * num, dtype=torch.float64)
    refused("float64", call=lambda: group.all_gather_single(wide, torch.empty(4)[:2]))
    if rank == 0:
        # At the root alone: the others only send, so nothing may have been sent yet.
        gathered = [torch.empty(5)] * num
        refused("gather", call=lambda: group.gather([gathered], [one], _root(dist.GatherOptions)))
        chunks = [torch.empty(5)] * num
        refused("scatter", call=lambda: group.scatter([one], [chunks], _root(dist.ScatterOptions)))
    mixed = [torch.empty(4 + (r == rank)) for r in range(num)]
    refused("all_to_all", call=lambda: dist.all_to_all(mixed, [one] * num))
    splits = [1] * num
    refused(
        "all_to_all",
        "splits",
        call=lambda: dist.all_to_all_single(torch.empty(num), torch.empty(num), [2] * num, splits),
    )
    crossed = [2 if r == rank else 1 for r in range(num)]
    refused(
        "all_to_all",
        call=lambda: dist.all_to_all_single(
            torch.empty(num + 1), torch.empty(num), crossed, splits
        ),
    )
    refused(
        "all_to_all",
        call=lambda: (
            dist.all_to_all_single(torch.empty(num + 1), torch.empty(num + 1)) if num > 1 else None
        ),
    )
    dist.all_reduce(one)
    assert one[0] == num


def _root(options, root=0):
    made = options()
    made.rootRank = root
    return made


def gather_and_scatter() -> None:
    rank, num = _place()
    for root in range(num):
        for numel in SIZES:
            own = given(rank, numel, torch.float64, root)
            outs = [torch.empty_like(own) for _ in range(num)] if rank == root else None
            dist.gather(own, outs, root)
            for r, out in enumerate(outs or []):
                same(out, given(r, numel, torch.float64, root), ("gather", root, numel))
            chunks = [given(r, numel, torch.float64, root) for r in range(num)]
            out = torch.empty(numel, dtype=torch.float64)
            dist.scatter(out, chunks if rank == root else None, root)
            same(out, chunks[rank], ("scatter", root, numel))
    for dtype in DTYPES:
        outs = [torch.empty_like(given(0, 9, dtype)) for _ in range(num)] if rank == 0 else None
        dist.gather(given(rank, 9, dtype), outs, 0)
        for r, out in enumerate(outs or []):
            same(out, given(r, 9, dtype), ("gather", dtype))
        out = torch.empty_like(given(0, 9, dtype))
        dist.scatter(out, [given(r, 9, dtype) for r in range(num)] if rank == 0 else None, 0)
        same(out, given(rank, 9, dtype), dtype)


def all_to_all() -> None:
    rank, num = _place()

    def chunk(source, target, numel, dtype=torch.float32):
        return given(source, numel, dtype, 10 + target)

    for numel in SIZES:
        outs = [torch.empty(numel) for _ in range(num)]
        dist.all_to_all(outs, [chunk(rank, to, numel) for to in range(num)])
        for source, out in enumerate(outs):
            same(out, chunk(source, rank, numel), ("list", numel, source))
        flat = torch.empty(num * numel)
        dist.all_to_all_single(flat, torch.cat([chunk(rank, to, numel) for to in range(num)]))
        same(flat, torch.cat([chunk(s, rank, numel) for s in range(num)]), ("single", numel))
    for dtype in DTYPES:
        outs = [torch.empty(9, dtype=dtype) for _ in range(num)]
        dist.all_to_all(outs, [chunk(rank, to, 9, dtype) for to in range(num)])
        for source, out in enumerate(outs):
            same(out, chunk(source, rank, 9, dtype), ("list", dtype, source))
        flat = torch.empty(num * 9, dtype=dtype)
        dist.all_to_all_single(flat, torch.cat([chunk(rank, to, 9, dtype) for to in range(num)]))
        same(flat, torch.cat([chunk(s, rank, 9, dtype) for s in range(num)]), ("single", dtype))
    # Rows of three; every pair another number of them, some none.
    rows = [[(3 * s + 5 * t) % 4 * 2000 for t in range(num)] for s in range(num)]
    assert any(0 in row for row in rows)
    sent = torch.cat([chunk(rank, to, 3 * rows[rank][to]) for to in range(num)]).view(-1, 3)
    received = torch.empty(sum(rows[s][rank] for s in range(num)), 3)
    dist.all_to_all_single(received, sent, [rows[s][rank] for s in range(num)], rows[rank])
    want = torch.cat([chunk(s, rank, 3 * rows[s][rank]) for s in range(num)]).view(-1, 3)
    same(received, want, "uneven")
    # Nothing at all but to the next.
    ahead = [5 if to == (rank + 1) % num else 0 for to in range(num)]
    behind = [5 if source == (rank - 1) % num else 0 for source in range(num)]
    out = torch.empty(5, dtype=torch.int64)
    dist.all_to_all_single(out, given(rank, 5, torch.int64), behind, ahead)
    same(out, given((rank - 1) % num, 5, torch.int64), "a ring")
    lists = [torch.empty(n * 100) for n in behind]
    dist.all_to_all(lists, [given(rank, n * 100, torch.float32) for n in ahead])
    same(lists[(rank - 1) % num], given((rank - 1) % num, 500, torch.float32), "uneven lists")


def objects() -> None:
    rank, num = _place()
    everything = [None] * num
    dist.all_gather_object(everything, {"rank": rank, "text": "é" * rank})
    assert everything == [{"rank": r, "text": "é" * r} for r in range(num)]
    gathered = [None] * num if rank == 1 else None
    dist.gather_object(("from", rank), gathered, dst=1)
    assert gathered == ([("from", r) for r in range(num)] if rank == 1 else None)
    said = [rank, "x", {3}] if rank == 0 else [None] * 3
    dist.broadcast_object_list(said, src=0)
    assert said == [0, "x", {3}]
    mine = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(num)] if rank == 0 else None, src=0)
    assert mine == [f"for {rank}"]
    if rank == 0:
        dist.send_object_list([{"a": 1}, b"2"], dst=1)
    elif rank == 1:
        came = [None, None]
        dist.recv_object_list(came, src=0)
        assert came == [{"a": 1}, b"2"]


def barriers() -> None:
    dist.barrier()
    work = dist.barrier(async_op=True)
    work.wait()
    dist.barrier(device_ids=None)
    # torch has it for gloo alone; before 2.15 it says so.
    refuses((ValueError, RuntimeError), "backend", call=dist.monitored_barrier)
