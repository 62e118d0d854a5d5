"""Groups of some ranks: overlapping, of one, made by their members alone, destroyed."""

from __future__ import annotations

import inspect
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from tests.collectives.backend.programs.values import (
    SPLIT,
    all_gather_single,
    combined,
    given,
    reduce_scatter_single,
    refuses,
    same,
)


def _place() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def _exercise(group, ranks) -> None:
    """One of each kind in a group of these ranks."""
    rank = dist.get_rank()
    for numel in (SPLIT, 20_000):
        mine = given(rank, numel, torch.float32)
        every = [given(r, numel, torch.float32) for r in ranks]
        total = combined(ReduceOp.SUM, every)
        dist.all_reduce(mine, group=group)
        same(mine, total, ("all_reduce", ranks, numel))
    small = given(rank, 5, torch.float32)
    dist.all_reduce(small, ReduceOp.AVG, group=group)
    want = combined(ReduceOp.AVG, [given(r, 5, torch.float32) for r in ranks])
    same(small, want, "small")
    told = given(rank, 20_000, torch.float32)
    dist.broadcast(told, ranks[-1], group=group)
    same(told, every[-1], ("broadcast", ranks))
    outs = [torch.empty(20_000) for _ in ranks]
    dist.all_gather(outs, given(rank, 20_000, torch.float32), group=group)
    for out, want in zip(outs, every, strict=True):
        same(out, want, ("all_gather", ranks))
    stacked = torch.empty(len(ranks), 20_000)
    all_gather_single(stacked, given(rank, 20_000, torch.float32), group=group)
    same(stacked, torch.stack(every), ("all_gather_single", ranks))
    out = torch.empty(20_000)
    reduce_scatter_single(out, given(rank, 20_000, torch.float32).repeat(len(ranks)), group=group)
    same(out, total, ("reduce_scatter", ranks))
    shares = [torch.empty(9000) for _ in ranks]
    chunks = [given(rank, 9000, torch.float32, to) for to in ranks]
    dist.all_to_all(shares, chunks, group=group)
    for source, share in zip(ranks, shares, strict=True):
        same(share, given(source, 9000, torch.float32, rank), ("all_to_all", ranks))
    root = ranks[0]
    dist.reduce(told, root, group=group)
    gathered = [torch.empty(3) for _ in ranks] if rank == root else None
    dist.gather(given(rank, 3, torch.float32), gathered, root, group=group)
    out = torch.empty(9000)
    dist.scatter(out, chunks if rank == root else None, root, group=group)
    same(out, given(root, 9000, torch.float32, rank), ("scatter", ranks))
    names = [None] * len(ranks)
    dist.all_gather_object(names, rank, group=group)
    assert names == list(ranks)
    dist.barrier(group)


def every_group() -> None:
    """All subsets, so that each two overlap: the same operations in all of them, mixed."""
    rank, num = _place()
    subsets = [[r for r in range(num) if mask >> r & 1] for mask in range(1, 1 << num)]
    groups = [(ranks, dist.new_group(ranks)) for ranks in subsets]
    for ranks, group in groups:
        if rank in ranks:
            assert dist.get_rank(group) == ranks.index(rank)
            assert dist.get_world_size(group) == len(ranks)
            assert dist.get_backend(group) == "manyhands"
            assert dist.get_process_group_ranks(group) == ranks
            _exercise(group, ranks)
    # One operation in each group at once, waited for in another order.
    tensors = [(ranks, group, given(rank, SPLIT, torch.float32)) for ranks, group in groups]
    works = [
        dist.all_reduce(tensor, group=group, async_op=True)
        for ranks, group, tensor in tensors
        if rank in ranks
    ]
    for work in reversed(works):
        work.wait()
    for ranks, _, tensor in tensors:
        if rank in ranks:
            every = [given(r, SPLIT, torch.float32) for r in ranks]
            same(tensor, combined(ReduceOp.SUM, every), ranks)
    # Destroying a group, even one of all ranks, leaves the others alone.
    for ranks, group in groups:
        if rank in ranks:
            dist.destroy_process_group(group)
    dist.barrier()


def local_synchronization() -> None:
    """Only the members call new_group."""
    rank, num = _place()
    ranks = [num - 2, num - 1]
    if rank in ranks:
        for _ in range(2):
            group = dist.new_group(ranks, use_local_synchronization=True)
            _exercise(group, ranks)
    pairs, _ = dist.new_subgroups(group_size=1)
    _exercise(pairs, [rank])
    mine, _ = dist.new_subgroups_by_enumeration([[r] for r in reversed(range(num))])
    _exercise(mine, [rank])


def another_order() -> None:
    """A group's members may be in an order of their own."""
    rank, num = _place()
    ranks = list(reversed(range(num)))
    make = dist.distributed_c10d._new_group_with_tag
    if "sort_ranks" not in inspect.signature(make).parameters:
        return  # torch 2.11 sorts them
    group = make(ranks, sort_ranks=False)
    assert dist.get_rank(group) == num - 1 - rank
    out = torch.empty(num)
    all_gather_single(out, torch.tensor([float(rank)]), group=group)
    assert out.tolist() == [float(r) for r in ranks]
    every = [given(r, SPLIT, torch.float32) for r in ranks]
    mine = given(rank, SPLIT, torch.float32)
    dist.all_reduce(mine, group=group)
    same(mine, combined(ReduceOp.SUM, every), "summed in that order")


def pairs_in_groups() -> None:
    """Ranks of send and recv are the world's, or with group_dst and group_src the group's."""
    rank, num = _place()
    ranks = [num - 2, num - 1]
    group = dist.new_group(ranks)
    if rank == ranks[0]:
        dist.send(torch.tensor([1.0]), ranks[1], group=group)
        dist.send(torch.tensor([2.0]), group=group, group_dst=1)
        dist.send(torch.tensor([3.0]), ranks[1])
    elif rank == ranks[1]:
        came = [torch.empty(1) for _ in range(3)]
        # Another order than they were sent in: groups do not mix.
        dist.recv(came[2], ranks[0])
        dist.recv(came[0], group=group, group_src=0)
        assert dist.recv(came[1], group=group) == ranks[0]
        assert [float(c) for c in came] == [1.0, 2.0, 3.0]
    dist.barrier()


def another_backend() -> None:
    """gloo beside it, over our store: for peers that can dial each other."""
    rank, num = _place()
    group = dist.new_group(backend="gloo")
    tensor = torch.full((100,), float(rank))
    dist.all_reduce(tensor, group=group)
    assert tensor[0] == sum(range(num))
    dist.monitored_barrier(group)
    dist.destroy_process_group(group)
    dist.barrier()


def what_torch_asks_of_a_group() -> None:
    """The small things that frameworks look up."""
    rank, num = _place()
    world = dist.distributed_c10d._get_default_group()
    assert world.name() == world.getBackendName() == "manyhands"
    assert (world.rank(), world.size()) == (rank, num)
    assert world.group_desc == "default_pg"
    assert torch.device("cpu") in world._device_types
    backend = world._get_backend(torch.device("cpu"))
    assert not backend.supports_splitting
    assert not backend.supports_coalescing
    assert dist.distributed_c10d._get_object_coll_device(world) == "cpu"
    assert "cpu:manyhands" in dist.get_backend_config()
    assert dist.get_node_local_rank(fallback_rank=7) == 7
    group = dist.new_group(timeout=timedelta(seconds=33), group_desc="mine")
    assert group.group_desc == "mine"
    assert world.group_name != group.group_name
    refuses(RuntimeError, call=lambda: dist.split_group(split_ranks=[list(range(num))]))
    dist.barrier()


def store() -> None:
    """torch's store, over our link: through prefixes, as torch uses it."""
    rank, num = _place()
    ours = dist.distributed_c10d._get_default_store()
    for store in (ours, dist.PrefixStore("deeper", ours)):
        store.set(f"from {rank}", f"value {rank}")
        for r in range(num):
            assert store.get(f"from {r}") == f"value {r}".encode()
        dist.barrier()
        assert store.add("count", rank + 1) <= num * (num + 1) // 2
        dist.barrier()
        assert store.add("count", 0) == num * (num + 1) // 2
        assert store.get("count") == str(num * (num + 1) // 2).encode()
        assert store.check([f"from {r}" for r in range(num)])
        assert not store.check(["from 0", "nobody"])
        store.append("letters", "ab")
        dist.barrier()
        assert store.get("letters") == b"ab" * num
        store.multi_set([f"{rank} a", f"{rank} b"], ["x", "y"])
        assert store.multi_get([f"{rank} a", f"{rank} b"]) == [b"x", b"y"]
        if rank == 0:
            assert store.compare_set("once", "", "first") == b"first"
            assert store.compare_set("once", "wrong", "second") == b"first"
            assert store.compare_set("once", "first", "second") == b"second"
            binary = bytes(range(256)) * 100
            store.set("binary", binary)
            assert store.get("binary") == binary
        dist.barrier()
        # A key that comes while it is waited for.
        if rank == 0:
            store.wait(["late"], timedelta(seconds=30))
        elif rank == 1:
            store.set("late", "now")
        dist.barrier()
        if rank == 1:
            assert store.delete_key("late")
            assert not store.delete_key("late")
            before = store.num_keys()
            store.set("one more", "")
            assert store.num_keys() == before + 1
            assert store.get("one more") == b""
        refuses(
            dist.DistStoreError,
            "never",
            "0.1 s",
            call=lambda s=store: s.wait(["never"], timedelta(milliseconds=100)),
        )
        dist.barrier()
