"""Peers of one training with `mh.Trainer`, and what must be true of all that they say."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.collectives.rounds_peer import PATIENCE_S, PeerProcess, Zygote
from tests.replica.training import BATCH, SIZE, shadow
from tests.trainer import trainee

PROGRAM = "tests.trainer.trainee"
ROUNDS = -(-SIZE // BATCH)  # of an epoch
TOLERANCE = 1e-9
OWN = ("perf/", "data/")  # what a peer says of itself
_runs = itertools.count()
oracle = cache(trainee.oracle)


class Hands:
    """All peers of one run. Leaving the block ends those that are left."""

    def __init__(self, zygote: Zygote, url: str, *, epochs: int = 3, **train) -> None:
        self._zygote = zygote
        self.epochs = epochs
        self.run = f"trainees-{os.getpid()}-{next(_runs)}"
        self._train = {"url": url, "run": self.run, "epochs": epochs, "grain": None, **train}
        self.all: list[PeerProcess] = []

    def join(self, *points: dict, **train) -> PeerProcess:
        name = f"hand{len(self.all)}"
        orders = self._train | {"name": name} | train
        hand = PeerProcess(self._zygote, name, program=PROGRAM, points=list(points), train=orders)
        self.all.append(hand)
        return hand

    def start(self, number: int, **train) -> list[PeerProcess]:
        return [self.join(min_peers=number, **train) for _ in range(number)]

    def finish(self, *dead: PeerProcess, epochs: int | None = None) -> list[dict]:
        """All but the dead end, with the same history, that of one process. Returns theirs."""
        for hand in self.all:
            with suppress(OSError):  # it has ended
                hand.tell("hurry")
        epochs = epochs or self.epochs
        _, rows, model = oracle(epochs, self._train["grain"])
        ends = []
        for hand in self.all:
            if hand in dead:
                continue
            assert hand.wait(60) == 0, hand.report()
            end = hand.until(lambda said: "history" in said)
            assert end["history"] == (ends or [end])[0]["history"], hand.report()  # to the bit
            wanted = pytest.approx(shadow(model), abs=100 * TOLERANCE)
            assert end["shadow"] == wanted, hand.report()
            assert end["rounds"] == epochs * ROUNDS, hand.report()
            ends.append(end)
        for mine, theirs in zip(ends[0]["history"], rows, strict=True):
            assert {n: mine[n] for n in theirs} == pytest.approx(theirs, abs=TOLERANCE)
        self.check_rows(epochs)
        return ends

    def check_rows(self, epochs: int) -> None:
        """The loggers got every round; one that they got at two peers is the same."""
        losses, rows, _ = oracle(epochs, self._train["grain"])
        logged = {}
        for hand in self.all:
            mine = [said for said in hand.said if "row" in said]
            rounds = [said["row"] for said in mine]
            assert rounds == sorted(set(rounds)), hand.report()  # nobody logs a round twice
            told = [n for n, said in enumerate(hand.said) if "params" in said]
            assert len(told) == bool(mine), hand.report()  # once, before the first row
            assert told <= [n for n, said in enumerate(hand.said) if "row" in said]
            for said in mine:
                values = said["values"]
                assert values.keys() >= {"train/loss", "train/right", "lr", "data/wait_s"}
                same = {n: v for n, v in values.items() if not n.startswith(OWN)}
                before = logged.setdefault(said["row"], same)
                assert same == pytest.approx(before, abs=TOLERANCE)
        assert sorted(logged) == list(range(epochs * ROUNDS))
        for round_, values in logged.items():
            epoch, at = divmod(round_, ROUNDS)
            assert values["epoch"] == epoch
            assert values["train/loss"] == pytest.approx(losses[round_], abs=TOLERANCE)
            assert ("val/loss" in values) == (at == ROUNDS - 1)
            if at == ROUNDS - 1:
                assert values["val/loss"] == pytest.approx(rows[epoch]["val/loss"], abs=TOLERANCE)
                whole = values["train/epoch_loss"]
                assert whole == pytest.approx(rows[epoch]["train/loss"], abs=TOLERANCE)

    def __enter__(self) -> Hands:
        return self

    def __exit__(self, *error) -> None:
        for hand in self.all:
            hand.close()


def evaluated(hands: list[PeerProcess], after: int) -> list[int]:
    """Samples that they have evaluated then."""
    said = [said for hand in hands for said in hand.said if said.get("after") == after]
    return sorted(number for one in said for number in one["evaluated"])


def logs(hand: PeerProcess) -> bool:
    return any("row" in said for said in hand.said)


def rounds_in(file: Path) -> list[int]:
    return [json.loads(line)["step"] for line in file.read_text().splitlines()]


def first_to(hands: list[PeerProcess], what: str) -> PeerProcess:
    """Which of them is the first to come by this point."""

    def find() -> PeerProcess | None:
        return next((h for h in hands if any(said.get("at") == what for said in h.said)), None)

    return until(find)


def until(find: Callable[[], Any]) -> Any:
    """What it finds; it is asked again and again, for what nothing tells of."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := find()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
    return found
