"""Calendar: which samples of which epoch a round covers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from manyhands.core.errors import UsageError


class Span(NamedTuple):
    """Positions [start, stop) of an epoch's order."""

    epoch: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Calendar:
    """Rounds of `batch` samples over epochs of `size`. The last round of an epoch has what is left,
    or with `drop_last` does not take place.
    """

    size: int
    batch: int
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.size < 1 or self.batch < 1:
            raise UsageError(f"batches of {self.batch} out of {self.size} samples")
        if not self.rounds_per_epoch:
            raise UsageError(
                f"drop_last, and {self.size} samples do not fill one batch of {self.batch}",
                hint="take smaller batches, or keep the last one",
            )

    @property
    def rounds_per_epoch(self) -> int:
        """At least one."""
        return self.size // self.batch if self.drop_last else -(-self.size // self.batch)

    @property
    def samples_per_epoch(self) -> int:
        """That its rounds cover."""
        return min(self.size, self.rounds_per_epoch * self.batch)

    def span(self, round: int) -> Span:
        """What this round covers."""
        epoch, turn = divmod(round, self.rounds_per_epoch)
        start = turn * self.batch
        return Span(epoch, start, min(start + self.batch, self.size))

    def num_samples(self, round: int) -> int:
        """How many samples this round covers."""
        span = self.span(round)
        return span.stop - span.start
