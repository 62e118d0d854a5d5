"""DistributedDataParallel in all its modes. Each check returns a digest of the parameters."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import manyhands
from manyhands.core.errors import UsageError
from tests.collectives.backend.programs.training import (
    BATCH,
    CLASSES,
    STEPS,
    WIDTH,
    batch_of,
    check_close,
    digest,
    loss_of,
    make_model,
    make_wide_model,
    sgd,
    train_alone,
    whole_batch,
)
from tests.collectives.backend.programs.values import refuses, same

BUCKETS = {"bucket_cap_mb": 0.06}
_gloo: list[dist.ProcessGroup] = []


def _place() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def _train(wrapped, *, steps=STEPS, optimizer=None) -> None:
    rank = dist.get_rank()
    optimizer = optimizer or sgd(wrapped.parameters())
    for step in range(steps):
        inputs, labels = batch_of(rank, step)
        optimizer.zero_grad()
        loss_of(wrapped(inputs), labels).backward()
        optimizer.step()


def _alone(model=None):
    num = dist.get_world_size()
    return train_alone(model or make_model(), (whole_batch(num, step) for step in range(STEPS)))


def plain(**options) -> str:
    # Another start on every rank: DDP gives all of them that of rank 0.
    model = make_wide_model(seed=7 + dist.get_rank())
    wrapped = DistributedDataParallel(model, **BUCKETS, **options)
    _train(wrapped)
    check_close(model, _alone(make_wide_model()))
    return digest(model)


def no_sync(*, wire: str | None = None, tolerance: float = 1e-5) -> str:
    """Two passes a step, of which only the second is averaged."""
    rank, num = _place()
    model = make_model()
    wrapped = DistributedDataParallel(model, **BUCKETS)
    if wire is not None:
        wrapped.register_comm_hook(None, manyhands.compressed(wire))
    optimizer = sgd(wrapped.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for half in range(2):
            inputs, labels = batch_of(rank, 2 * step + half)
            with wrapped.no_sync() if half == 0 else nullcontext():
                (loss_of(wrapped(inputs), labels) / 2).backward()
        optimizer.step()

    def batches():
        for step in range(STEPS):
            halves = [whole_batch(num, 2 * step + half) for half in range(2)]
            yield torch.cat([h[0] for h in halves]), torch.cat([h[1] for h in halves])

    check_close(model, train_alone(make_model(), batches()), tolerance)
    return digest(model)


class Forked(nn.Module):
    """One of two branches is used, or neither."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES)
        self.always = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs, branch):
        out = self.always(inputs)
        if branch == 0:
            return out + self.first(inputs)
        return out + self.second(inputs) if branch == 1 else out


def find_unused() -> str:
    """Ranks use other parts of the model; some parts nobody does."""
    rank, num = _place()

    def branch(of, step):
        return (of + step) % 2 if step != 2 else 2

    model = Forked()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True, **BUCKETS)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    reference = Forked()
    alone = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(STEPS):
        inputs, labels = batch_of(rank, step)
        optimizer.zero_grad(set_to_none=False)
        loss_of(wrapped(inputs, branch(rank, step)), labels).backward()
        optimizer.step()
        alone.zero_grad()
        for other in range(num):
            inputs, labels = batch_of(other, step)
            (loss_of(reference(inputs, branch(other, step)), labels) / num).backward()
        alone.step()
    check_close(model, reference)
    return digest(model)


def static_graph() -> str:
    """With a layer that is used twice, and one never."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(4)
            self.shared, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
            self.unused = nn.Linear(3, 3)

        def forward(self, inputs):
            return self.last(self.shared(self.shared(inputs).tanh()))

    model = Twice()
    wrapped = DistributedDataParallel(model, static_graph=True, **BUCKETS)
    _train(wrapped)
    check_close(model, _alone(Twice()))
    return digest(model)


def uneven_inputs(*, by_method: bool = False) -> str:
    """Rank r has r batches more than rank 0: those that are done shadow the others."""
    rank, num = _place()
    model = make_model()
    wrapped = DistributedDataParallel(model, **BUCKETS)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    with wrapped.join() if by_method else Join([wrapped]):
        for step in range(2 + rank):
            inputs, labels = batch_of(rank, step)
            optimizer.zero_grad()
            loss_of(wrapped(inputs), labels).backward()
            optimizer.step()
    reference = make_model()
    alone = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(2 + num - 1):
        alone.zero_grad()
        for other in range(num):
            if step < 2 + other:  # still divided by all
                inputs, labels = batch_of(other, step)
                (loss_of(reference(inputs), labels) / num).backward()
        alone.step()
    check_close(model, reference)
    return digest(model)


def stopped_by_the_first_to_end() -> str:
    """All hear of it, where else whoever is done would shadow the others."""
    rank = dist.get_rank()
    model = make_model()
    wrapped = DistributedDataParallel(model, **BUCKETS)
    steps = []

    def train() -> None:
        with wrapped.join(throw_on_early_termination=True):
            for step in range(2 + rank):
                inputs, labels = batch_of(rank, step)
                loss_of(wrapped(inputs), labels).backward()
                steps.append(step)

    refuses(RuntimeError, "exhausted", "inputs", call=train)
    assert steps == [0, 1]
    return digest(model)


def fp16_hook() -> str:
    model = make_model()
    wrapped = DistributedDataParallel(model, **BUCKETS)
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    _train(wrapped)
    check_close(model, _alone(), tolerance=3e-3)
    return digest(model)


def own_hook() -> str:
    """A hook that calls all_reduce itself and divides afterwards."""

    def hook(group, bucket):
        num = group.size()
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0] / num)

    model = make_model()
    wrapped = DistributedDataParallel(model, **BUCKETS)
    wrapped.register_comm_hook(dist.group.WORLD, hook)
    _train(wrapped)
    check_close(model, _alone())
    return digest(model)


def compressed(wire: str, tolerance: float) -> str:
    """Against torch's own hook and one process; and as many sums as there are buckets."""
    own, theirs = manyhands.compressed(wire), getattr(default_hooks, f"{wire}_compress_hook")
    narrow, buckets = {"bf16": torch.bfloat16, "fp16": torch.float16}[wire], set()

    def watched(state, bucket):
        buckets.add(bucket.index())
        return own(state, bucket).then(look)

    def look(future):
        mean = future.value()
        same(mean.to(narrow).float(), mean, "as it came off the wire")
        return mean

    models = []
    # Not by its name: DDP has that of bf16 on NCCL alone.
    for hook in (watched, lambda state, bucket: theirs(state, bucket)):
        model = make_model()
        wrapped = DistributedDataParallel(model, **BUCKETS)
        wrapped.register_comm_hook(None, hook)
        _train(wrapped)
        models.append(model)
    assert len(buckets) > 1
    check_close(models[0], models[1], tolerance)
    check_close(models[0], _alone(), tolerance)
    return digest(models[0])


def _power_sgd(group=None, *, rank=2, **options):
    model = make_model()
    wrapped = DistributedDataParallel(model, process_group=group, **options)
    # At its default rate the biases are not compressed but summed first, and all that follows runs
    # in callbacks of that sum. With nothing to sum they would run on the thread that adds them.
    state = powerSGD_hook.PowerSGDState(
        group, matrix_approximation_rank=rank, start_powerSGD_iter=2
    )
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    _train(wrapped, steps=8)
    assert state.compression_stats()[0] > 1.5
    return model


def power_sgd_of_full_rank(**options) -> str:
    """The gradient of a weight has the rank of the batch: with a few more, nothing is lost."""
    num = dist.get_world_size()
    model = _power_sgd(rank=num * BATCH + 4, **options)
    check_close(model, train_alone(make_model(), (whole_batch(num, step) for step in range(8))))
    return digest(model)


def power_sgd() -> str:
    """The same over gloo is the reference."""
    model = _power_sgd()
    gloo = dist.new_group(backend="gloo")
    # Kept to the end: a callback that holds the last reference would have gloo join its own thread.
    _gloo.append(gloo)
    check_close(model, _power_sgd(gloo), tolerance=2e-4)
    return digest(model)


def power_sgd_in_buckets() -> str:
    """Its callbacks start operations and wait for them, those of several buckets side by side.

    Over gloo that aborts the process: one process is the reference, where nothing is lost.
    """
    model = _power_sgd(**BUCKETS)
    first, last = (
        loss_of(m(whole_batch(2, 0)[0]), whole_batch(2, 0)[1]) for m in (make_model(), model)
    )
    assert last < 0.7 * first, (first, last)
    return digest(model) + power_sgd_of_full_rank(**BUCKETS)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs):
        return self.last(self.norm(self.first(inputs)))


def batch_norm() -> str:
    """Buffers are those of rank 0 at every forward pass."""
    rank, num = _place()
    model = Normed()
    wrapped = DistributedDataParallel(model, **BUCKETS)
    _train(wrapped)
    references = [Normed() for _ in range(num)]
    optimizers = [sgd(reference.parameters()) for reference in references]
    for step in range(STEPS):
        for other in references[1:]:
            other.norm.load_state_dict(
                references[0].norm.state_dict() | dict(other.norm.named_parameters())
            )
        for other, (reference, optimizer) in enumerate(zip(references, optimizers, strict=True)):
            inputs, labels = batch_of(other, step)
            optimizer.zero_grad()
            loss_of(reference(inputs), labels).backward()
        for gradients in zip(*(list(r.parameters()) for r in references), strict=True):
            mean = sum(p.grad for p in gradients) / num
            for parameter in gradients:
                parameter.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
    check_close(model, references[rank])
    # torch's SyncBatchNorm is for accelerators: it says so rather than to go wrong.
    refuses(
        ValueError,
        "GPU",
        call=lambda: DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(Normed()))(
            torch.randn(BATCH, WIDTH)
        ),
    )
    dist.barrier()
    return digest(model)


def in_a_subgroup(*, wire: str | None = None, tolerance: float = 1e-5) -> str | None:
    """DDP among some ranks, while the others do something else."""
    rank = dist.get_rank()
    group = dist.new_group([0, 1])
    if rank > 1:
        dist.barrier()
        return None
    model = make_model()
    wrapped = DistributedDataParallel(model, process_group=group, **BUCKETS)
    if wire is not None:
        wrapped.register_comm_hook(group, manyhands.compressed(wire))
    _train(wrapped)
    alone = train_alone(make_model(), (whole_batch(2, s) for s in range(STEPS)))
    check_close(model, alone, tolerance)
    dist.barrier()
    return digest(model)


def another_backend_is_refused() -> None:
    """By name, when its first gradients are there."""
    gloo = dist.new_group(backend="gloo")
    _gloo.append(gloo)
    wrapped = DistributedDataParallel(make_model(), process_group=gloo)
    wrapped.register_comm_hook(gloo, manyhands.compressed("bf16"))
    inputs, labels = batch_of(0, 0)
    loss = loss_of(wrapped(inputs), labels)
    refuses(UsageError, "gloo", "as its state", call=loss.backward)
    dist.barrier()


def sparse_gradients_are_refused() -> None:
    """torch's other backends gather them; here the error says what to do."""
    embedding = nn.Embedding(50, 4, sparse=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = DistributedDataParallel(embedding)
        refuses(UsageError, "to_dense", call=lambda: wrapped(torch.tensor([1, 2])).sum().backward())
    dist.barrier()
