"""FSDP2, HSDP, DTensor, functional collectives, ZeRO: against one process that has all the data."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tests.collectives.backend.programs.training import (
    STEPS,
    WIDTH,
    batch_of,
    check_close,
    loss_of,
    make_model,
    sgd,
    train_alone,
    whole_batch,
)
from tests.collectives.backend.programs.values import given, same


def _place() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def _alone(num: int) -> nn.Module:
    return train_alone(make_model(), (whole_batch(num, step) for step in range(STEPS)))


def _full(model: nn.Module) -> nn.Module:
    """The whole model, put together from the shards."""
    whole = make_model()
    with torch.no_grad():
        for target, source in zip(whole.parameters(), model.parameters(), strict=True):
            target.copy_(source.full_tensor())
    return whole


def _train(model: nn.Module) -> None:
    rank = dist.get_rank()
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        inputs, labels = batch_of(rank, step)
        optimizer.zero_grad()
        loss_of(model(inputs), labels).backward()
        optimizer.step()


def _sharded(mesh, **options) -> nn.Module:
    model = make_model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def fsdp() -> None:
    _, num = _place()
    model = _sharded(init_device_mesh("cpu", (num,)))
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert model[0].weight.to_local().shape[0] <= -(-256 // num)
    _train(model)
    check_close(_full(model), _alone(num))


def fsdp_with_mixed_precision() -> None:
    """Parameters travel as bf16, gradients are summed in fp32."""
    _, num = _place()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = _sharded(init_device_mesh("cpu", (num,)), mp_policy=policy)
    rank = dist.get_rank()
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        inputs, labels = batch_of(rank, step)
        optimizer.zero_grad()
        loss_of(model(inputs).float(), labels).backward()
        optimizer.step()
    check_close(_full(model), _alone(num), tolerance=2e-2)


def hsdp() -> None:
    """Sharded in pairs, replicated over them: four processes."""
    _, num = _place()
    mesh = init_device_mesh("cpu", (2, num // 2), mesh_dim_names=("replicate", "shard"))
    model = _sharded(mesh)
    _train(model)
    check_close(_full(model), _alone(num))


def tensors() -> None:
    """DTensor on a mesh, and what is done to it."""
    rank, num = _place()
    mesh = init_device_mesh("cpu", (num,), mesh_dim_names=("all",))
    whole = given(0, 60 * 40, torch.float32).view(60, 40)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    same(sharded.full_tensor(), whole, "full_tensor")
    across = sharded.redistribute(mesh, [Shard(1)])
    same(across.to_local(), whole.chunk(num, 1)[rank].contiguous(), "redistribute")
    same(across.redistribute(mesh, [Replicate()]).to_local(), whole, "replicate")
    product = (across @ sharded.redistribute(mesh, [Replicate()]).t()).full_tensor()
    torch.testing.assert_close(product, whole @ whole.t(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sharded.sum().full_tensor(), whole.sum(), rtol=1e-4, atol=1e-3)
    sub = mesh["all"]
    assert sub.get_group() is not None
    assert sub.get_local_rank() == rank


def tensor_parallel() -> None:
    """A column-wise and a row-wise layer: one all_reduce forward, one backward."""
    num = dist.get_world_size()
    mesh, hidden = init_device_mesh("cpu", (num,)), 4 * num

    def make():
        torch.manual_seed(11)
        return nn.Sequential(nn.Linear(WIDTH, hidden), nn.Tanh(), nn.Linear(hidden, 10))

    model = parallelize_module(make(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    reference = make()
    inputs, labels = batch_of(0, 0)  # the same on all ranks
    loss = loss_of(model(inputs), labels)
    loss.backward()
    expected = loss_of(reference(inputs), labels)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)


def functional_collectives() -> None:
    """Those that torch.compile traces: they enter through C++."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the old names, on purpose
        _functional_collectives()


def _functional_collectives() -> None:
    rank, num = _place()
    group = dist.group.WORLD
    every = [given(r, 20_000, torch.float32) for r in range(num)]
    mine = every[rank].clone()
    total = functional.all_reduce(mine, "sum", group)
    torch.testing.assert_close(total, sum(every[1:], every[0]))
    same(mine, every[rank], "functional: the input stays")
    gathered = functional.all_gather_tensor(mine, 0, group)
    same(functional.wait_tensor(gathered), torch.cat(every), "all_gather_tensor")
    scattered = functional.reduce_scatter_tensor(torch.cat([mine] * num), "avg", 0, group)
    torch.testing.assert_close(functional.wait_tensor(scattered), sum(every[1:], every[0]) / num)
    told = functional.wait_tensor(functional.broadcast(mine, 1, group))
    same(told, every[1], "broadcast")
    splits = [5] * num
    crossed = functional.all_to_all_single(mine[: 5 * num], splits, splits, group)
    want = torch.cat([e[5 * rank : 5 * rank + 5] for e in every])
    same(functional.wait_tensor(crossed), want, "all_to_all_single")
    together = functional.all_reduce_coalesced([mine, mine[:7]], "max", group)
    top = torch.stack(every).max(0).values
    same(functional.wait_tensor(together[0]), top, "all_reduce_coalesced")
    same(functional.wait_tensor(together[1]), top[:7], "all_reduce_coalesced")
    many = functional.all_gather_into_tensor_coalesced([mine, mine[:7]], group)
    same(functional.wait_tensor(many[0]), torch.cat(every), "all_gather coalesced")
    few = functional.reduce_scatter_tensor_coalesced([torch.cat([mine] * num)], "sum", [0], group)
    torch.testing.assert_close(functional.wait_tensor(few[0]), sum(every[1:], every[0]))
    leaf = mine.clone().requires_grad_()
    out = functional.all_gather_tensor_autograd(leaf, 0, group)
    (functional.wait_tensor(out) * 2).sum().backward()
    assert (leaf.grad == 2 * num).all()


def zero_redundancy() -> None:
    """The optimizer's state in shards, the parameters sent around after each step."""
    rank, num = _place()
    model = make_model()
    wrapped = DistributedDataParallel(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        optimizer = ZeroRedundancyOptimizer(
            wrapped.parameters(), optimizer_class=torch.optim.Adam, lr=0.01
        )
    for step in range(STEPS):
        inputs, labels = batch_of(rank, step)
        optimizer.zero_grad()
        loss_of(wrapped(inputs), labels).backward()
        optimizer.step()
    reference = train_alone(
        make_model(),
        (whole_batch(num, step) for step in range(STEPS)),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    )
    check_close(model, reference, tolerance=1e-4)
    optimizer.consolidate_state_dict(to=0)
