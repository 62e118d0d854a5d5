"""A loop that ends when the peers agree on it, as a process that a test has forked.

Each peer has a wish of its own: the round after which it wants to stop. They go by `run.agree`.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

import manyhands as mh
from manyhands.replica import session
from tests.collectives.rounds_peer import Trip
from tests.replica.training import BATCH, SEED, Points, criterion, make


def play(child: Any) -> None:
    dial = session.dial
    session.dial = lambda *where: Trip(dial(*where), child.orders["points"], child.reached)
    train = child.orders["train"]
    wish, epochs = train["wish"], train["epochs"]
    model, optimizer, _ = make(None)
    place = {name: train[name] for name in ("url", "run", "name", "min_peers", "lease_s")}
    with mh.join(**place, seed=SEED) as run:
        data = DataLoader(Points(), BATCH, shuffle=True)
        _, _, loader, _ = run.wrap(model, optimizer, data, epochs=epochs)
        linger_s = train.get("linger_s", 0.0)
        agreed = wanted(run, child, loader, model, optimizer, wish, epochs, linger_s)
        child.say({"stopped": run.round, "at": agreed.round, "value": float(agreed)})


def wanted(run, child, loader, model, optimizer, wish, epochs, linger_s):
    for _ in range(epochs):
        for x, y in loader:
            at = run.round
            child.pass_by("forward", at)
            child.linger(linger_s)
            agreed = run.agree(wish, "stop after")
            criterion(model(x), y).backward()
            child.pass_by("backward", at)
            optimizer.step()
            optimizer.zero_grad()
            if run.round > at:
                child.say({"round": at, "agreed": float(agreed), "of": agreed.round})
            if run.round > float(agreed):
                return agreed
    return agreed
