"""torch.distributed.pipelining: every rank some layers, microbatches in between."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    SplitPoint,
    pipeline,
)

from tests.collectives.backend.programs.training import loss_of

WIDTH, ROWS, MICROBATCHES, STEPS = 32, 24, 6, 3
SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
}


def _layers(num: int) -> list[nn.Module]:
    torch.manual_seed(21)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num)]


def _data(step: int):
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(ROWS, WIDTH, generator=generator)
    return inputs, torch.randint(0, WIDTH, (ROWS,), generator=generator)


def train(name: str) -> None:
    """Several steps, so that receive buffers are used again; then compare layer by layer."""
    rank, num = dist.get_rank(), dist.get_world_size()
    per_rank = 2 if name == "interleaved" else 1
    # Interleaved wants a multiple of the ranks.
    microbatches = 2 * num if name == "interleaved" else MICROBATCHES
    layers = _layers(num * per_rank)
    mine = [rank + num * turn for turn in range(per_rank)]
    stages = [
        PipelineStage(layers[index], index, len(layers), torch.device("cpu")) for index in mine
    ]
    schedule = SCHEDULES[name](
        stages if name == "interleaved" else stages[0], microbatches, loss_fn=loss_of
    )
    parameters = [p for index in mine for p in layers[index].parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    reference = nn.Sequential(*_layers(num * per_rank))
    alone = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(STEPS):
        inputs, labels = _data(step)
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        arguments = (inputs,) if rank == 0 else ()
        if rank == num - 1:
            schedule.step(*arguments, target=labels, losses=losses)
        else:
            schedule.step(*arguments)
        optimizer.step()
        alone.zero_grad()
        expected = loss_of(reference(inputs), labels)
        expected.backward()
        alone.step()
        if rank == num - 1:
            torch.testing.assert_close(torch.stack(losses).mean(), expected)
    for index in mine:
        for parameter, theirs in zip(
            layers[index].parameters(), reference[index].parameters(), strict=True
        ):
            torch.testing.assert_close(parameter, theirs, rtol=1e-4, atol=1e-5)


def traced() -> None:
    """The frontend that cuts a model itself."""
    rank, num = dist.get_rank(), dist.get_world_size()
    model = nn.Sequential(*_layers(num))
    inputs, labels = _data(0)
    spec = {str(index): SplitPoint.BEGINNING for index in range(1, num)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.export, about itself
        pipe = pipeline(model, mb_args=(inputs.chunk(MICROBATCHES)[0],), split_spec=spec)
    stage = pipe.build_stage(rank, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=loss_of)
    reference = nn.Sequential(*_layers(num))
    expected = reference(inputs)
    loss_of(expected, labels).backward()
    if rank == 0:
        schedule.step(inputs)
    elif rank == num - 1:
        losses: list[torch.Tensor] = []
        out = schedule.step(target=labels, losses=losses)
        torch.testing.assert_close(out, expected)
    else:
        schedule.step()
    gradients = {name: p.grad for name, p in stage.submod.named_parameters()}
    assert gradients.keys() == {f"{rank}.0.weight", f"{rank}.0.bias"}
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, reference.get_parameter(name).grad, msg=name)
