"""Pursuit: whether a newcomer gains on a run that goes on while it replays the rounds it missed.

One that does not would never catch up, or hold up everybody once it was taken in. It may be slow at
first, while it loads, compiles and warms up, and anybody is slow at times. So it is judged by laps,
of several rounds and of some time, and gives up after two in a row without any gain.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from manyhands.collectives.outcomes import Committed, Outcome
from manyhands.core.errors import TooSlow

_ROUNDS = 4  # replayed in a lap, at least
_CHANCES = 2


class _Mark(NamedTuple):
    """Where a lap began."""

    at_s: float
    made: int
    replayed: int


class Pursuit:
    """Of one newcomer, whose user replays the rounds among `outcomes`.

    A lap takes `lap_s` at least. `give_up` is told why, once. The engine's lock guards it.
    """

    def __init__(
        self,
        outcomes: deque[Outcome],
        lap_s: float,
        give_up: Callable[[TooSlow], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._outcomes, self._lap_s, self._give_up = outcomes, lap_s, give_up
        self._clock = clock
        self._mark: _Mark | None = None  # from the first look at a state on
        self._first = 0  # round of that state
        self._in_vain = 0

    @property
    def num_followed(self) -> int:
        """Rounds that wait for the user."""
        return sum(isinstance(outcome, Committed) for outcome in self._outcomes)

    def look(self, made: int) -> bool:
        """The user comes for more, and the run is known to have made so many rounds.

        Whether it has caught up. Not before it has replayed one: it must have shown its speed.
        """
        now_s, mark = self._clock(), self._mark
        replayed = made - self.num_followed
        if mark is None:
            self._mark, self._first = _Mark(now_s, made, replayed), replayed
        elif replayed - mark.replayed >= _ROUNDS and now_s - mark.at_s >= self._lap_s:
            self._mark = _Mark(now_s, made, replayed)
            self._end_lap(mark, made, gained=replayed - mark.replayed > made - mark.made)
        return made == replayed > self._first

    def lose(self, made: int) -> None:
        """There is no room for more rounds to follow."""
        if self._mark is not None:
            self._end_lap(self._mark, made, gained=False)

    def start_over(self) -> None:
        """From another state: what was followed is of no use."""
        self._mark = None
        self._forget()

    def _end_lap(self, mark: _Mark, made: int, *, gained: bool) -> None:
        self._in_vain = 0 if gained else self._in_vain + 1
        if self._in_vain == _CHANCES:
            took_s = max(self._clock() - mark.at_s, 1e-9)
            behind = self.num_followed
            rates = (made - mark.made) / took_s, (made - behind - mark.replayed) / took_s
            self._forget()  # nobody is to replay them before it hears of this
            self._give_up(TooSlow(*rates, behind=behind))

    def _forget(self) -> None:
        outcomes = list(self._outcomes)
        self._outcomes.clear()
        for outcome in outcomes:
            if isinstance(outcome, Committed):
                outcome.result.close()
            else:
                self._outcomes.append(outcome)
