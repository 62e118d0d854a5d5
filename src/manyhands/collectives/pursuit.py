"""Pursuit: whether a newcomer gains on a run that goes on while it replays the rounds it missed.

One that does not would never catch up, or hold up everybody once it was taken in. It may be slow at
first, while it loads, compiles and warms up, and anybody is slow at times. So it is judged by laps,
of several rounds and of some time, and gives up after two in a row without any gain.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from manyhands.core.errors import TooSlow

_ROUNDS = 4  # replayed in a lap, at least
_CHANCES = 2


class _Mark(NamedTuple):
    """Where a lap began."""

    at_s: float
    made: int
    replayed: int


class Pursuit:
    """Of one newcomer. A lap takes `lap_s` at least."""

    def __init__(self, lap_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lap_s, self._clock = lap_s, clock
        self._mark: _Mark | None = None  # from the first look at a state on
        self._first = 0  # round of that state
        self._in_vain = 0

    def look(self, *, made: int, replayed: int) -> bool:
        """The run is known to have made so many rounds; this peer is after so many of them.

        Whether it has caught up. Not before it has replayed one: it must have shown its speed.
        Raises TooSlow.
        """
        now_s = self._clock()
        mark = self._mark
        if mark is None:
            self._mark = _Mark(now_s, made, replayed)
            self._first = replayed
        elif replayed - mark.replayed >= _ROUNDS and now_s - mark.at_s >= self._lap_s:
            self._end_lap(mark, made, replayed, gained=replayed - mark.replayed > made - mark.made)
            self._mark = _Mark(now_s, made, replayed)
        return made == replayed > self._first

    def lose(self, *, made: int, replayed: int) -> None:
        """This peer is too far behind, and has to start over. Raises TooSlow."""
        if self._mark is not None:
            self._end_lap(self._mark, made, replayed, gained=False)

    def start_over(self) -> None:
        """From another state."""
        self._mark = None

    def _end_lap(self, mark: _Mark, made: int, replayed: int, *, gained: bool) -> None:
        self._in_vain = 0 if gained else self._in_vain + 1
        if self._in_vain == _CHANCES:
            took_s = max(self._clock() - mark.at_s, 1e-9)
            raise TooSlow(
                (made - mark.made) / took_s,
                (replayed - mark.replayed) / took_s,
                behind=made - replayed,
            )
