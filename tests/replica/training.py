"""One training, as any peer runs it and as one plain process does it: the oracle.

    python -m tests.replica.training '{"url": ..., "rounds": 40, ...}'

A peer reports a JSON line for every round that it applies, and a last one when it ends. It can be
told to be slow, or to kill itself at a point of a round.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import manyhands as mh
from manyhands.data.calendar import Calendar
from manyhands.data.order import Order
from manyhands.replica.replica import seed_of_pass

SIZE, BATCH, GRAIN, FEATURES, CLASSES, SEED = 90, 24, 4, 12, 4, 7


class Points(Dataset):
    """Labelled points; every look at one adds noise, as augmentation does."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(SIZE, FEATURES, generator=generator, dtype=torch.float64)
        self.y = torch.randint(0, CLASSES, (SIZE,), generator=generator)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index):
        return self.x[index], self.y[index]


def make(grain: int | None = GRAIN):
    """Model, optimizer, schedule. With grains it may have layers that see their batch or chance."""
    torch.manual_seed(11)
    special = [nn.BatchNorm1d(16), nn.Dropout(0.2)] if grain else [nn.LayerNorm(16)]
    model = nn.Sequential(nn.Linear(FEATURES, 16), *special, nn.Tanh(), nn.Linear(16, CLASSES))
    model = model.double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    return model, optimizer, schedule


criterion = nn.CrossEntropyLoss()


def alone(epochs: int, grain: int | None = GRAIN) -> tuple[list[float], nn.Module]:
    """Loss of each round, and the model at the end, in a plain loop without anything of ours.

    But for the order of the samples and the seed of a pass, which are part of the promise.
    """
    data, (model, optimizer, schedule) = Points(), make(grain)
    calendar, losses = Calendar(SIZE, BATCH), []
    for number in range(epochs * calendar.rounds_per_epoch):
        epoch, start, stop = calendar.span(number)
        places = Order(SIZE, seed=SEED, epoch=epoch).indices(start, stop)
        size = grain or len(places)
        before = {n: b.clone() for n, b in model.named_buffers()}
        sums = {n: torch.zeros_like(b, dtype=torch.float64) for n, b in before.items()}
        optimizer.zero_grad()
        total = 0.0
        for first in range(0, len(places), size):
            chosen = places[first : first + size]
            for name, buffer in model.named_buffers():
                buffer.data.copy_(before[name])
            torch.manual_seed(seed_of_pass(SEED, number, first // size))
            share = len(chosen) / len(places)
            loss = criterion(model(data.x[chosen]), data.y[chosen])
            (loss * share).backward()
            total += float(loss.detach()) * share
            for name, buffer in model.named_buffers():
                sums[name] += buffer * share
        for name, buffer in model.named_buffers():
            buffer.data.copy_(sums[name] if buffer.is_floating_point() else before[name] + 1)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total)
        if calendar.span(number + 1).epoch > epoch:
            schedule.step()
    return losses, model


def report(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def die(at: dict, run: Any, point: str) -> None:
    """Now, if this is what the test wants."""
    if at and at["point"] == point and run.round == at["round"]:
        os.kill(os.getpid(), signal.SIGKILL)


def train(
    *,
    url: str | None = None,
    run: str | None = None,
    name: str | None = None,
    epochs: int = 3,
    grain: int | None = GRAIN,
    delay_s: float = 0.0,
    min_peers: int = 1,
    lease_s: float = 10.0,
    kill: dict | None = None,
    **options: Any,
) -> None:
    """A peer. `kill`: {"point": "forward" | "backward" | "step", "round": N}."""
    model, optimizer, schedule = make(grain)
    data = DataLoader(Points(), BATCH, shuffle=True)
    joined = mh.join(url, run=run, name=name, min_peers=min_peers, lease_s=lease_s, seed=SEED)
    with joined as hand:
        model, optimizer, loader, schedule = hand.wrap(
            model, optimizer, data, schedule, grain_size=grain, epochs=epochs, **options
        )
        report(joined=hand.round)
        for _ in range(epochs):
            for x, y in loader:
                die(kill or {}, hand, "forward")
                time.sleep(delay_s)
                optimizer.zero_grad()
                loss = criterion(model(x), y)
                mean = hand.mean(loss)
                die(kill or {}, hand, "backward")
                before = hand.round
                loss.backward()
                die(kill or {}, hand, "step")
                hand.clip_grad_norm_(1.0)
                optimizer.step()
                if hand.round > before:
                    report(
                        round=hand.round - 1,
                        loss=float(mean),
                        of=mean.round,
                        state=hand.digest().hex(),
                        samples=len(y),
                        members=len(hand.roster),
                    )
            schedule.step()
        parameters = [p.tolist() for p in model.state_dict().values()]
    report(done=hand.round, parameters=parameters)


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(**json.loads(sys.argv[1]))
