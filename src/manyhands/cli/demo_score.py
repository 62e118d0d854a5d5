"""Score: what the demo's peers say of their run, and whether it is what was promised. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from manyhands.data.calendar import Calendar

ACCURACY = 0.97  # at least
TOLERANCE = 2e-5  # of a loss: rounding makes some 1e-6, a lost sample most often more than 1e-4

Spans = Sequence[Sequence[int]]


@dataclass
class Score:
    """Fed with each report of each peer. Times are of one monotonic clock."""

    calendar: Calendar
    epochs: int
    late: str
    """The peer that joins when another is dead."""
    losses: dict[int, float] = field(default_factory=dict[int, float])
    newest: dict[str, int] = field(default_factory=dict[str, int])
    """Samples of the newest round, by the peer that computed them."""
    computed: Counter[str] = field(default_factory=Counter[str])
    """Samples of all rounds."""
    accuracies: list[float] = field(default_factory=list[float])
    killed: str | None = None
    killed_in: int | None = None
    noticed_s: float | None = None
    """From the kill to the first round that was closed without the dead peer."""
    took_part_from: int | None = None
    """The first round that the late peer gave something to."""
    problems: list[str] = field(default_factory=list[str])
    _killed_s: float = 0.0
    _tellers: dict[int, str] = field(default_factory=dict[int, str])
    """Who told of a round first."""

    @property
    def num_rounds(self) -> int:
        """Of the whole run."""
        return self.epochs * self.calendar.rounds_per_epoch

    @property
    def num_samples(self) -> int:
        """That must be counted: each once an epoch."""
        return sum(map(self.calendar.num_samples, range(self.num_rounds)))

    @property
    def round(self) -> int:
        """Rounds that are done."""
        return len(self.losses)

    def kill(self, name: str, now_s: float) -> None:
        """This peer is dead, in the middle of a round."""
        self.killed, self.killed_in, self._killed_s = name, self.round, now_s

    def take(self, name: str, said: Mapping[str, Any], now_s: float) -> None:
        """This peer has applied a round. All that live must say the same of it.

        One that dies may be the only one to have seen the end of its last round. Then the others
        share it out again, and its mean is rounded otherwise.
        """
        number, loss = int(said["round"]), float(said["loss"])
        if number in self.losses:
            if loss == self.losses[number] or name == self.killed:
                return
            if self._tellers[number] != self.killed:
                self.problems.append(f"peers had different losses in round {number}")
                return
            self.computed.subtract(self.newest)
        self.losses[number], self._tellers[number] = loss, name
        self._count(number, said["shares"])
        if self.killed is not None and self.noticed_s is None and not self.newest.get(self.killed):
            self.noticed_s = now_s - self._killed_s
        if self.took_part_from is None and self.newest.get(self.late):
            self.took_part_from = number

    def _count(self, number: int, shares: Mapping[str, Spans]) -> None:
        self.newest = {name: sum(b - a for a, b in spans) for name, spans in shares.items()}
        self.computed.update(self.newest)
        places = sorted(p for spans in shares.values() for a, b in spans for p in range(a, b))
        if places != list(range(self.calendar.num_samples(number))):
            self.problems.append(f"round {number} did not count each of its samples once")

    def compare(self, alone: Sequence[float]) -> float:
        """The largest difference from the losses of one process; not a number if one is not."""
        differences = [abs(loss - alone[number]) for number, loss in self.losses.items()]
        return math.nan if any(map(math.isnan, differences)) else max(differences)

    def judge(self, off: float) -> None:
        """Add to the problems what became of the whole."""
        if (counted := self.computed.total()) != self.num_samples:
            self.problems.append(f"{counted} samples were counted instead of {self.num_samples}")
        if not off <= TOLERANCE:
            self.problems.append(
                f"the losses are {off:.0e} away from one process's, and {TOLERANCE:g} is allowed"
            )
        if self.took_part_from is None:
            self.problems.append(f"{self.late} joined too late to compute anything")
        if not (worst := min(self.accuracies, default=0.0)) >= ACCURACY:
            self.problems.append(
                f"{100 * worst:.1f} % of the digits were read right instead of {100 * ACCURACY:g} %"
            )
