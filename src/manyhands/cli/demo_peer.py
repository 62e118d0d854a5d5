"""One rank of the demo: plain DDP on scikit-learn's digits, with one line of ours.

    python -m manyhands.cli.demo_peer        MANYHANDS_URL, RANK and WORLD_SIZE say where and who

It reports JSON lines on stdout. Rank 0 then trains alone on the same batches, and compares.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

# torch says so on import when NumPy is missing; nothing here needs it.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

EPOCHS, SHARE = 20, 32  # samples of a batch for each rank


class Digits(NamedTuple):
    """Images of 8 x 8 pixels and what they show; every fifth is kept for the test."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


def load_digits() -> Digits:
    """1797 digits, from the package that brings them along."""
    from sklearn.datasets import load_digits as load  # pyright: ignore

    found: Any = load()  # pyright: ignore[reportUnknownVariableType]
    x = torch.tensor(found.data.tolist(), dtype=torch.float32) / 16 - 0.5
    y = torch.tensor(found.target.tolist())
    test = torch.arange(len(y)) % 5 == 0
    return Digits(x[~test], y[~test], x[test], y[test])


def batches(num: int, epoch: int, batch: int, rank: int, world: int) -> Iterator[Tensor]:
    """Which samples this rank takes of each batch of the epoch: the order is everybody's."""
    order = torch.randperm(num, generator=torch.Generator().manual_seed(epoch))
    for start in range(0, num - batch + 1, batch):
        yield order[start + rank : start + batch : world]


def make_model() -> nn.Module:
    """The same at every rank."""
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    return nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def train(
    model: nn.Module,
    digits: Digits,
    batch: int,
    rank: int,
    world: int,
    tell: Callable[[dict[str, float]], None],
) -> None:
    """An ordinary loop."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(EPOCHS):
        start, loss, steps = time.perf_counter(), torch.zeros(()), 0
        for samples in batches(len(digits.y), epoch, batch, rank, world):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(digits.x[samples]), digits.y[samples])
            loss.backward()  # pyright: ignore[reportUnknownMemberType]
            optimizer.step()  # pyright: ignore[reportUnknownMemberType]
            steps += 1
        with torch.no_grad():
            right = (model(digits.test_x).argmax(1) == digits.test_y).float().mean()
        seconds = time.perf_counter() - start
        tell(
            {
                "epoch": epoch + 1,
                "loss": float(loss.detach()),
                "accuracy": float(right),
                "steps_per_s": steps / seconds,
            }
        )


def report(**facts: object) -> None:
    """One line to whoever started this process."""
    print(json.dumps(facts), flush=True)


def main() -> None:
    """Train with the others; at rank 0 then alone."""
    torch.set_num_threads(1)
    dist.init_process_group("manyhands", init_method=os.environ["MANYHANDS_URL"])
    rank, world = dist.get_rank(), dist.get_world_size()
    digits, batch = load_digits(), SHARE * dist.get_world_size()
    model = make_model()
    wrapped = DistributedDataParallel(model)
    train(wrapped, digits, batch, rank, world, lambda facts: report(rank=rank, **facts))
    dist.destroy_process_group()
    if rank == 0:
        alone = make_model()
        train(alone, digits, batch, 0, 1, lambda facts: None)
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        off = max(float((mine - other).detach().abs().max()) for mine, other in pairs)
        report(rank=0, off=off, parameters=sum(p.numel() for p in model.parameters()))


if __name__ == "__main__":
    main()
