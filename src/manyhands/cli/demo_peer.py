"""A peer of the demo: an ordinary training script with three lines of manyhands.

    manyhands run -n 3 -m manyhands.cli.demo_peer 24        24 epochs; it needs no demo around it

It reports JSON lines on stdout. `train` is what to copy.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any, NamedTuple

# torch says so on import when NumPy is missing; nothing here needs it.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import manyhands as mh

BATCH = 96  # of all peers together
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)


def train(digits: Digits, model: nn.Module, optimizer: torch.optim.Optimizer, epochs: int) -> None:
    """The loop is the user's own. How many peers share its batches may change at any time."""
    data = DataLoader(TensorDataset(digits.x, digits.y), BATCH, shuffle=True)
    with mh.join() as run:  # where, and as whom, says the environment
        model, optimizer, loader, _ = run.wrap(model, optimizer, data, epochs=epochs)
        run.on_round(tell_round)
        for _ in range(epochs):
            for x, y in loader:  # this peer's share of the batch
                loss = criterion(model(x), y)
                run.mean(loss)
                loss.backward()  # gradients are now those of the whole batch
                optimizer.step()
                optimizer.zero_grad()
    say(accuracy=accuracy(model, digits))


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same at every peer, though whoever joins a run gets its state."""
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    model = nn.Sequential(
        nn.Conv2d(1, 24, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(24, 48, 3, padding=1),
        nn.GELU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(48 * 4 * 4, 10),
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


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
    x = torch.tensor(found.images.tolist()).unsqueeze(1) / 16 - 0.5
    y = torch.tensor(found.target.tolist())
    test = torch.arange(len(y)) % 5 == 0
    return Digits(x[~test], y[~test], x[test], y[test])


def accuracy(model: nn.Module, digits: Digits) -> float:
    """How many of the digits that nobody trained on are read right, as a part of 1."""
    with torch.no_grad():
        return float((model(digits.test_x).argmax(1) == digits.test_y).float().mean())


def warm_up(digits: Digits) -> None:
    """torch loads half of itself with the first step, for which a run would not wait."""
    model, optimizer = make()
    criterion(model(digits.x[:1]), digits.y[:1]).backward()
    optimizer.step()


def tell_round(closed: mh.RoundClosed) -> None:
    """Its loss, and who computed which samples."""
    shares = {peer.name: ranges.spans for peer, ranges in closed.shares.items()}
    say(round=closed.round, loss=closed.means["loss"], shares=shares)


def say(**facts: object) -> None:
    """One line to whoever started this process."""
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    digits = load_digits()
    warm_up(digits)
    model, optimizer = make()
    say(size=len(digits.y), batch=BATCH)
    sys.stdin.readline()  # the demo says when; at a terminal, Enter
    train(digits, model, optimizer, epochs=int(sys.argv[1]))
