"""Pass: how the tensors of one run over samples become final, and what is sent before all are."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor

from manyhands.collectives.outcomes import Task
from manyhands.collectives.ranges import Ranges
from manyhands.core.errors import UsageError

if TYPE_CHECKING:
    from manyhands.collectives.rounds import Rounds


MAX_WEIGHT = 1e200  # those of all members together must still be a number


def check_weight(weight: float) -> float:
    """A float, as it arrives elsewhere: heads are hashed. Raises UsageError."""
    if not (math.isfinite(weight) and 0 <= weight <= MAX_WEIGHT):
        raise UsageError(
            f"a weight of {weight} is none", hint=f"from 0 to {MAX_WEIGHT:g}, say the samples"
        )
    return float(weight)


class Pass:
    """One pass over a task whose tensors become final one after the other, the last ones first.

    One that is never `done` did not happen: another may be opened in its place, as long as nothing
    of it was `ready`.
    """

    def __init__(
        self, rounds: Rounds, task: Task, ranges: Ranges, flats: list[Tensor], weight: float
    ) -> None:
        self._rounds, self.task, self.ranges = rounds, task, ranges
        self.flats, self.weight = flats, weight

    def ready(self, tensor: int) -> None:
        """This tensor and all after it are final: what they fill is sent while others are not."""
        self._rounds.send_ready(self, tensor)

    def done(self) -> None:
        """All are."""
        self._rounds.finish_pass(self)
