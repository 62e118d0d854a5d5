"""The order of an epoch: a permutation, the same for ever, and as good as shuffled."""

import itertools

import pytest
import torch

from manyhands.core.errors import UsageError
from manyhands.data.order import MAX_SIZE, Order

GOLDEN = [4, 2, 8, 1, 6, 7, 5, 9, 3, 0]
FAR = [486284256735, 939301900878, 1025381131663, 447743158006]


@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 1000, 4097, 65_537])
def test_every_sample_once(size):
    got = Order(size, seed=3, epoch=size).indices(0, size)
    assert torch.equal(got.sort().values, torch.arange(size))


def test_any_piece_is_the_same_as_in_the_whole():
    order = Order(10_007, seed=1, epoch=2)
    whole = order.indices(0, 10_007)
    for start, stop in itertools.combinations([0, 1, 2, 500, 5000, 10_006, 10_007], 2):
        assert torch.equal(order.indices(start, stop), whole[start:stop])
    assert order.indices(7, 7).tolist() == []


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 65, 1000, 1 << 20, 10**8, 1 << 40, MAX_SIZE])
@pytest.mark.parametrize("shuffle", [True, False])
def test_one_position_is_the_same_as_in_the_whole(size, shuffle):
    order = Order(size, seed=4, epoch=9, shuffle=shuffle)
    for start in {0, size // 3, max(0, size - 30)}:
        stop = min(size, start + 30)
        places = [order.place(position) for position in range(start, stop)]
        assert places == order.indices(start, stop).tolist()
    for none in (-1, size):
        with pytest.raises(UsageError):
            order.place(none)


def test_without_shuffle_it_is_the_data_sets_own():
    assert Order(9, seed=1, epoch=1, shuffle=False).indices(2, 6).tolist() == [2, 3, 4, 5]


def test_seeds_and_epochs_give_other_orders():
    orders = [
        tuple(Order(100, seed=seed, epoch=epoch).indices(0, 100).tolist())
        for seed in (0, 1, -1, 1 << 70)
        for epoch in range(3)
    ]
    assert len(set(orders)) == len(orders)


@pytest.mark.parametrize("size", [5, 10, 97])
def test_every_sample_comes_everywhere_alike(size):
    """Chi square over many epochs, of which sample comes first, in the middle, last."""
    epochs = 4000
    for position in (0, size // 2, size - 1):
        counts = torch.zeros(size)
        for epoch in range(epochs):
            counts[Order(size, seed=7, epoch=epoch).place(position)] += 1
        expected = epochs / size
        chi = float(((counts - expected) ** 2 / expected).sum())
        spread = (2 * (size - 1)) ** 0.5
        assert abs(chi - (size - 1)) < 5 * spread, (position, chi)


def test_neighbours_do_not_stay_neighbours():
    got = Order(100_000, seed=5, epoch=0).indices(0, 100_000)
    steps = got.diff().abs()
    assert int((steps == 1).sum()) < 10  # 2 are expected
    assert 32_000 < float(steps.float().mean()) < 34_700  # a third of all


def test_large_sizes_cost_no_more():
    order = Order(MAX_SIZE, seed=1, epoch=1)
    got = order.indices(MAX_SIZE - 1000, MAX_SIZE)
    assert len(set(got.tolist())) == 1000
    assert 0 <= int(got.min()) <= int(got.max()) < MAX_SIZE


@pytest.mark.parametrize("size", [0, -1, MAX_SIZE + 1])
def test_sizes_that_are_none(size):
    with pytest.raises(UsageError):
        Order(size, seed=1, epoch=1)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 1), (0, 11)])
def test_positions_that_are_none(start, stop):
    with pytest.raises(UsageError):
        Order(10, seed=1, epoch=1).indices(start, stop)


def test_the_numbers_are_for_ever():
    """A run that is resumed with a later release must meet the samples that are left."""
    assert Order(10, seed=0, epoch=0).indices(0, 10).tolist() == GOLDEN
    far = Order(1 << 40, seed=123, epoch=45).indices((1 << 39) + 7, (1 << 39) + 11)
    assert far.tolist() == FAR
