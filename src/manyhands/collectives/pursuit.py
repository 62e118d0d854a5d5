"""Pursuit: whether a newcomer gains on a run that goes on while it replays the rounds it missed.

One that does not would never catch up, or hold up everybody once it was taken in. It may be slow at
first, while it loads, compiles and warms up, and anybody is slow at times. So it is judged by laps,
of several rounds and of some time, and gives up after two in a row without any gain. If its link is
the slow one, it may never have a state to begin with: from one start to the next is a lap too.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from manyhands.collectives.outcomes import Committed, Outcome, Stopped
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
        self._first = 0  # round of that state; one more for each re-sync that was replayed
        self._start: _Mark | None = None  # of a lap without a state, if it has not gained since
        self._last = 0  # up to which round it had replayed at the last look
        self._replayed = 0  # in all, from whatever states
        self._in_vain = 0
        self.heard = 0
        """So many rounds the run has made, or is about to: a result of the last one was here."""

    @property
    def num_followed(self) -> int:
        """Rounds that wait for the user."""
        return sum(isinstance(outcome, Committed) for outcome in self._outcomes)

    def look(self, made: int) -> bool:
        """The user comes for more, and the run is known to have made so many rounds.

        Whether it has caught up. Not before it has replayed one that is no re-sync: it must have
        shown its speed.
        """
        now_s, mark = self._clock(), self._mark
        self.heard = max(self.heard, made)
        replayed = made - self.num_followed
        if mark is None:
            self._mark, self._first = _Mark(now_s, made, replayed), replayed
        else:
            self._replayed += replayed - self._last
            if replayed - mark.replayed >= _ROUNDS and now_s - mark.at_s >= self._lap_s:
                self._mark = lap = _Mark(now_s, made, replayed)
                self._end_lap(mark, lap, gained=replayed - mark.replayed > made - mark.made)
        self._last = replayed
        return made == replayed > self._first

    def take(self) -> Outcome:
        """What the user gets next; the last word stays.

        A re-sync shows no speed: it has no body.
        """
        outcome = self._outcomes[0]
        if not isinstance(outcome, Stopped):
            self._outcomes.popleft()
        if isinstance(outcome, Committed) and outcome.sums[0].exact:
            self._first += 1
        return outcome

    def lose(self, made: int) -> None:
        """There is no room for more rounds to follow."""
        if self._mark is not None:
            lap = _Mark(self._clock(), made, made - self.num_followed)
            self._end_lap(self._mark, lap, gained=False)

    def start_over(self) -> None:
        """From another state: what was followed is of no use."""
        self._mark = None
        self._forget()
        start, lap = self._start, _Mark(self._clock(), self.heard, self._replayed)
        if start is None:
            self._start = lap
        elif lap.at_s - start.at_s >= self._lap_s:
            gained = lap.replayed - start.replayed >= lap.made - start.made
            self._end_lap(start, lap, gained=gained)

    def _end_lap(self, since: _Mark, now: _Mark, *, gained: bool) -> None:
        if gained:
            self._in_vain, self._start = 0, None
            return
        self._in_vain += 1
        self._start = _Mark(now.at_s, self.heard, self._replayed)  # no time counts twice
        if self._in_vain == _CHANCES:
            took_s = max(now.at_s - since.at_s, 1e-9)
            made, replayed = now.made - since.made, now.replayed - since.replayed
            behind = self.num_followed or made - replayed
            self._forget()  # nobody is to replay them before it hears of this
            self._give_up(TooSlow(made / took_s, replayed / took_s, behind=behind))

    def _forget(self) -> None:
        outcomes = list(self._outcomes)
        self._outcomes.clear()
        for outcome in outcomes:
            if isinstance(outcome, Committed):
                outcome.result.close()
            else:
                self._outcomes.append(outcome)
