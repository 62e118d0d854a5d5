"""Two mixed sources with corrupt files among them, and processes that train on them or just read.

Run by `tests.collectives.rounds_peer`, which forks a process for each; see `play`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import manyhands as mh
from manyhands.data.calendar import Calendar
from manyhands.data.images import ImageTree
from manyhands.data.loader import Loader
from manyhands.data.mixture import Mixture

SEED, BATCH, EPOCHS, SIDE = 7, 10, 8, 8
PNG, JPEG = 40, 23  # images, of which three are corrupt
SIZE = PNG + JPEG
CALENDAR = Calendar(SIZE, BATCH)
ROUNDS = EPOCHS * CALENDAR.rounds_per_epoch


class Numbered:
    """A tree whose samples also have a number, which no other tree has: (image, label, id)."""

    def __init__(self, tree: ImageTree, first: int) -> None:
        self._tree, self._first = tree, first

    def __len__(self) -> int:
        return len(self._tree)

    def __getitem__(self, index: int):
        image, label = self._tree[index]
        return image[0].double().flatten() / 255, label, self._first + index

    def where(self, index: int) -> str:
        return self._tree.where(index)


def mixture(folder: str | Path) -> Mixture:
    trees = [ImageTree(Path(folder) / name) for name in ("png", "jpeg")]
    assert [len(tree) for tree in trees] == [PNG, JPEG]
    return Mixture([Numbered(trees[0], 0), Numbered(trees[1], PNG)], seed=SEED)


class Net(nn.Module):
    """A classifier with a ledger: a number for every sample, whose gradient says how often that
    was counted. It comes by the same way as all gradients, so nothing else can be true of them.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(SIDE * SIDE, 32), nn.Tanh(), nn.Linear(32, 10))
        self.ledger = nn.Parameter(torch.zeros(SIZE))
        self.double()

    def forward(self, batch: Any) -> torch.Tensor:
        """The loss: a mean over the batch."""
        x, y, ids = batch
        return nn.functional.cross_entropy(self.layers(x), y) + self.ledger[ids].mean()

    def counted(self, weight: float) -> list[int]:
        """From a mean gradient: the samples, each as often as it counted."""
        counts = self.ledger.grad * weight
        assert torch.allclose(counts, counts.round(), atol=1e-6), counts
        return torch.arange(SIZE).repeat_interleave(counts.round().long()).tolist()


def make() -> tuple[Net, torch.optim.Optimizer]:
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def alone(batches: list[Any]) -> Net:
    """A plain loop over these."""
    model, optimizer = make()
    for batch in batches:
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
    return model


def train(child: Any, *, folder: str, workers: int = 0, resume: bool = False, **place: Any) -> None:
    """A peer of an elastic run: it says what each round that it saw closed has counted."""
    model, optimizer = make()
    data = Loader(mixture(folder), BATCH, bad="skip", workers=workers)
    joined = mh.join(
        place["url"],
        run=place["run"],
        name=place["name"],
        min_peers=place["min_peers"],
        lease_s=place["lease_s"],
        seed=SEED,
    )
    with joined as hand:
        model, optimizer, loader, _ = hand.wrap(
            model,
            optimizer,
            data,
            None,
            epochs=EPOCHS,
            checkpoints=place["checkpoints"],
            save_every=1,
            resume=resume,
        )
        child.say({"joined": hand.round})
        hand.on_round(
            lambda closed: child.say(
                {
                    "counted": closed.round,
                    "ids": model.counted(closed.weight),
                    "members": len(closed.shares),
                }
            )
        )
        for _ in range(EPOCHS):
            for batch in loader:
                at = hand.round
                child.pass_by("forward", at)
                optimizer.zero_grad()
                loss = model(batch)
                child.pass_by("backward", at)
                loss.backward()
                child.pass_by("step", at)
                optimizer.step()
    met = sorted(error.where for error in loader.bad)
    parameters = [p.detach().flatten().tolist() for p in model.parameters()]
    child.say({"done": hand.round, "bad": met, "parameters": parameters})


def read(
    child: Any, *, folder: str, rank: int, world: int, state: dict | None, workers: int, kind: str
) -> None:
    """A rank of a job: it says what is in its part of each batch, and the state after it."""
    data = mixture(folder)
    with Loader(
        data, BATCH, seed=SEED, rank=rank, world=world, bad="skip", workers=workers, kind=kind
    ) as loader:
        if state is not None:
            loader.load_state_dict(state)
        while loader.epoch < EPOCHS:
            for _, _, ids in loader:
                own = ids.tolist() if loader.weight else []
                met = sorted(error.where for error in loader.bad)
                child.say({"ids": own, "state": loader.state_dict(), "bad": met})
        child.say({"done": True, "bad": sorted(error.where for error in loader.bad)})
        child.pass_by("end", 0)


def play(child: Any) -> None:
    """As a process that a test has forked."""
    from tests.replica.training import dial_by_points

    if "read" in child.orders:
        read(child, **child.orders["read"])
        return
    dial_by_points(child)
    train(child, **child.orders["train"])
