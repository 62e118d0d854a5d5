"""Many operations at once, late ranks, and what they cost in memory."""

from __future__ import annotations

import ctypes
import random
import threading
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from tests.collectives.backend.programs.values import (
    SPLIT,
    all_gather_single,
    combined,
    given,
    same,
)


def _place() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def hundreds_in_flight() -> int:
    """Of mixed sizes, waited for in reverse. Returns the number of threads it took."""
    rank, num = _place()
    sizes = random.Random(5).choices((1, 100, 8192, 8193, 40_000) * 4 + (SPLIT,), k=500)
    tensors = [torch.full((size,), float(rank + i)) for i, size in enumerate(sizes)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    for i, tensor in enumerate(tensors):
        assert (tensor == sum(range(num)) + num * i).all(), i
    return threading.active_count()


def every_kind_in_flight() -> None:
    rank, num = _place()
    works, checks = [], []

    def want(tensor, expected):
        checks.append((tensor, expected))

    for turn in range(20):
        size = (5, 30_000, SPLIT)[turn % 3]
        every = [given(r, size, torch.float32, turn) for r in range(num)]
        total = combined(ReduceOp.SUM, every)
        summed, told = every[rank].clone(), every[rank].clone()
        works.append(dist.all_reduce(summed, async_op=True))
        want(summed, total)
        works.append(dist.broadcast(told, turn % num, async_op=True))
        want(told, every[turn % num])
        gathered = torch.empty(num * size)
        works.append(all_gather_single(gathered, every[rank], async_op=True))
        want(gathered, torch.cat(every))
        works.append(dist.isend(every[rank], (rank + 1) % num, tag=turn))
        came = torch.empty(size)
        works.append(dist.irecv(came, (rank - 1) % num, tag=turn))
        want(came, every[(rank - 1) % num])
        works.append(dist.barrier(async_op=True))
    random.Random(rank).shuffle(works)
    for work in works:
        work.wait()
    for tensor, expected in checks:
        same(tensor, expected)


def groups_in_any_order() -> None:
    """Async operations of two groups, begun in another order on every rank."""
    rank, num = _place()
    groups = [dist.new_group() for _ in range(2)]
    for size in (10, 50_000, SPLIT):
        tensors = [torch.full((size,), float(rank + 10 * g)) for g in range(2)]
        order = (0, 1) if rank == 0 else (1, 0)
        works = [dist.all_reduce(tensors[g], group=groups[g], async_op=True) for g in order]
        for work in works:
            work.wait()
        for g, tensor in enumerate(tensors):
            assert (tensor == sum(range(num)) + 10 * g * num).all()
    # Threads of one process, each with a group of its own.
    results = [torch.ones(SPLIT) for _ in groups]

    def reduce(g):
        for _ in range(20):
            dist.all_reduce(results[g], ReduceOp.AVG, group=groups[g])

    threads = [threading.Thread(target=reduce, args=(g,)) for g in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((result == 1).all() for result in results)


def late(num_tensors: int, numel: int) -> int:
    """The last rank is late: the others have begun everything. Returns by how much it grew.

    What it then receives is right, and was not all held in its memory before.
    """
    rank, num = _place()
    store = dist.distributed_c10d._get_default_store()
    last = num - 1
    dist.barrier()
    if rank == last:
        process = psutil.Process()
        before = process.memory_info().rss
        for other in range(last):
            store.wait([f"begun {other}"])
        # Whatever is on its way has come when a message sent later has been answered.
        store.set("anything", "x")
        grown = process.memory_info().rss - before
        tensor = torch.empty(numel)
        for i in range(num_tensors):
            dist.broadcast(tensor, 0)
            assert (tensor == i).all()
            tensor.fill_(float(rank))
            dist.all_reduce(tensor)
            assert (tensor == sum(range(num))).all()
        dist.barrier()
        return grown
    tensors = [torch.full((numel,), float(i)) for i in range(num_tensors)]
    sums = [torch.full((numel,), float(rank)) for _ in range(num_tensors)]
    works = []
    for tensor, summed in zip(tensors, sums, strict=True):
        works.append(dist.broadcast(tensor, 0, async_op=True))
        works.append(dist.all_reduce(summed, async_op=True))
    store.set(f"begun {rank}", "1")
    for work in works:
        work.wait()
    for i, (tensor, summed) in enumerate(zip(tensors, sums, strict=True)):
        assert (tensor == i).all()
        assert (summed == sum(range(num))).all()
    dist.barrier()
    return 0


def any_source_behind_a_flood() -> None:
    """A message for a receive from anybody, sent after more than a reader may be made to hold."""
    rank, num = _place()
    if rank == 0:
        works = [dist.isend(torch.full((1_000_000,), float(i)), num - 1, tag=1) for i in range(40)]
        works.append(dist.isend(torch.tensor([42.0]), num - 1, tag=2))
        for work in works:
            work.wait()
    elif rank == num - 1:
        word, flood = torch.empty(1), torch.empty(1_000_000)
        assert dist.recv(word, tag=2) == 0
        assert word == 42.0
        for i in range(40):
            dist.recv(flood, 0, tag=1)
            assert (flood == i).all()
    dist.barrier()


def nothing_is_kept() -> dict[str, int]:
    """After many operations of all kinds: how many entries are left in the team's books."""
    group = dist.new_group([0, dist.get_world_size() - 1])
    for turn in range(50):
        every_size = torch.ones((5, 40_000, SPLIT)[turn % 3])
        dist.all_reduce(every_size)
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.all_reduce(every_size, group=group)
    dist.barrier()
    team = dist.distributed_c10d._get_default_group()._session.team
    dist.barrier()
    books = {
        "running": team._running,
        "early": team._early.waiting(),
        "held": list(team._dispatch.waiting()),
        "placed": team._placed,
        "any": team._any,
    }
    return {name: len(book) for name, book in books.items() if book}


def large_sum(num_bytes: int) -> int:
    """Of one tensor. Returns by how much this process grew at most while it was made."""
    rank, num = _place()
    tensor = torch.full((num_bytes // 4,), float(rank + 1))
    dist.barrier()
    ctypes.CDLL(None).malloc_trim(0)  # else what others have left free would hide what is taken
    Path("/proc/self/clear_refs").write_text("5")  # a new high-water mark
    before = _memory("VmRSS")
    dist.all_reduce(tensor)
    grown = _memory("VmHWM") - before
    for piece in tensor.chunk(64):
        assert (piece == sum(range(1, num + 1))).all()
    return grown


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
