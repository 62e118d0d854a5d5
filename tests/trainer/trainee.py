"""A peer that trains with `mh.Trainer`, as a process that a test has forked.

It says the rows that its logger gets, which samples it evaluates, and at the end its history. It
passes by the points "forward" and "evaluate" of a round.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from torch.utils.data import DataLoader, Dataset

import manyhands as mh
from manyhands.core.errors import LinkTimeout
from manyhands.core.peers import PeerState
from manyhands.observe import EventLog, JsonLines
from tests.replica import training
from tests.replica.loops import COMING_S
from tests.replica.training import BATCH, GRAIN, SEED, Points, criterion, make, shadow

HELD_OUT = 23


class HeldOut(Dataset):
    """Others than those that are trained on, each with its number."""

    def __init__(self) -> None:
        self.x, self.y = -Points().x[:HELD_OUT], Points().y[:HELD_OUT]

    def __len__(self) -> int:
        return HELD_OUT

    def __getitem__(self, index):
        return self.x[index], self.y[index], index


def values(model, x, y) -> dict[str, Any]:
    output = model(x)
    return {"loss": criterion(output, y), "right": (output.argmax(1) == y).double().mean()}


class Rows:
    """A logger that tells."""

    def __init__(self, teller) -> None:
        self._teller = teller

    def log_metrics(self, metrics, step) -> None:
        self._teller.pass_by("log", step)
        self._teller.say({"row": step, "values": dict(metrics)})

    def log_hyperparams(self, params) -> None:
        self._teller.say({"params": dict(params)})

    def finalize(self, status) -> None:
        self._teller.say({"rows": status})


def let_come(hand, number) -> None:
    """A newcomer needs rounds that go on, but not that quickly."""
    outlook = hand._session.conductor.rounds.outlook
    with suppress(LinkTimeout):
        outlook.wait_for_view(lambda view: len(view.peers(PeerState.ACTIVE)) >= number, COMING_S)


def train(
    teller: Any,
    *,
    url: str,
    run: str,
    name: str,
    epochs: int,
    grain: int | None = GRAIN,
    min_peers: int = 1,
    lease_s: float = 10.0,
    linger_s: float = 0.0,
    linger_from: int = 0,
    company: int = 1,
    one_peer: bool = False,
    log: str | None = None,
    events: str | None = None,
    tells: bool = False,
    trainer: dict | None = None,
    **options: Any,
) -> None:
    model, optimizer, schedule = make(grain)
    told: set[int] = set()
    loggers: list[Any] = [Rows(teller)]
    loggers += [JsonLines(log)] if log else []
    loggers += [EventLog(events)] if events else []
    with mh.join(url, run=run, name=name, min_peers=min_peers, lease_s=lease_s, seed=SEED) as hand:

        def step(model, batch):
            if not model.training:
                x, y, numbers = batch
                teller.say({"evaluated": numbers.tolist(), "after": hand.round})
                teller.pass_by("evaluate", hand.round)
                return values(model, x, y)
            if tells and hand.round not in told:
                told.add(hand.round)  # a round may take several passes
                teller.say({"told": f"{name} in round {hand.round}"})
                hand.tell("test", f"{name} in round {hand.round}")
            teller.pass_by("forward", hand.round)
            if hand.round >= linger_from:
                teller.linger(linger_s)
            let_come(hand, company)
            return values(model, *batch)

        def evaluate(model):
            data = HeldOut()
            teller.say({"evaluated": list(range(HELD_OUT)), "after": hand.round})
            teller.pass_by("evaluate", hand.round)
            return {n: float(v) for n, v in values(model, data.x, data.y).items()}

        fitting = mh.Trainer(
            model,
            optimizer,
            epochs=epochs,
            step=step,
            evaluate=evaluate if one_peer else None,
            scheduler=schedule,
            clip=1.0,
            loggers=loggers,
            **(trainer or {}),
        )
        test = None if one_peer else DataLoader(HeldOut(), 6)
        data = DataLoader(Points(), BATCH, shuffle=True)
        history = fitting.fit(data, test, run=hand, grain_size=grain, **options)
    teller.say(
        {
            "history": list(history.epochs),
            "rounds": history.rounds,
            "stopped": history.stopped,
            "shadow": shadow(model),
        }
    )


def play(child: Any) -> None:
    training.dial_by_points(child)
    train(child, **child.orders["train"])


def oracle(epochs: int, grain: int | None = GRAIN):
    """Loss of each round; means of each epoch, with its evaluation; and the model: one process."""
    rounds = -(-training.SIZE // BATCH)
    data, rows = HeldOut(), []
    for epoch in range(1, epochs + 1):
        losses, model = training.alone(epoch, grain)
        model.eval()
        found = values(model, data.x, data.y)
        sizes = [BATCH] * (rounds - 1) + [training.SIZE - BATCH * (rounds - 1)]
        of_epoch = zip(losses[-rounds:], sizes, strict=True)
        rows.append(
            {
                "train/loss": sum(loss * size for loss, size in of_epoch) / training.SIZE,
                "val/loss": float(found["loss"].detach()),
                "val/right": float(found["right"]),
            }
        )
    return losses, rows, model
