"""What is taken from a DataLoader, and what is refused by name."""

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from manyhands.core.errors import UsageError
from manyhands.data.source import Source

DATA = TensorDataset(torch.arange(20))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


class Longest(SequentialSampler):
    """What people make of torch's samplers: the order is in its own `__iter__`."""

    def __iter__(self):
        return iter([19, 0])


class Unsized(Dataset):
    def __getitem__(self, index):
        return index


class Reversed:
    def __len__(self):
        return 20

    def __getitem__(self, place):
        return 19 - place

    def __iter__(self):
        return iter(range(19, -1, -1))


class Pairs:
    def __iter__(self):
        yield from ([0, 1], [2, 3])


def test_what_a_loader_says_is_kept():
    collate = list
    loader = DataLoader(
        *(DATA, 8),
        shuffle=True,
        drop_last=True,
        collate_fn=collate,
        num_workers=2,
        prefetch_factor=3,
    )
    source = Source.of(loader)
    assert (source.size, source.batch, source.shuffle, source.drop_last) == (20, 8, True, True)
    assert source.collate is collate
    assert (source.workers.num, source.workers.prefetch) == (2, 3)


def test_the_order_of_samplers():
    assert not Source.of(DataLoader(DATA, 4)).shuffle
    some = Source.of(DataLoader(DATA, 4, sampler=SubsetRandomSampler([3, 5, 7])))
    assert (some.size, some.shuffle, [some.number(p) for p in range(3)]) == (3, True, [3, 5, 7])
    back = Source.of(DataLoader(DATA, 4, sampler=Reversed()))
    assert (back.size, back.shuffle, back.number(0), back.number(19)) == (20, False, 19, 0)
    assert Source.of(DataLoader(Subset(DATA, [1, 2]), 4)).size == 2


def test_a_data_set_with_a_batch():
    source = Source.of(DATA, 6)
    assert (source.batch, source.shuffle, source.size) == (6, True, 20)
    assert Source.of(DataLoader(DATA, 4), 6).batch == 6
    assert Source.of([1, 2, 3], 2).size == 3


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (DataLoader(Stream(), 4), "IterableDataset"),
        (DataLoader(Unsized(), 4, sampler=[0, 1]), "does not know its length"),
        (DataLoader(DATA, 4, sampler=WeightedRandomSampler([1.0] * 20, 20)), "WeightedRandom"),
        (DataLoader(DATA, 4, sampler=RandomSampler(DATA, replacement=True)), "RandomSampler"),
        (DataLoader(DATA, 4, sampler=DistributedSampler(DATA, 2, 0)), "DistributedSampler"),
        (DataLoader(DATA, 4, sampler=Longest(DATA)), "a Longest says only in its own time"),
        (DataLoader(DATA, batch_size=None), "batch_size=None"),
        (DataLoader(DATA, batch_sampler=Pairs()), "Pairs"),
        (DATA, "has no batch size"),
        (3, "has no batch size"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_work_is_refused_by_name(data, words):
    with pytest.raises(UsageError, match=words) as caught:
        Source.of(data)
    assert caught.value.hint


@pytest.mark.parametrize(("data", "batch"), [(3, 4), ([], 4), (DATA, 0), (iter([1]), 4)])
def test_what_is_no_data_set(data, batch):
    with pytest.raises(UsageError):
        Source.of(data, batch)
