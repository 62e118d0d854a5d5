"""send and recv: tags, order, batches, any source."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from tests.collectives.backend.programs.values import DTYPES, given, refuses, same


def _place() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def send_and_receive() -> None:
    rank, num = _place()
    ahead, behind = (rank + 1) % num, (rank - 1) % num
    for numel in (0, 1, 31, 8193, 300_001):
        for dtype in DTYPES if numel == 31 else (torch.float32, torch.bfloat16, torch.bool):
            tensor = given(rank, numel, dtype)
            sending = dist.isend(tensor, ahead)
            came = torch.empty_like(tensor)
            assert dist.recv(came, behind) == behind
            sending.wait()
            same(came, given(behind, numel, dtype), (numel, dtype))
    view = torch.zeros(100, 100)
    sending = dist.isend(given(rank, 10_000, torch.float32).view(100, 100).t(), ahead)
    dist.recv(view.t(), behind)
    sending.wait()
    same(view, given(behind, 10_000, torch.float32).view(100, 100), "views")
    leaf = torch.zeros(20_000, requires_grad=True)
    sending = dist.isend(given(rank, 20_000, torch.float32), ahead)
    dist.recv(leaf, behind)
    sending.wait()
    same(leaf, given(behind, 20_000, torch.float32), "a leaf that requires grad")


def tags_in_any_order() -> None:
    """Each tag has an order of its own."""
    rank, num = _place()
    ahead, behind = (rank + 1) % num, (rank - 1) % num
    tags = (7, 0, 3)
    works = [
        dist.isend(given(rank, 5000 * (1 + tag), torch.float32, 10 * tag + turn), ahead, tag=tag)
        for tag in tags
        for turn in range(3)
    ]
    for tag in sorted(tags):
        for turn in range(3):
            came = torch.empty(5000 * (1 + tag))
            dist.recv(came, behind, tag=tag)
            same(came, given(behind, came.numel(), torch.float32, 10 * tag + turn), (tag, turn))
    for work in works:
        work.wait()
    # Receives that wait before anything is sent, finished in another order.
    waiting = {tag: torch.empty(3000) for tag in tags}
    works = {tag: dist.irecv(tensor, behind, tag=tag) for tag, tensor in waiting.items()}
    dist.barrier()
    sends = [dist.isend(given(rank, 3000, torch.float32, t), ahead, tag=t) for t in reversed(tags)]
    for tag in tags:
        works[tag].wait()
        same(waiting[tag], given(behind, 3000, torch.float32, tag), tag)
    for work in sends:
        work.wait()


def batched() -> None:
    rank, num = _place()
    ahead, behind = (rank + 1) % num, (rank - 1) % num
    outs = [torch.empty(20_000), torch.empty(20_000)]
    mine = [given(rank, 20_000, torch.float32, salt) for salt in (1, 2)]
    ops = [
        dist.P2POp(dist.isend, mine[0], ahead),
        dist.P2POp(dist.irecv, outs[0], behind),
        dist.P2POp(dist.isend, mine[1], behind),
        dist.P2POp(dist.irecv, outs[1], ahead),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    same(outs[0], given(behind, 20_000, torch.float32, 1), "from behind")
    same(outs[1], given(ahead, 20_000, torch.float32, 2), "from ahead")
    came = {dtype: torch.empty_like(given(0, 31, dtype)) for dtype in DTYPES}
    ops = [dist.P2POp(dist.isend, given(rank, 31, dtype), ahead) for dtype in DTYPES]
    ops += [dist.P2POp(dist.irecv, tensor, behind) for tensor in came.values()]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    for dtype, tensor in came.items():
        same(tensor, given(behind, 31, dtype), dtype)


def any_source() -> None:
    """Whoever sends; several receives wait at once; a sender's messages keep their order."""
    rank, num = _place()
    turns = 4
    if rank != 0:
        for turn in range(turns):
            dist.send(given(rank, 9000, torch.float32, turn), 0, tag=5)
        dist.barrier()
        return
    total = turns * (num - 1)
    tensors = [torch.empty(9000) for _ in range(total)]
    # All of them wait before the first is looked at.
    works = [dist.irecv(tensor, tag=5) for tensor in tensors[:-1]]
    seen: dict[int, int] = {}
    for work, tensor in zip(works, tensors, strict=False):
        work.wait()
        source = work._source_rank()
        same(tensor, given(source, 9000, torch.float32, seen.get(source, 0)), source)
        seen[source] = seen.get(source, 0) + 1
    source = dist.recv(tensors[-1], tag=5)
    same(tensors[-1], given(source, 9000, torch.float32, seen.get(source, 0)), "the last")
    seen[source] = seen.get(source, 0) + 1
    assert seen == dict.fromkeys(range(1, num), turns)
    dist.barrier()


def any_source_beside_a_named_one() -> None:
    """A receive from a named rank and one from any, both waiting: both are served."""
    rank = dist.get_rank()
    if rank == 0:
        named, other = torch.empty(9000), torch.empty(9000)
        first = dist.irecv(other)
        second = dist.irecv(named, 1)
        dist.barrier()
        first.wait()
        second.wait()
        got = sorted([float(named[0]), float(other[0])])
        assert got == [1.0, 2.0], got
    else:
        dist.barrier()
        if rank == 1:
            dist.send(torch.full((9000,), 1.0), 0)
            dist.send(torch.full((9000,), 2.0), 0)
    dist.barrier()


def works_tell_how_they_stand() -> None:
    """A wait may be given up, and taken up again."""
    rank, num = _place()
    ahead, behind = (rank + 1) % num, (rank - 1) % num
    for tag, source in ((1, behind), (2, None)):
        tensor = torch.empty(3)
        work = dist.irecv(tensor, source, tag=tag)
        assert not work.is_completed()
        refuses(RuntimeError, "0.05 s", call=lambda w=work: w.wait(timedelta(milliseconds=50)))
        dist.barrier()
        dist.isend(torch.full((3,), float(rank)), ahead, tag=tag).wait()
        assert work.wait(timedelta(seconds=30))
        assert work.is_completed()
        assert work.is_success()
        assert (tensor == behind).all()
        assert torch.equal(work.get_future().wait()[0], tensor)
