"""History: what the epochs of a run have come to. Part of its state: who joins late has it too."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from manyhands.core.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """The result of a training; the same at all peers, to the bit."""

    epochs: tuple[Mapping[str, float], ...]
    """For each, the means over its samples ("train/loss"), and its evaluation's ("val/loss")."""
    rounds: int
    stopped: bool
    """Whether it has ended early: what was watched had not improved for too long."""

    def __getitem__(self, name: str) -> list[float]:
        """One value for every epoch that has it."""
        return [epoch[name] for epoch in self.epochs if name in epoch]


@dataclass(frozen=True, kw_only=True, slots=True)
class Watch:
    """When to stop: after `patience` epochs in which `name` has not improved."""

    name: str
    mode: str
    patience: int | None

    def better(self, value: float, best: float | None) -> bool:
        """Whether it is an improvement; what is no number is none."""
        if math.isnan(value):
            return False
        return best is None or (value < best if self.mode == "min" else value > best)


class Diary:
    """A History under way. It changes with rounds and at the end of epochs, everywhere alike.

    A state is taken in every round: epochs that are over are one text, which costs nothing to copy.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.epochs: list[dict[str, float]] = []
        self._text = "[]"  # the same
        self._sums: dict[str, tuple[float, float]] = {}  # of the epoch under way; and weights
        self._best: float | None = None
        self._since = 0  # epochs since it was improved
        self.stopped = False

    def add(self, means: Mapping[str, float], weight: float) -> None:
        """A round of the epoch under way."""
        if weight <= 0:
            return  # its means are none
        for name, mean in means.items():
            total, whole = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = (total + mean * weight, whole + weight)

    def end_epoch(self, evaluated: Mapping[str, float]) -> dict[str, float]:
        """Returns what the epoch has come to."""
        epoch = {f"train/{name}": total / weight for name, (total, weight) in self._sums.items()}
        epoch |= {f"val/{name}": value for name, value in evaluated.items()}
        self._sums = {}
        self.epochs.append(epoch)
        self._text = json.dumps(self.epochs)
        return epoch

    def watched(self) -> float:
        """What it was in the last epoch. Raises UsageError if it was not there."""
        epoch = self.epochs[-1]
        if self._watch.name not in epoch:
            raise UsageError(
                f"nothing is called {self._watch.name!r} in an epoch",
                hint=f"watch one of {', '.join(map(repr, epoch))}",
            )
        return epoch[self._watch.name]

    def judge(self) -> None:
        """Whether the last epoch was an improvement, and if it is time to stop."""
        if self._watch.patience is None:
            return
        value = self.watched()
        if self._watch.better(value, self._best):
            self._best, self._since = value, 0
            return
        self._since += 1
        self.stopped = self._since >= self._watch.patience

    def state_dict(self) -> dict[str, Any]:
        """See `replica.state.Stateful`."""
        return {
            "epochs": self._text,
            "sums": dict(self._sums),
            "best": self._best,
            "since": self._since,
            "stopped": self.stopped,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See `replica.state.Stateful`."""
        if state_dict["epochs"] is not self._text:
            self._text = state_dict["epochs"]
            self.epochs = cast("list[dict[str, float]]", json.loads(self._text))
        self._sums = dict(state_dict["sums"])
        self._best, self._since = state_dict["best"], state_dict["since"]
        self.stopped = state_dict["stopped"]
