"""Fetch: the batch of a pass, with the same values wherever and by whomever it is read.

A sample's random numbers (augmentation) depend on the run's seed, the epoch and the sample's
position in it alone. With workers, passes are read ahead by guess: a peer's share of the next round
is most often its share of this one. A wrong guess costs the reading, nothing else.
"""

from __future__ import annotations

import hashlib
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    TensorDataset,
    default_collate,  # pyright: ignore[reportUnknownVariableType]
)

from manyhands.data.quarantine import Bad
from manyhands.data.source import Source

_BLOCK = 1 << 14  # positions whose places are computed at once: 128 cost a third as much
_OF_DATA_SET = "in DataLoader worker process"  # what torch puts before an error of the data set


class Request(NamedTuple):
    """Positions of an epoch, in the order in which the batch has them."""

    epoch: int
    positions: tuple[int, ...]


class Spot(NamedTuple):
    """One sample to read: its place in the source, and where its random numbers begin."""

    place: int
    seed: int


class Marks(NamedTuple):
    """Samples to read: their positions in an epoch, and their numbers in the data set."""

    epoch: int
    positions: tuple[int, ...]
    numbers: list[int]


class Rows(NamedTuple):
    """The samples of a request that are there."""

    batch: Any  # as collate made it of them; None if there is not one
    num: int
    bad: tuple[Bad, ...] = ()  # those that are not, or not themselves


class Reading(Dataset[Any]):
    """What workers read from: samples by spots, each with random numbers of its own."""

    def __init__(self, source: Source) -> None:
        self._dataset, self._number = source.dataset, source.number
        self._fixed = type(source.dataset) is TensorDataset  # which draws nothing

    def __getitems__(self, spots: Sequence[Spot]) -> list[Any]:
        samples: list[Any] = []
        for spot in spots:
            if not self._fixed:
                seed_all(spot.seed)
            samples.append(self._dataset[self._number(spot.place)])
        return samples

    def __getitem__(self, spot: Spot) -> Any:  # noqa: ANN401
        return self.__getitems__([spot])[0]


# The generators are the process's, and so is this. torch takes its generator's mutex with the GIL
# held, and a garbage collection may hand the GIL on before it lets go of it: of two threads that
# ask for the state at once, both then wait for ever, and with them the whole process.
_GENERATORS = threading.Lock()


def seed_all(seed: int) -> None:
    """The generators that data sets use: torch's, Python's, and numpy's if it is loaded."""
    with _GENERATORS:
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def generators_kept() -> Generator[None]:
    """Whatever is drawn inside, the generators are as before afterwards."""
    numpy = sys.modules.get("numpy")
    with _GENERATORS:
        kept = torch.default_generator.get_state(), random.getstate()
    kept_numpy = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        with _GENERATORS:
            torch.default_generator.set_state(kept[0])
        random.setstate(kept[1])
        if numpy is not None:
            numpy.random.set_state(kept_numpy)


class Spots:
    """From positions to spots; remembers the part of an order that it was asked for last."""

    def __init__(self, source: Source, seed: int) -> None:
        self._source, self._seed = source, seed
        self._epoch, self._start = -1, 0  # of what is remembered
        self._places: list[int] = []

    def places(self, request: Request) -> list[int]:
        """The numbers in the data set of the samples at these positions."""
        places = self._of_order(request)
        if self._source.chosen is None:
            return places
        return [self._source.number(place) for place in places]

    def marks(self, request: Request) -> Marks:
        """The same, with their positions."""
        return Marks(request.epoch, request.positions, self.places(request))

    def of(self, request: Request) -> list[Spot]:
        """One for each position."""
        seeds = (seed_of(self._seed, request.epoch, position) for position in request.positions)
        return list(map(Spot, self._of_order(request), seeds))

    def _of_order(self, request: Request) -> list[int]:
        positions = request.positions
        if request.epoch != self._epoch:
            self._epoch, self._places = request.epoch, []
        if positions and self._has(positions[0]) and self._has(positions[-1]):
            first, stop = positions[0], positions[-1] + 1
            if positions == tuple(range(first, stop)):  # as most are: no loop over them
                return self._places[first - self._start : stop - self._start]
        places: list[int] = []
        for position in positions:
            if not self._has(position):
                self._compute(position)
            places.append(self._places[position - self._start])
        return places

    def _has(self, position: int) -> bool:
        return 0 <= position - self._start < len(self._places)

    def _compute(self, position: int) -> None:
        size, self._start = self._source.size, position - position % _BLOCK
        order = self._source.order(self._seed, self._epoch)
        block = order.indices(self._start, min(size, self._start + _BLOCK))
        self._places = cast("list[int]", block.tolist())  # pyright: ignore[reportUnknownMemberType]


def seed_of(seed: int, epoch: int, position: int) -> int:
    """Where the random numbers of a sample begin: that at a position of an epoch of a run."""
    digest = hashlib.blake2b(
        f"{seed}:{epoch}:{position}".encode(), digest_size=8, person=b"manyhands-sample"
    ).digest()
    return int.from_bytes(digest, "little") >> 1  # torch and numpy take no negative ones


class Fetcher:
    """Reads in the user's thread. `close` is for those that have workers."""

    def __init__(self, source: Source, seed: int) -> None:
        self._spots, self._reading = Spots(source, seed), Reading(source)
        self._collate = source.collate
        # Of tensors a batch is taken at once: the same values as sample by sample, in less time.
        dataset = source.dataset
        plain = type(dataset) is TensorDataset and source.collate is default_collate
        self._tensors = dataset.tensors if plain else None

    def fetch(self, request: Request) -> Any:  # noqa: ANN401
        """The batch."""
        if self._tensors is not None:
            # On the CPU, from where an index reaches tensors on any device.
            rows = torch.tensor(self._spots.places(request), dtype=torch.int64, device="cpu")
            return [tensor[rows].contiguous() for tensor in self._tensors]  # as collate has them
        with generators_kept():
            return self._collate(self._reading.__getitems__(self._spots.of(request)))

    def read(self, request: Request) -> Rows:
        """The same, as a `Supply`. All samples are there, or it raises."""
        return Rows(self.fetch(request), len(request.positions))

    def stand_in(self, request: Request) -> Any:  # noqa: ANN401
        """The batch itself."""
        return self.fetch(request)

    def rest(self) -> None:
        """Nothing is read ahead."""

    def close(self) -> None:
        """Nothing is left running."""


class WorkerFetcher:
    """Reads in worker processes. `guess(request)` is what may be asked for after it."""

    def __init__(self, source: Source, seed: int, guess: Callable[[Request], Request]) -> None:
        self._spots, self._guess = Spots(source, seed), guess
        self._wanted: Request | None = None  # not issued yet
        self._last: Request | None = None  # issued last
        self._issued: deque[Request] = deque()
        workers = source.workers
        self._loader = DataLoader(
            Reading(source),
            batch_sampler=_Issue(self._next),
            collate_fn=source.collate,
            num_workers=workers.num,
            prefetch_factor=workers.prefetch,
            pin_memory=workers.pin_memory,
            timeout=workers.timeout_s,
            worker_init_fn=workers.init,
            multiprocessing_context=workers.context,
        )
        self._batches: Iterator[Any] | None = None

    def fetch(self, request: Request) -> Any:  # noqa: ANN401
        """The batch. Raises what the data set raised, if it was for this one; and if a worker died,
        whatever that was reading.
        """
        if request not in self._issued:
            self._wanted = request
        if self._batches is None:
            self._batches = iter(self._loader)
        while True:
            try:
                batch = next(self._batches)
            except StopIteration:
                raise
            except Exception as error:
                # torch raises it from a frame that refers to it: that circle would hold the workers
                # until a garbage collection. What the data set did is in the message.
                error.__traceback__ = None
                if _OF_DATA_SET not in str(error):
                    self.close()  # the loader passes over what a dead worker had: the rest is off
                    raise
                if self._issued.popleft() == request:
                    raise
                continue
            if self._issued.popleft() == request:
                return batch

    def read(self, request: Request) -> Rows:
        """The same, as a `Supply`. All samples are there, or it raises."""
        return Rows(self.fetch(request), len(request.positions))

    def stand_in(self, request: Request) -> Any:  # noqa: ANN401
        """The batch itself."""
        return self.fetch(request)

    def rest(self) -> None:
        """The workers of a DataLoader read ahead without end: they are closed."""
        self.close()

    def _next(self) -> list[Spot]:
        if self._wanted is not None:
            request, self._wanted = self._wanted, None
        else:
            assert self._last is not None
            request = self._guess(self._last)
        self._issued.append(request)
        self._last = request
        return self._spots.of(request)

    def close(self) -> None:
        """End the workers, and wait for that. A later `fetch` starts new ones."""
        self._batches = None  # nothing else refers to it, and its end is theirs
        self._issued.clear()


class _Issue:
    """A batch sampler without an end: what to read next is asked for when a worker is free."""

    def __init__(self, ask: Callable[[], list[Spot]]) -> None:
        self._ask = ask

    def __iter__(self) -> Iterator[list[Spot]]:
        while True:
            yield self._ask()
