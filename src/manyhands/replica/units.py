"""Units: what a round is shared out in. One is never divided, whoever computes it."""

from __future__ import annotations

from manyhands.data.calendar import Calendar
from manyhands.data.fetch import Request
from manyhands.data.supply import SPARE
from manyhands.replica.conductor import Turn


class Units:
    """A round's samples in units: grains, or else as few as the model takes at a time.

    `least`: samples that it needs of a batch that is to have more. Where fewer would be left for a
    last unit, the one before has them, too: a round that has enough has no unit of too few.
    """

    def __init__(self, calendar: Calendar, grain: int | None = None, least: int = 1) -> None:
        self._calendar, self._size, self._least = calendar, grain or least, least

    def num(self, round: int) -> int:
        """How many a round has."""
        return self._num(self._calendar.num_samples(round))

    def most(self, num_samples: int | None) -> int:
        """Units of a pass of so many samples at most, or of a whole round; one at least."""
        ends = (0, self._calendar.rounds_per_epoch - 1)  # all others are like the first
        if num_samples is None:
            return max(map(self.num, ends))
        sizes = map(self._calendar.num_samples, ends)
        longer = max(0, *(size - self._num(size) * self._size for size in sizes))
        return max(1, (num_samples - longer) // self._size)

    def request(self, turn: Turn) -> Request:
        """The samples of a turn. One that counts nothing still has some: its body runs too."""
        if turn.evaluates:  # the same every time
            return Request(0, tuple(p for span in turn.ranges.spans for p in range(*span)))
        span = self._calendar.span(turn.round)
        if not turn.ranges:
            stop = min(span.stop, span.start + SPARE)
            return Request(span.epoch, tuple(range(span.start, stop)))
        positions = (span.start + at for low, high in self._spans(turn) for at in range(low, high))
        return Request(span.epoch, tuple(positions))

    def num_samples(self, turn: Turn) -> int:
        """Of a turn."""
        if turn.evaluates:
            return len(turn.ranges)
        return sum(high - low for low, high in self._spans(turn))

    def _spans(self, turn: Turn) -> list[tuple[int, int]]:
        """Of samples of the turn's round."""
        size = self._calendar.num_samples(turn.round)
        num = self._num(size)
        return [
            (start * self._size, size if stop >= num else stop * self._size)
            for start, stop in turn.ranges.spans
        ]

    def _num(self, size: int) -> int:
        full, rest = divmod(size, self._size)
        return max(1, full + (rest >= self._least))
