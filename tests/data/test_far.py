"""A hundred million samples: to go on from anywhere costs what it costs to begin."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from manyhands.data.calendar import Calendar
from manyhands.data.fetch import Fetcher, Request
from manyhands.data.loader import Loader
from manyhands.data.mixture import Mixture
from manyhands.data.order import Order
from manyhands.data.source import Source

SIZE = 10**8
BATCH = 512
CALENDAR = Calendar(SIZE, BATCH)
ROUNDS = (0, 1, 1000, CALENDAR.rounds_per_epoch // 2, CALENDAR.rounds_per_epoch - 2)
LATER = tuple(7 * CALENDAR.rounds_per_epoch + r for r in ROUNDS)


class Numbers:
    """So many samples, each its own number; counts how many were read."""

    def __init__(self, size: int = SIZE) -> None:
        self.size, self.read = size, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        self.read += 1
        return index


@pytest.fixture
def permuted(monkeypatch):
    """How many numbers have been sent through the network of an order."""
    count = [0]
    permute = Order._permute

    def counting(self, values):
        count[0] += values.numel() if isinstance(values, torch.Tensor) else 1
        return permute(self, values)

    monkeypatch.setattr(Order, "_permute", counting)
    return count


class Grown(NamedTuple):
    """By how many bytes."""

    python: int  # the most that Python had allocated
    process: int  # the most memory that the process had: of torch's tensors Python knows nothing


@contextmanager
def memory() -> Iterator[list[Grown]]:
    """The most that there was more than at the beginning."""
    grown: list[Grown] = []
    Path("/proc/self/clear_refs").write_text("5")  # a new high-water mark
    before = resident("VmRSS")
    tracemalloc.start()
    try:
        yield grown
        python = tracemalloc.get_traced_memory()[1]
        grown.append(Grown(python, resident("VmHWM") - before))
    finally:
        tracemalloc.stop()


def resident(name: str) -> int:
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if name in x]
    return int(line.split()[1]) << 10


def resumed(table, round_: int, seed: int = 5) -> list[int]:
    """The batch of a round, as a process reads it that knows only which round it is."""
    span = CALENDAR.span(round_)
    fetcher = Fetcher(Source(dataset=table, batch=BATCH, collate=list), seed)
    return fetcher.fetch(Request(span.epoch, tuple(range(span.start, span.stop))))


@pytest.mark.parametrize("mixed", [False, True])
def test_any_round_takes_the_same_steps(permuted, mixed):
    works, reads = [], []
    for round_ in ROUNDS + LATER:
        tables = [Numbers(SIZE // 2), Numbers(SIZE // 2)]
        table = Mixture(tables) if mixed else Numbers()
        permuted[0] = 0
        with memory() as grown:
            assert len(resumed(table, round_)) == BATCH
        works.append(permuted[0])
        reads.append(sum(t.read for t in tables) if mixed else table.read)
        # An order of all of them would be 400 MB or more.
        assert grown[0].python < 4 << 20
        assert grown[0].process < 64 << 20
    assert set(reads) == {BATCH}
    # A number is sent through again until it is in range: 1.3 times in the mean, wherever it is.
    # An order is computed in blocks, of which the last of an epoch is a shorter one.
    block = BATCH if mixed else 1 << 14
    assert BATCH <= min(works) <= max(works) < 3 * block, works


def test_rounds_from_anywhere_are_those_of_the_whole():
    """Far rounds one after another, and each for itself."""
    first = CALENDAR.rounds_per_epoch - 3
    order = [Order(SIZE, seed=5, epoch=epoch) for epoch in (0, 1)]
    for round_ in range(first, first + 6):
        epoch, start, stop = CALENDAR.span(round_)
        assert resumed(Numbers(), round_) == order[epoch].indices(start, stop).tolist()


def test_nothing_comes_twice_over_a_long_stretch():
    order = Order(SIZE, seed=1, epoch=3)
    places = torch.cat([order.indices(start, start + 200_000) for start in (0, SIZE - 200_000)])
    assert len(places.unique()) == 400_000


def test_what_a_run_must_remember_is_small():
    """All of it: with it, any process at any number of peers goes on."""
    mixture = Mixture([Numbers(SIZE // 2), Numbers(SIZE // 2)], [1, 3], seed=2**63 - 1)
    loader = Loader(mixture, BATCH, seed=2**63 - 1, collate=list)
    far = loader.state_dict() | {"epoch": 10**6, "consumed": SIZE - 2 * BATCH}
    loader.load_state_dict(far)
    batches = iter(loader)
    next(batches)
    state = json.dumps(loader.state_dict())
    assert len(state) < 1000
    resumed = Loader(mixture, BATCH // 2, collate=list)
    resumed.load_state_dict(json.loads(state))
    first = 10**6 * SIZE + SIZE - BATCH
    expected = [mixture[position] for position in range(first, first + BATCH)]
    assert [sample for batch in resumed for sample in batch] == expected
