"""Feed: the rows that one device computes in each step, read ahead by a thread of its own.

Step s covers positions [s*B, (s+1)*B) of an order that runs on from epoch to epoch, B being the
rows of all devices; each device has its part of them. So the rows of a step do not depend on how
many devices there are, and every sample of an epoch counts once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from manyhands.core.errors import ManyhandsError
from manyhands.data.calendar import Calendar
from manyhands.data.loader import Loader
from manyhands.data.source import Source

Bad = Literal["raise", "skip", "replace"]


class Batch(NamedTuple):
    """One device's rows of a step; none that counts if `rows` is 0."""

    x: Any
    y: Any
    rows: int


class Feed:
    """`take` gives the batches of steps from `first` on, without end. Used by one thread."""

    def __init__(
        self, source: Source, *, seed: int, bad: Bad, rank: int, world: int, first: int, ahead: int
    ) -> None:
        self._calendar = Calendar(source.size, source.batch, source.drop_last)
        self._loader = Loader(
            source.dataset,
            source.batch,
            seed=seed,
            drop_last=source.drop_last,
            workers=1,
            prefetch=ahead,
            rank=rank,
            world=world,
            bad=bad,
        )
        span = self._calendar.span(first)
        state = self._loader.state_dict()
        self._loader.load_state_dict({**state, "epoch": span.epoch, "consumed": span.start})
        self._batches = self._all(first)

    def take(self) -> Batch:
        """The next step's. Raises what reading it raised."""
        return next(self._batches)

    @property
    def wait_s(self) -> float:
        """How long `take` has waited."""
        return self._loader.wait_s

    @property
    def num_bad(self) -> int:
        """How many bad samples this device has met."""
        return len(self._loader.bad)

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._loader.close()

    def _all(self, step: int) -> Iterator[Batch]:
        while True:
            first = step
            for x, y in self._loader:
                yield from self._passed_over(step, self._newest())
                step = self._newest() + 1
                yield Batch(x, y, self._loader.weight)
            end = self._newest() + 1  # of the epoch: the loader is at the next one
            if first == step and first == end - self._calendar.rounds_per_epoch:
                raise ManyhandsError(
                    f"no sample of epoch {self._calendar.span(first).epoch} can be read",
                    hint="look at the files that the warnings before name",
                )
            yield from self._passed_over(step, end)
            step = end

    def _passed_over(self, start: int, stop: int) -> Iterator[Batch]:
        """Of nothing but bad samples: where nobody shares them, the loader has no batch there."""
        for _ in range(start, stop):
            yield Batch(None, None, 0)

    def _newest(self) -> int:
        """The step of the batch that the loader has yielded last."""
        state = self._loader.state_dict()
        batches = -(-state["consumed"] // self._calendar.batch)
        return state["epoch"] * self._calendar.rounds_per_epoch + batches - 1


def share_of(num_rows: int, rank: int, world: int) -> range:
    """Which of some rows are this device's."""
    return range(num_rows * rank // world, num_rows * (rank + 1) // world)
