"""The training of the chaos run: what a peer does, and what one process makes of the same rounds.

A pass takes as long as its samples do: a timed wait around a small real step, `PASS_S` for the
share of one of `NUM_PEERS` equal peers. So a round takes longer with fewer of them, as it does
where computing is what costs.
"""

from __future__ import annotations

import signal
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import manyhands as mh
from manyhands.data.calendar import Calendar
from manyhands.data.order import Order
from tests.replica.training import CLASSES, FEATURES, SEED, criterion, make

NUM_PEERS = 8
PASS_S = 0.2
BATCH = 840  # five to eight peers can share it evenly
SIZE = 10 * BATCH - 140  # the last round of an epoch has fewer
SAMPLE_S = PASS_S * NUM_PEERS / BATCH
EPOCHS = 1 << 12  # more than anybody waits for: a run is ended from outside
CALENDAR = Calendar(SIZE, BATCH)


def points() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SIZE, FEATURES, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, CLASSES, (SIZE,), generator=generator))


def alone(num_rounds: int) -> list[float]:
    """Loss of each round, without waits and without anything of ours but the order."""
    (x, y), (model, optimizer, schedule) = points().tensors, make(grain=None)
    losses = []
    for number in range(num_rounds):
        epoch, start, stop = CALENDAR.span(number)
        chosen = Order(SIZE, seed=SEED, epoch=epoch).indices(start, stop)
        optimizer.zero_grad()
        loss = criterion(model(x[chosen]), y[chosen])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if CALENDAR.span(number + 1).epoch > epoch:
            schedule.step()
    return losses


def train(child: Any, *, url: str, run: str, name: str, min_peers: int, lease_s: float) -> None:
    """Says every round that it applies, and when: of the clock that all processes here have."""
    model, optimizer, schedule = make(grain=None)
    data = DataLoader(points(), BATCH, shuffle=True)
    joined = mh.join(url, run=run, name=name, min_peers=min_peers, lease_s=lease_s, seed=SEED)
    counted: dict = {}

    def count(closed: mh.RoundClosed) -> None:
        counted["shares"] = {peer.name: r.spans for peer, r in closed.shares.items()}

    with joined as hand:
        model, optimizer, loader, schedule = hand.wrap(
            model, optimizer, data, schedule, epochs=EPOCHS
        )
        hand.on_round(count)
        for _ in range(EPOCHS):
            for x, y in loader:
                at, end_s = hand.round, time.monotonic() + SAMPLE_S * len(x)
                optimizer.zero_grad()
                loss = criterion(model(x), y)
                mean = hand.mean(loss)
                time.sleep(max(0.0, end_s - time.monotonic()))
                loss.backward()
                now_s = time.monotonic()
                optimizer.step()
                if hand.round > at:
                    assert mean.round == at
                    said = {"round": at, "at_s": now_s, "loss": float(mean), **counted}
                    child.say({**said, "state": hand.digest().hex()})
            schedule.step()
    child.say({"ended": hand.round, "at_s": time.monotonic()})


def play(child: Any) -> None:
    """As a process that was forked."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    train(child, **child.orders["train"])
