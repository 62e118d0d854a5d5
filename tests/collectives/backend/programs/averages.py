"""`hooks.average`: means that travel in fewer bytes. Checks return a digest of what came out."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.collectives.backend.hooks import average
from manyhands.core.errors import UsageError
from manyhands.wire.tensors import bytes_of
from tests.collectives.backend.programs.values import given, refuses, same

NARROW = {"fp16": torch.float16, "bf16": torch.bfloat16}
# Of a value's size: a rounding on the way there and one back. int8: of its block's largest.
ERRORS = {"fp32": 1e-6, "fp16": 2**-10, "bf16": 2**-7, "int8": 2 / 127}
SIZES = (0, 1, 5000, 1_200_001)


def means(wire: str) -> str:
    """Close to the mean of what all ranks gave, and representable on the wire."""
    rank, num = dist.get_rank(), dist.get_world_size()
    total = hashlib.sha256()
    for dtype in (torch.float32, torch.float64):
        for numel in SIZES:
            every = [given(r, numel, dtype) for r in range(num)]
            tensor = every[rank].clone()
            work = average(tensor, wire)
            assert work.wait()
            assert work.get_future().value() is tensor
            _check_near(tensor, every, wire)
            if wire in NARROW:
                same(tensor.to(NARROW[wire]).to(dtype), tensor, (wire, dtype, numel))
            total.update(bytes_of(tensor))
    return total.hexdigest()


def _check_near(mean: Tensor, every: list[Tensor], wire: str) -> None:
    if not mean.numel():
        return
    exact = torch.stack(every).double().mean(0)
    largest = torch.stack(every).double().abs().amax(0)
    room = largest.max() if wire == "int8" else largest
    assert ((mean.double() - exact).abs() <= ERRORS[wire] * room).all(), wire


def narrow_already() -> str:
    """They go as they are: the same bits as a plain mean's."""
    rank = dist.get_rank()
    for dtype in NARROW.values():
        mean, plain = (given(rank, 20_000, dtype) for _ in range(2))
        average(mean, "bf16").wait()
        average(plain).wait()
        same(mean, plain, dtype)
    return ""


def overflowing() -> str:
    """What is too large for fp16 ends as inf, whoever adds it up, as it does with torch's hooks."""
    rank = dist.get_rank()
    for victim in range(dist.get_world_size()):
        tensor = torch.ones(5000)
        if rank == victim:
            tensor[::1000] = 7e4
            tensor[1], tensor[2], tensor[3] = 65519.0, -7e4, torch.nan
        half = tensor.half()
        dist.all_reduce(half, dist.ReduceOp.AVG)
        average(tensor, "fp16").wait()
        assert torch.equal(tensor.isposinf(), half.isposinf())
        assert torch.equal(tensor.isneginf(), half.isneginf())
        assert torch.equal(tensor.isnan(), half.isnan())
        assert tensor[::1000].isposinf().all()
        assert tensor[2].isneginf()
        assert tensor[1].isfinite()  # it is rounded to the largest there is
    return ""


def bytes_of_each(wires: list[str]) -> dict[str, int]:
    """What this rank has sent for one mean, by wire."""
    link = dist.group.WORLD._session.team.link
    sent = {}
    for wire in wires:
        tensor = torch.ones(1_000_000)
        dist.barrier()
        before = link.bytes_sent
        average(tensor, wire).wait()
        dist.barrier()  # whoever is here has the sums that were sent to it
        sent[wire] = link.bytes_sent - before
    return sent


def refusals() -> str:
    """They take no number: the mean that follows meets the others'."""
    if dist.get_rank() == 0:
        tensor = torch.ones(3)
        refuses(UsageError, "'zip'", "'bf16'", call=lambda: average(tensor, "zip"))
        refuses(UsageError, "int64", call=lambda: average(torch.ones(3).long(), "bf16"))
    tensor = torch.full((3,), float(dist.get_rank()))
    average(tensor, "bf16").wait()
    assert (tensor == (dist.get_world_size() - 1) / 2).all()
    return ""
