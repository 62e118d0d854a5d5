"""Rest: how long a host begins nothing, after it could not begin something."""

from __future__ import annotations

from collections.abc import Callable

FIRST_S, LAST_S = 1.0, 60.0


class Rest:
    """A disk that is full, or a process that is not to be had, fails every attempt within
    milliseconds: a host that is free again at once would be given the whole queue. So it rests, for
    twice as long each time, until something has run.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._next_s = FIRST_S
        self._until_s = 0.0

    @property
    def until_s(self) -> float | None:
        """None if it does not rest."""
        return self._until_s if self._now_s() < self._until_s else None

    def begin(self) -> None:
        """Something could not be begun."""
        self._until_s = self._now_s() + self._next_s
        self._next_s = min(2 * self._next_s, LAST_S)

    def forget(self) -> None:
        """Something has run: what was, was."""
        self._next_s = FIRST_S
