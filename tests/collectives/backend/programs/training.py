"""A model, its data, and one process that trains it alone: what all others are held against."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from manyhands.wire.tensors import bytes_of

WIDTH, CLASSES, BATCH, STEPS = 64, 10, 6, 5


def make_model(seed: int = 7, hidden: tuple[int, int] = (256, 128)) -> nn.Sequential:
    """Small, but of several buckets."""
    torch.manual_seed(seed)
    one, two = hidden
    return nn.Sequential(
        nn.Linear(WIDTH, one), nn.Tanh(), nn.Linear(one, two), nn.Tanh(), nn.Linear(two, CLASSES)
    )


def make_wide_model(seed: int = 7) -> nn.Sequential:
    """Of two buckets whose sums everybody makes, and one whose sum is cut up among the ranks."""
    return make_model(seed, (1024, 600))


def batch_of(rank: int, step: int, size: int = BATCH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(size, WIDTH, generator=generator)
    return inputs, torch.randint(0, CLASSES, (size,), generator=generator)


def whole_batch(num: int, step: int) -> tuple[Tensor, Tensor]:
    """The batches of all ranks as one."""
    inputs, labels = zip(*(batch_of(rank, step) for rank in range(num)), strict=True)
    return torch.cat(inputs), torch.cat(labels)


loss_of = nn.functional.cross_entropy


def train_alone(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    make_optimizer: Callable[..., torch.optim.Optimizer] | None = None,
) -> nn.Module:
    optimizer = (make_optimizer or sgd)(model.parameters())
    for inputs, labels in batches:
        optimizer.zero_grad()
        loss_of(model(inputs), labels).backward()
        optimizer.step()
    return model


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def check_close(model: nn.Module, reference: nn.Module, tolerance: float = 1e-5) -> None:
    """Parameters and buffers, to a tolerance that rounding alone stays within."""
    theirs = dict(reference.state_dict())
    for name, value in model.state_dict().items():
        other = theirs.pop(name.removeprefix("module."))
        torch.testing.assert_close(value, other, rtol=tolerance, atol=tolerance, msg=name)
    assert not theirs, theirs.keys()


def digest(model: nn.Module) -> str:
    """Equal on two ranks if and only if every bit of their parameters is."""
    total = hashlib.sha256()
    for parameter in model.parameters():
        total.update(bytes_of(parameter))
    return total.hexdigest()
