"""Feed: the rows that one device computes in each step, read ahead by a thread of its own.

Step s covers positions [s*B, (s+1)*B) of an order that runs on from epoch to epoch, B being the
rows of all devices; each device has its share of them. So the rows of a step do not depend on how
many devices there are, and every sample of an epoch counts once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from manyhands.data.calendar import Calendar
from manyhands.data.fetch import Request, Spots
from manyhands.data.source import Source


class Batch(NamedTuple):
    """One device's rows of a step; none at all if `rows` is 0."""

    x: Any
    y: Any
    rows: int


def share_of(num_rows: int, rank: int, world: int) -> range:
    """Which of some rows are this device's; the first ones have one more at most."""
    each, more = divmod(num_rows, world)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))


def block_of(num_rows: int, rank: int, size: int) -> range:
    """Which rows of a step are this device's: `size`, or of the last ones of an epoch fewer.

    From the front, not evenly: BatchNorm takes no single row.
    """
    return range(min(rank * size, num_rows), min((rank + 1) * size, num_rows))


class Feed:
    """`take` gives the batches of steps from `first` on. One thread takes, another one reads."""

    def __init__(
        self,
        source: Source,
        *,
        seed: int,
        rank: int,
        world: int,
        first: int,
        stop: int,
        ahead: int,
    ) -> None:
        self._source, self._spots = source, Spots(source, seed)
        self._calendar = Calendar(source.size, source.batch, source.drop_last)
        self._rank, self._world = rank, world
        self._steps, self._ahead = range(first, stop), ahead
        self._changed = threading.Condition()
        self._ready: deque[Batch | Exception] = deque()
        self._closed = False
        self.wait_s = 0.0
        """How long `take` has waited."""
        self._thread = threading.Thread(target=self._read, name=f"feed {rank}", daemon=True)
        self._thread.start()

    def take(self) -> Batch:
        """The next step's. Raises what reading it raised."""
        start = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._ready)
            self.wait_s += time.monotonic() - start
            taken = self._ready.popleft()
            self._changed.notify_all()
        if isinstance(taken, Exception):
            raise taken
        return taken

    def close(self) -> None:
        """Ends the thread, after what it reads now. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _read(self) -> None:
        for step in self._steps:
            with self._changed:
                self._changed.wait_for(lambda: len(self._ready) < self._ahead or self._closed)
                if self._closed:
                    return
            try:
                made: Batch | Exception = self._batch(step)
            except Exception as error:  # noqa: BLE001  (it is raised by `take`)
                made = error
            with self._changed:
                self._ready.append(made)
                self._changed.notify_all()
            if isinstance(made, Exception):
                return

    def _batch(self, step: int) -> Batch:
        span = self._calendar.span(step)
        size = self._source.batch // self._world
        mine = block_of(span.stop - span.start, self._rank, size)
        if not mine:
            return Batch(None, None, 0)
        positions = tuple(span.start + row for row in mine)
        places = self._spots.places(Request(span.epoch, positions))
        return read_batch(self._source.dataset, places, self._source.collate)


def read_batch(dataset: Any, places: list[int], collate: Callable[[list[Any]], Any]) -> Batch:  # noqa: ANN401
    """These samples of a data set of (x, y)."""
    x, y = collate([dataset[place] for place in places])
    return Batch(x, y, len(places))
