"""Mixtures: shares in any prefix, no repetition, epochs without a seam, and the same for ever."""

from __future__ import annotations

import math
import pickle
from collections import Counter

import pytest
import torch
from torch.utils.data import TensorDataset

from manyhands.core.errors import UsageError
from manyhands.data.fetch import Fetcher, Request
from manyhands.data.mixture import Mixture
from manyhands.data.order import MAX_SIZE, Order
from manyhands.data.source import Source
from manyhands.data.table import BadSample
from manyhands.replica.description import describe_data

GOLDEN = [(0, 4), (1, 1), (0, 0), (0, 3), (1, 3), (2, 1), (0, 1), (0, 2), (1, 2), (0, 6), (0, 5)]
FAR = [(0, 4), (1, 3), (0, 2), (0, 0)]


class Letters:
    """Samples that say where they come from."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[str, int]:
        assert 0 <= index < self.size
        return self.name, index

    def where(self, index: int) -> str:
        return f"{self.name}.txt:{index + 1}"


SIZES = [(1,), (5,), (3, 3), (1, 100), (40, 7, 13), (1, 2, 3, 4, 5), (9,) * 8, (50, 1, 1, 1, 9, 3)]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("shuffle", [True, False])
def test_without_weights_every_sample_once_an_epoch(sizes, shuffle):
    tables = [Letters(chr(97 + i), n) for i, n in enumerate(sizes)]
    mixture = Mixture(tables, seed=5, shuffle=shuffle)
    assert len(mixture) == sum(sizes)
    every = sorted((t.name, i) for t in tables for i in range(len(t)))
    for epoch in range(3):
        start = epoch * len(mixture)
        assert sorted(mixture[start + p] for p in range(len(mixture))) == every
    assert list(mixture) == [mixture[p] for p in range(len(mixture))]


WEIGHTS = [
    ((10, 10), (1, 1)),
    ((10, 1000), (0.9, 0.1)),
    ((7, 11, 13), (1, 2, 3)),
    ((5, 50, 500), (0.7, 0.2, 0.1)),
    ((20,) * 8, (8, 7, 6, 5, 4, 3, 2, 1)),
    ((20,) * 5, (1000, 1, 1, 1, 1)),
    ((3, 4), (math.pi, math.e)),
]


@pytest.mark.parametrize(("sizes", "weights"), WEIGHTS)
def test_any_prefix_has_its_shares(sizes, weights):
    mixture = Mixture([Letters(chr(97 + i), n) for i, n in enumerate(sizes)], weights)
    most = max(0.5, math.ceil(math.log2(len(sizes))) / 2) + 1e-9
    counts = Counter[int]()
    for position in range(5000):
        counts[mixture.drawn(position).table] += 1
        for table, weight in enumerate(weights):
            share = (position + 1) * weight / sum(weights)
            assert abs(counts[table] - share) <= most, (position, table)


@pytest.mark.parametrize(("sizes", "weights"), WEIGHTS)
def test_a_table_is_gone_through_before_it_is_begun_again(sizes, weights):
    """Also across epochs: what one has left out, the next has first."""
    mixture = Mixture([Letters(chr(97 + i), n) for i, n in enumerate(sizes)], weights, seed=2)
    drawn: list[list[int]] = [[] for _ in sizes]
    for position in range(6 * len(mixture)):
        table, sample = mixture.drawn(position)
        drawn[table].append(sample)
    for size, samples in zip(sizes, drawn, strict=True):
        laps = [samples[i : i + size] for i in range(0, len(samples), size)]
        for lap in laps[:-1]:
            assert sorted(lap) == list(range(size))
        for begun in laps[-1:]:
            assert len(set(begun)) == len(begun)


def test_laps_tables_and_seeds_have_orders_of_their_own():
    tables = [Letters("a", 30), Letters("b", 30)]
    found = set()
    for seed in (0, 1, -4):
        mixture = Mixture(tables, seed=seed)
        for epoch in range(3):
            drawn = [mixture.drawn(epoch * 60 + p) for p in range(60)]
            found |= {tuple(s for t, s in drawn if t == table) for table in (0, 1)}
    assert len(found) == 3 * 3 * 2


def test_it_is_the_order_of_the_table_that_it_says():
    mixture = Mixture([Letters("a", 10), Letters("b", 5)], seed=7)
    order = Order(10, seed="7:0", epoch=1).indices(0, 10).tolist()
    second = [mixture.drawn(15 + p) for p in range(15)]
    assert [sample for table, sample in second if table == 0] == order


def test_without_shuffle_each_in_its_own_order():
    mixture = Mixture([Letters("a", 4), Letters("b", 2)], shuffle=False)
    assert list(mixture) == [("a", 0), ("b", 0), ("a", 1), ("a", 2), ("b", 1), ("a", 3)]


def test_the_numbers_are_for_ever():
    """A run that is resumed with a later release must meet the samples that are left."""
    mixture = Mixture([Letters("a", 7), Letters("b", 5), Letters("c", 3)], [3, 1.5, 0.5], seed=9)
    assert [tuple(mixture.drawn(p)) for p in range(11)] == GOLDEN
    far = [tuple(mixture.drawn(10**15 + p)) for p in range(4)]
    assert far == FAR


def test_how_long_an_epoch_is():
    tables = [Letters("a", 10), Letters("b", 1000)]
    assert len(Mixture(tables)) == len(Mixture(tables, [1, 1])) == 1010
    short = Mixture(tables, [1, 1], size=20)
    assert len(list(short)) == 20
    # The second epoch has samples of b that the first did not have.
    first = {short[p] for p in range(20)}
    second = {short[p] for p in range(20, 40)}
    assert len({s for s in first | second if s[0] == "b"}) == 20


def test_a_position_costs_the_same_wherever_it_is():
    mixture = Mixture([Letters("a", MAX_SIZE), Letters("b", 10**8)], [2, 1])
    assert mixture[10**17][0] in "ab"
    assert len(pickle.dumps(mixture)) < 1000


def test_where_says_the_samples_own_place():
    mixture = Mixture([Letters("a", 4), TensorDataset(torch.arange(4))], shuffle=False)
    assert mixture.where(0) == "a.txt:1"
    assert mixture.where(1) == "TensorDataset[0]"


def test_a_bad_sample_is_its_tables():
    class Bad(Letters):
        def __getitem__(self, index):
            raise BadSample(self.where(index), "spoilt")

    mixture = Mixture([Letters("a", 1), Bad("b", 1)], shuffle=False)
    assert mixture[0] == ("a", 0)
    with pytest.raises(BadSample, match=r"b.txt:1: spoilt"):
        mixture[1]


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ((), {}, "no tables"),
        ((3, 0), {}, "table 1 of the mixture is empty"),
        ((3, 3), {"weights": [1]}, "1 weights for 2 tables"),
        ((3, 3), {"weights": [1, 0]}, "positive"),
        ((3, 3), {"weights": [1, -1]}, "positive"),
        ((3, 3), {"weights": [1, math.nan]}, "positive"),
        ((3, 3), {"weights": [1, math.inf]}, "positive"),
        ((3, 3), {"size": 0}, "an epoch of 0"),
        ((3, 3), {"size": 2.5}, r"size=2\.5"),
    ],
)
def test_what_cannot_be_mixed(sizes, options, message):
    with pytest.raises(UsageError, match=message):
        Mixture([Letters("a", n) for n in sizes], **options)


def test_positions_begin_with_0():
    with pytest.raises(IndexError):
        Mixture([Letters("a", 3)])[-1]


# -- in a run -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_runs_epochs_are_those_of_the_mixture(shuffle):
    """Nothing shuffles its positions once more: that would undo the shares."""
    mixture = Mixture([Letters("a", 30), Letters("b", 10)], [1, 1], seed=3)
    source = Source(dataset=mixture, batch=8, collate=list, shuffle=shuffle)
    assert source.size == 40
    fetcher = Fetcher(source, seed=99)
    for epoch in (0, 1, 5):
        for start in range(0, 40, 8):
            got = fetcher.fetch(Request(epoch, tuple(range(start, start + 8))))
            assert got == [mixture[40 * epoch + p] for p in range(start, start + 8)]
            assert Counter(name for name, _ in got) == {"a": 4, "b": 4}


def test_a_chosen_part_of_one_is_shuffled_as_any_other():
    mixture = Mixture([Letters("a", 30), Letters("b", 10)], seed=3)
    source = Source(dataset=mixture, batch=4, collate=list, chosen=range(10))
    got = [Fetcher(source, seed=9).fetch(Request(e, tuple(range(10)))) for e in (0, 1)]
    assert sorted(got[0]) == sorted(got[1]) == sorted(mixture[p] for p in range(10))
    assert got[0] != got[1]


def test_peers_of_a_run_have_one_order():
    """The description of their data says so, though their first samples may be the same."""
    tables = [Letters("a", 30), Letters("b", 10)]
    found = [
        describe_data(Source(dataset=Mixture(tables, weights, seed=seed), batch=4, collate=list))
        for seed, weights in ((3, None), (4, None), (3, [1, 1]), (3, None))
    ]
    assert len({one["order"] for one in found[:3]}) == 3
    assert found[3] == found[0]
    assert "order" not in describe_data(Source(dataset=tables[0], batch=4, collate=list))
