"""Batches by position: the same values in any process, at any grouping, after any guess."""

import gc
import multiprocessing
import os
import random
import signal

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from manyhands.data.fetch import Fetcher, Request, WorkerFetcher
from manyhands.data.source import Source

SIZE = 40


class Noisy(Dataset):
    """A number, and what every generator gives for it."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return index, torch.rand(()).item(), random.random()


class Poisoned(Noisy):
    def __getitem__(self, index):
        if index == 7:
            raise ValueError("sample 7 cannot be read")
        return super().__getitem__(index)


class Deadly(Noisy):
    def __getitem__(self, index):
        if index == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def source_of(dataset, workers=0):
    return Source.of(
        DataLoader(dataset, 8, shuffle=True, collate_fn=list, num_workers=workers), None
    )


def follow(request):
    """The same place in the next round of eight."""
    positions = tuple(position + 8 for position in request.positions)
    if positions[-1] < SIZE:
        return Request(request.epoch, positions)
    return Request(request.epoch + 1, tuple(p % 8 for p in request.positions))


@pytest.fixture
def fetchers():
    plain = Fetcher(source_of(Noisy()), seed=5)
    working = WorkerFetcher(source_of(Noisy(), workers=2), 5, follow)
    yield plain, working
    plain.close()
    working.close()


def test_every_sample_of_an_epoch_once():
    fetcher = Fetcher(source_of(Noisy()), seed=5)
    rounds = [fetcher.fetch(Request(0, tuple(range(s, s + 8)))) for s in range(0, SIZE, 8)]
    assert sorted(sample[0] for batch in rounds for sample in batch) == list(range(SIZE))


def test_values_depend_on_the_position_alone():
    """Not on the batch, the process, or what was drawn before."""
    fetcher = Fetcher(source_of(Noisy()), seed=5)
    whole = fetcher.fetch(Request(3, tuple(range(8))))
    torch.rand(100)
    pieces = fetcher.fetch(Request(3, (4, 5))) + fetcher.fetch(Request(3, (0,)))
    assert pieces == [whole[4], whole[5], whole[0]]
    assert Fetcher(source_of(Noisy()), seed=5).fetch(Request(3, (6,))) == [whole[6]]
    assert Fetcher(source_of(Noisy()), seed=6).fetch(Request(3, tuple(range(8)))) != whole


def test_the_users_generators_are_left_alone():
    fetcher = Fetcher(source_of(Noisy()), seed=5)
    torch.manual_seed(1)
    random.seed(1)
    before = torch.rand(3), random.random()
    torch.manual_seed(1)
    random.seed(1)
    fetcher.fetch(Request(0, (1, 2, 3)))
    after = torch.rand(3), random.random()
    assert torch.equal(before[0], after[0])
    assert before[1] == after[1]


def test_workers_read_the_same(fetchers):
    """Guesses that are right, wrong, right again, of other sizes, and of positions again."""
    plain, working = fetchers
    requests = [Request(0, tuple(range(8 * n, 8 * n + 4))) for n in range(5)]
    requests += [Request(1, (0, 1, 2)), Request(1, (11, 8, 30)), Request(1, (11, 8, 30))]
    requests += [follow(Request(1, (3,))), *(Request(2, tuple(range(8))) for _ in range(3))]
    for request in requests:
        assert working.fetch(request) == plain.fetch(request), request


def test_only_what_was_asked_for_fails():
    """A guess that cannot be read is nobody's business until it is asked for."""
    source = source_of(Poisoned(), workers=2)
    places = Fetcher(source_of(Noisy()), seed=5).fetch(Request(0, tuple(range(SIZE))))
    bad = next(p for p, sample in enumerate(places) if sample[0] == 7)
    good = [p for p in range(SIZE) if p != bad]
    working = WorkerFetcher(source, 5, lambda request: Request(0, (bad,)))
    gc.disable()  # the end of the workers must not wait for it
    try:
        for position in good[:4]:
            assert working.fetch(Request(0, (position,)))[0][0] == places[position][0]
        with pytest.raises(ValueError, match="sample 7 cannot be read"):
            working.fetch(Request(0, (bad,)))
        assert working.fetch(Request(0, (good[5],)))[0][0] == places[good[5]][0]
        assert multiprocessing.active_children()
        working.close()
        assert not multiprocessing.active_children()
        assert working.fetch(Request(0, (good[6],)))[0][0] == places[good[6]][0]
    finally:
        working.close()
        assert not multiprocessing.active_children()
        gc.enable()


@pytest.mark.parametrize(
    "positions", [(3,), (5, 1, 30), (5, 6, 7), (7, 6, 5)], ids=["one", "several", "on", "back"]
)
@pytest.mark.parametrize(
    "chosen",
    [None, list(range(SIZE, 0, -1)), list(range(-1, -SIZE - 1, -1))],
    ids=["all", "chosen", "from the end"],
)
def test_tensors_come_as_if_collated_sample_by_sample(positions, chosen):
    images = torch.rand(SIZE + 1, 4, 5, 3).permute(0, 3, 1, 2)  # not in the order of its memory
    tensors = TensorDataset(
        images,
        torch.arange(SIZE + 1),
        torch.rand(SIZE + 1, 2) > 0.5,
        torch.arange(SIZE + 1).to(torch.uint16),
    )
    data = DataLoader(tensors, 8, sampler=chosen)
    source, request = Source.of(data), Request(0, positions)
    reading = Fetcher(source, seed=5)
    expected = [tensors[source.number(position)] for position in positions]
    reading.fetch(Request(0, (0,)))  # the order is known from here on
    batch = reading.fetch(request)
    for got, wanted in zip(batch, data.collate_fn(expected), strict=True):
        assert torch.equal(got, wanted)
        assert (got.dtype, got.stride()) == (wanted.dtype, wanted.stride())


def test_tensors_are_read_wherever_a_user_makes_new_ones():
    tensors = TensorDataset(torch.arange(SIZE), torch.rand(SIZE, 3))
    fetcher = Fetcher(Source.of(DataLoader(tensors, 8)), seed=5)
    fetcher.fetch(Request(0, (0,)))  # the order is known from here on
    with torch.device("meta"):
        numbers, points = fetcher.fetch(Request(0, (1, 2, 3)))
    assert numbers.tolist() == [1, 2, 3]
    assert torch.equal(points, tensors.tensors[1][1:4])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_tensors_on_a_gpu_stay_there():
    tensors = TensorDataset(torch.arange(SIZE).cuda(), torch.rand(SIZE, 3).cuda())
    chosen = list(range(-1, -SIZE - 1, -1))
    fetcher = Fetcher(Source.of(DataLoader(tensors, 8, sampler=chosen)), seed=5)
    numbers, points = fetcher.fetch(Request(0, (1, 2, 3)))
    assert (numbers.is_cuda, points.is_cuda) == (True, True)
    assert numbers.tolist() == [SIZE - 2, SIZE - 3, SIZE - 4]
    assert torch.equal(points, tensors.tensors[1][numbers])


def test_a_worker_that_dies_of_a_guess_does_not_shift_the_batches():
    """torch passes over what it was reading, so all that comes later would be another's."""
    places = Fetcher(source_of(Noisy()), seed=5).fetch(Request(0, tuple(range(SIZE))))
    bad = next(p for p, sample in enumerate(places) if sample[0] == 7)
    guess = lambda request: Request(0, ((request.positions[0] + 1) % SIZE,))  # noqa: E731
    working = WorkerFetcher(source_of(Deadly(), workers=2), 5, guess)
    asked = [p % SIZE for p in range(bad - 2, bad + 8) if p % SIZE != bad]
    died = 0
    try:
        for position in asked:
            try:
                assert working.fetch(Request(0, (position,)))[0][0] == places[position][0]
            except RuntimeError as error:
                assert "worker" in str(error)  # noqa: PT017
                died += 1
    finally:
        working.close()
    assert died
