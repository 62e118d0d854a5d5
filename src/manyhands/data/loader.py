"""Loader: batches of a table in a run's own order, by threads or processes, from any position on.

    loader = Loader(table, 256, workers=4, device="cuda", bad="skip")
    for x, y in loader:             # one epoch
        ...
    saved = loader.state_dict()     # where the loop is, in a few numbers

The order is a function of seed and epoch, and the state is a position in it: whoever loads it, at
whatever `world`, goes on with the sample after the last one.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self

from torch.utils.data import (
    default_collate,  # pyright: ignore[reportUnknownVariableType]
)

from manyhands.core.errors import UsageError
from manyhands.data.calendar import Calendar
from manyhands.data.fetch import Request
from manyhands.data.quarantine import Quarantine, Rules
from manyhands.data.source import (
    Source,
    Sourced,
    Workers,
    check_batch,
    check_dataset,
    check_whole,
)
from manyhands.data.supply import supply_for
from manyhands.data.table import BadSample

log = logging.getLogger(__name__)

KINDS = ("thread", "process")
_SLOTS = ("LOCAL_WORLD_SIZE", "MANYHANDS_LOCAL_PEERS")  # as torchrun and `manyhands run` say
_CORES = "MANYHANDS_CORES"  # of a rank of a cluster that shares them with no other


class Place(NamedTuple):
    """A batch of all ranks: positions [start, stop) of an epoch."""

    epoch: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Course:
    """Which batches come, and what of them is this rank's."""

    calendar: Calendar
    rank: int
    world: int

    def at(self, epoch: int, consumed: int) -> Place | None:
        """The batch after so many positions of an epoch; None if it has no more."""
        size, batch = self.calendar.size, self.calendar.batch
        stop = consumed + batch
        if consumed >= size or (stop > size and self.calendar.drop_last):
            return None
        return Place(epoch, consumed, min(size, stop))

    def after(self, place: Place) -> Place:
        """The next one, in the next epoch if need be."""
        found = self.at(place.epoch, place.stop) or self.at(place.epoch + 1, 0)
        assert found is not None, "an epoch has a batch"
        return found

    def part(self, place: Place) -> Request:
        """This rank's; it may be empty."""
        size = place.stop - place.start
        first, last = (place.start + size * r // self.world for r in (self.rank, self.rank + 1))
        return Request(place.epoch, tuple(range(first, last)))


class _Guess:
    """What is asked for after what was asked for last: the next place, unless the loop jumps."""

    def __init__(self, course: Course) -> None:
        self._course = course
        self.last = Place(0, 0, 0)

    def __call__(self, _: Request) -> Request:
        self.last = self._course.after(self.last)
        return self._course.part(self.last)


class Loader(Sourced):
    """Each iteration is an epoch: the next one, or after `load_state_dict` what is left of one.

    `batch_size` is that of all ranks together; rank r of `world` gets the r-th part of each batch,
    and all get equally many. Where a rank's part has no sample (the last batch is short, or all are
    bad) it gets a stand-in, and `weight`, the samples of the newest batch that count, is 0.

    Used by one thread. `close` it, or leave its `with` block, to end its workers; they end with it.
    """

    def __init__(
        self,
        table: Any,  # noqa: ANN401
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
        workers: int = 0,
        kind: str = "thread",
        prefetch: int = 2,
        device: Any = None,  # noqa: ANN401
        rank: int = 0,
        world: int = 1,
        bad: str = "raise",
        max_bad: int = 100,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        """`table`: samples by number; any map-style torch Dataset is one.

        `workers` of a `kind` read `prefetch` batches each ahead. `bad` samples end the loop
        ("raise"), are left out ("skip"), or others take their place ("replace"); more than
        `max_bad` of them in an epoch end the loop too. `transform` is applied to every sample.
        """
        workers, prefetch = check_whole("workers", workers), check_whole("prefetch", prefetch)
        rank, world = check_whole("rank", rank), check_whole("world", world)
        seed, max_bad = check_whole("seed", seed), check_whole("max_bad", max_bad)
        _check(workers, kind, prefetch, rank, world)
        rules = Rules(policy=bad, max_bad=max_bad)
        self._source = Source(
            dataset=check_dataset(table),
            batch=check_batch(batch_size),
            collate=collate or default_collate,  # pyright: ignore[reportUnknownArgumentType]
            shuffle=shuffle,
            drop_last=drop_last,
            workers=Workers(num=workers, kind=kind, prefetch=prefetch),
            rules=rules,
            transform=transform,
            device=device,
            seed=seed,
        )
        self._calendar = Calendar(self._source.size, self._source.batch, drop_last)
        self._world = world
        self._quarantine = Quarantine(rules)
        self._epoch = self._consumed = 0
        self._iteration = 0  # counts them: only the newest goes on
        self._begun = False  # an iteration has not come to its end
        self._failed: tuple[Place | None, int] = (None, 0)  # the newest batch that did, how often
        self._course = Course(self._calendar, rank, world)
        self._guess = _Guess(self._course)
        self._expected: Place | None = None  # by the workers, who read ahead
        self._set_seed(seed)
        self.dataset, self.batch_size = table, self._source.batch
        self.wait_s = 0.0
        """Seconds that the loop has waited for batches, so far."""
        self.weight = 0
        """Samples of the newest batch that count."""
        _warn_of_workers(workers, os.environ)

    @property
    def source(self) -> Source:
        """What of it counts in a run (`run.wrap`), which shares samples out by itself."""
        if self._world != 1:
            raise UsageError(
                f"a Loader with world={self._world} shares the samples out, and so does the run",
                hint="leave rank and world out",
            )
        return self._source

    @property
    def epoch(self) -> int:
        """The one that is iterated over, or comes next."""
        return self._epoch

    @property
    def bad(self) -> list[BadSample]:
        """The bad samples that this loop has met, each once."""
        return list(self._quarantine.bad)

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return self._calendar.rounds_per_epoch

    def __iter__(self) -> Iterator[Any]:
        """An epoch, which begins when its first batch is asked for. After an error of reading the
        next iteration goes on with the batch that failed, as `state_dict` says.
        """
        if self._begun:  # and left: as with torch, what comes is another epoch
            self._epoch, self._consumed = self._epoch + 1, 0
        self._begun = True
        self._iteration += 1
        iteration = self._iteration
        while (place := self._course.at(self._epoch, self._consumed)) is not None:
            try:
                batch, weight = self._read(place)
            except BaseException as error:
                self._begun = False  # this was not left: what is left of it comes next
                if isinstance(error, Exception):
                    self._warn_of_circle(place)
                raise
            self._consumed, self.weight = place.stop, weight
            if weight or self._world > 1:
                yield batch
            if iteration != self._iteration:
                raise UsageError(
                    "another iteration over this Loader has begun, or a state was loaded",
                    hint="one iteration at a time; make a second Loader for a second one",
                )
        self._epoch, self._consumed, self._begun = self._epoch + 1, 0, False

    def _warn_of_circle(self, place: Place) -> None:
        """Who takes every error for one that passes comes back to the same batch for ever."""
        failed, times = self._failed
        self._failed = place, times + 1 if place == failed else 1
        if self._failed[1] == 2:
            log.warning(
                "positions %d to %d of epoch %d have failed again: whoever goes on comes back to "
                "them (bad='skip' leaves out those that cannot be read)",
                place.start,
                place.stop - 1,
                place.epoch,
            )

    def _read(self, place: Place) -> tuple[Any, int]:
        """The batch, and how many of it count. Its bad samples are met last, when nothing else can
        fail: what was met is what was consumed.
        """
        began_s = time.perf_counter()
        if place != self._expected:
            self._supply.rest()
            self._guess.last = place
        self._expected = self._course.after(place)
        request = self._course.part(place)
        try:
            rows = self._supply.read(request)
            batch = rows.batch
            if not rows.num and self._world > 1:
                batch = self._supply.stand_in(request)
            self._quarantine.meet(place.epoch, rows.bad)
            return batch, rows.num
        finally:
            self.wait_s += time.perf_counter() - began_s

    def _set_seed(self, seed: int) -> None:
        self._seed = seed
        self._supply = supply_for(self._source, seed, self._guess)

    # -- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where the loop is: with what was yielded behind it, whatever was read ahead. The same at
        all ranks, but for their own count of bad samples in this epoch.
        """
        return {
            "seed": self._seed,
            "epoch": self._epoch,
            "consumed": self._consumed,
            "size": self._calendar.size,
            "shuffle": self._source.shuffle,
            "order": self._source.order_digest,
            "bad": self._quarantine.count_in(self._epoch),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The next iteration goes on from there, in the order of that state's seed.

        Raises UsageError for a state of another table, or that is none.
        """
        names = ("seed", "epoch", "consumed", "size", "bad")
        values = [state_dict.get(name) for name in names]
        if not all(type(value) is int for value in values):
            raise UsageError(
                f"this is no state of a Loader: {dict(zip(names, values, strict=True))}",
                hint="give what state_dict() has returned",
            )
        seed, epoch, consumed, size, bad = (int(value or 0) for value in values)
        shuffle = state_dict.get("shuffle")
        if size != self._calendar.size or shuffle is not self._source.shuffle:
            raise UsageError(
                f"a state of {size} samples, shuffle={shuffle}, came; this Loader has "
                f"{self._calendar.size}, shuffle={self._source.shuffle}",
                hint="resume with the same table and order; another one begins anew",
            )
        if state_dict.get("order") != self._source.order_digest:
            raise UsageError(
                f"a state of the order {state_dict.get('order')} came; that of this Loader's table "
                f"is {self._source.order_digest}",
                hint="resume with the same tables, weights and seed of the Mixture; others begin "
                "anew",
            )
        if not (epoch >= 0 and 0 <= consumed <= size and bad >= 0):
            raise UsageError(f"position {consumed} of epoch {epoch} is none of {size} samples")
        self._epoch, self._consumed, self._begun = epoch, consumed, False
        self._iteration += 1
        self._quarantine.resume(epoch, bad)
        if seed != self._seed:
            self.close()
            self._set_seed(seed)

    # -- lifetime -------------------------------------------------------------------------------

    def close(self) -> None:
        """End the workers, and wait for that. A later iteration starts new ones. Idempotent."""
        self._expected = None
        self._supply.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _check(workers: int, kind: str, prefetch: int, rank: int, world: int) -> None:
    if workers < 0 or prefetch < 1:
        raise UsageError(
            f"workers={workers}, prefetch={prefetch}",
            hint="workers: 0 or more; prefetch: 1 or more",
        )
    if kind not in KINDS:
        raise UsageError(f"kind={kind!r}", hint=f"one of {', '.join(KINDS)}")
    if not 0 <= rank < world:
        raise UsageError(f"rank {rank} of a world of {world}", hint="0 <= rank < world")


def _warn_of_workers(workers: int, environ: Mapping[str, str]) -> None:
    """More of them than cores only take turns, and memory."""
    said = next((environ[name] for name in _SLOTS if environ.get(name, "").isdigit()), "1")
    slots = 1 if environ.get(_CORES, "").isdigit() else max(1, int(said))
    # macOS knows no affinity.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if workers and workers * slots > (cores or 1):
        log.warning(
            "workers=%d in each of %d processes that share %d cores: they take turns, unless they "
            "mostly wait for a disk or a network (workers=%d would fit)",
            workers,
            slots,
            cores or 1,
            (cores or 1) // slots,
        )
