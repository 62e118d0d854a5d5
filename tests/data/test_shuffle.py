"""Whether an order is as good as torch.randperm's: the same statistics of both, and what chance
would have them be. All seeds are fixed, so that nothing here changes from run to run.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from manyhands.data.order import Order

SIZES = (16, 63, 64, 65, 257, 1000)
SEEDS = 200
FEW = 100  # samples, for which numbers are faster than tensors
LIMIT = (
    4.5  # standard deviations: of so many statistics, one of a true shuffle is so far off in 1000
)
Shuffle = Callable[[int, int], Tensor]


def ours(size: int, seed: int) -> Tensor:
    order = Order(size, seed=seed, epoch=seed % 7)
    if size <= FEW:
        return torch.tensor([order.place(position) for position in range(size)])
    return order.indices(0, size)


def torchs(size: int, seed: int) -> Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))


def identity(size: int, seed: int) -> Tensor:
    return torch.arange(size)


def rotated(size: int, seed: int) -> Tensor:
    """What a cheap order would do: an offset and a stride."""
    stride = next(s for s in range(2 * seed + 1, 4 * size * seed + 9) if math.gcd(s, size) == 1)
    return (torch.arange(size) * stride + 31 * seed) % size


def of(shuffle: Shuffle, size: int) -> Tensor:
    """A row a seed."""
    return torch.stack([shuffle(size, seed) for seed in range(SEEDS)])


both = pytest.mark.parametrize("shuffle", [ours, torchs], ids=["ours", "torch"])
sizes = pytest.mark.parametrize("size", SIZES)


def z_of_mean(values: Tensor, mean: float, variance: float) -> float:
    """By how many standard deviations the mean of independent values is off."""
    return float((values.double().mean() - mean) / math.sqrt(variance / len(values)))


def rank_correlation(orders: Tensor) -> float:
    """Of position and sample. Mean 0, variance 1 / (n - 1) for each order."""
    size = orders.shape[1]
    centred = torch.arange(size).double() - (size - 1) / 2
    rho = (orders.double() - (size - 1) / 2) @ centred / centred.square().sum()
    return z_of_mean(rho, 0.0, 1 / (size - 1))


def spread_of_correlation(orders: Tensor) -> float:
    """Its square has the mean 1 / (n - 1): neither always near 0 nor often far from it."""
    size = orders.shape[1]
    centred = torch.arange(size).double() - (size - 1) / 2
    rho = (orders.double() - (size - 1) / 2) @ centred / centred.square().sum()
    return z_of_mean((size - 1) * rho.square(), 1.0, 2.0)


def serial_correlation(orders: Tensor) -> float:
    """Of a sample and the one after it (in a circle): mean -1 / (n - 1), variance about 1 / n."""
    size = orders.shape[1]
    centred = orders.double() - (size - 1) / 2
    r = (centred * centred.roll(-1, 1)).sum(1) / centred.square().sum(1)
    return z_of_mean(r, -1 / (size - 1), 1 / size)


def adjacent_pairs(orders: Tensor) -> float:
    """Neighbours that stay neighbours: 2 of them in the mean (2 (n - 1) / n), about Poisson."""
    size = orders.shape[1]
    stayed = (orders.diff(dim=1).abs() == 1).sum(1)
    return z_of_mean(stayed, 2 * (size - 1) / size, 2.0)


def displacement(orders: Tensor) -> float:
    """How far samples are from where they were: (n^2 - 1) / 3 n in the mean."""
    size = orders.shape[1]
    far = (orders - torch.arange(size)).abs().double().mean(1)
    return z_of_mean(far, (size * size - 1) / (3 * size), 2 * size / 45)


def fixed_points(orders: Tensor) -> float:
    """One in the mean, whatever the size; variance 1."""
    return z_of_mean((orders == torch.arange(orders.shape[1])).sum(1), 1.0, 1.0)


def cycles(orders: Tensor) -> float:
    """As many as the harmonic number of the size says."""
    size = orders.shape[1]
    harmonic = sum(1 / k for k in range(1, size + 1))
    variance = harmonic - sum(1 / k**2 for k in range(1, size + 1))
    return z_of_mean(torch.tensor([num_cycles(row) for row in orders.tolist()]), harmonic, variance)


def num_cycles(order: list[int]) -> int:
    seen = bytearray(len(order))
    count = 0
    for start in range(len(order)):
        if not seen[start]:
            count += 1
            while not seen[start]:
                seen[start] = 1
                start = order[start]
    return count


def ascents(orders: Tensor) -> float:
    """Half of all steps go up; (n - 1) / 2, variance (n + 1) / 12."""
    size = orders.shape[1]
    return z_of_mean((orders.diff(dim=1) > 0).sum(1), (size - 1) / 2, (size + 1) / 12)


def halves(orders: Tensor) -> float:
    """How many of the first half of the data come in the first half of an epoch: half of them."""
    size = orders.shape[1]
    half = size // 2
    found = (orders[:, :half] < half).sum(1)
    share = half / size
    variance = half * share * (1 - share) * (size - half) / (size - 1)
    return z_of_mean(found, half * share, variance)


STATISTICS = [
    rank_correlation,
    spread_of_correlation,
    serial_correlation,
    adjacent_pairs,
    displacement,
    fixed_points,
    cycles,
    ascents,
    halves,
]


@both
@sizes
def test_as_a_true_shuffle_would_be(shuffle, size):
    orders = of(shuffle, size)
    off = {statistic.__name__: statistic(orders) for statistic in STATISTICS}
    assert all(abs(z) < LIMIT for z in off.values()), off


@pytest.mark.parametrize("shuffle", [identity, rotated])
def test_the_statistics_see_what_is_no_shuffle(shuffle):
    off = [abs(statistic(of(shuffle, 257))) for statistic in STATISTICS]
    assert sum(z > LIMIT for z in off) >= 3, off


@both
@pytest.mark.parametrize("size", [16, 63, 64])
def test_every_sample_is_everywhere_alike(shuffle, size):
    """Chi square of (position, sample) over many seeds: size^2 cells, (size - 1)^2 free."""
    rounds = 1000
    counts = torch.zeros(size, size)
    places = torch.arange(size)
    for seed in range(rounds):
        counts[places, shuffle(size, seed)] += 1
    assert abs(z_of_chi_square(counts, rounds / size, (size - 1) ** 2)) < LIMIT


@both
@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_orders_of_few_samples_are_alike(shuffle, size):
    rounds, number = 4000, math.factorial(size)
    counts = of_orders(shuffle, size, rounds)
    assert len(counts) == number
    assert abs(z_of_chi_square(counts, rounds / number, number - 1)) < LIMIT


@both
def test_orders_of_five_samples_are_nearly_alike(shuffle):
    """A Feistel network, whatever its keys, has only even permutations. By that, and by nothing
    that more rounds or a better mixing would change, some of these 120 orders are a tenth more
    likely than others.
    """
    rounds, number = 6000, 120
    counts = of_orders(shuffle, 5, rounds)
    assert len(counts) == number
    expected = rounds / number
    # Of the variance that chance alone gives (1 / expected, of the share), what is above it.
    spread = float((counts / expected - 1).square().mean()) - 1 / expected
    assert spread < 0.15**2


def of_orders(shuffle: Shuffle, size: int, rounds: int) -> Tensor:
    """How often each order that came up did."""
    powers = size ** torch.arange(size)
    numbers = torch.stack([(shuffle(size, seed) * powers).sum() for seed in range(rounds)])
    return numbers.unique(return_counts=True)[1]


@both
def test_pairs_come_after_each_other_alike(shuffle):
    """Chi square of (sample, the next one): which follows which says nothing."""
    size, rounds = 40, 1000
    counts = torch.zeros(size, size)
    for seed in range(rounds):
        order = shuffle(size, seed)
        counts[order[:-1], order[1:]] += 1
    others = counts[~torch.eye(size, dtype=torch.bool)]
    assert abs(z_of_chi_square(others, rounds / size, size * (size - 2))) < LIMIT


@both
def test_epochs_know_nothing_of_each_other(shuffle):
    """The rank correlation of one order with the next."""
    size = 1000
    orders = of(shuffle, size).double() - (size - 1) / 2
    rho = (orders[1:] * orders[:-1]).sum(1) / orders[0].square().sum()
    assert abs(z_of_mean(rho, 0.0, 1 / (size - 1))) < LIMIT
    assert float(rho.abs().max()) < 5 / math.sqrt(size)


@both
def test_a_large_order_in_blocks(shuffle):
    """Which block of samples comes in which block of an epoch, over a million samples."""
    size, blocks = 1 << 20, 64
    order = shuffle(size, 11)
    table = torch.zeros(blocks, blocks)
    rows = torch.arange(size) * blocks // size
    table.view(-1).index_add_(0, rows * blocks + order * blocks // size, torch.ones(size))
    assert abs(z_of_chi_square(table, size / blocks**2, (blocks - 1) ** 2)) < LIMIT
    # And no period: the differences at any power-of-two distance are like those at others.
    for lag in (1, 2, 3, 64, 1024, 1025, 65_536):
        rho = torch.corrcoef(torch.stack([order[:-lag].double(), order[lag:].double()]))[0, 1]
        assert abs(float(rho)) < LIMIT / math.sqrt(size - lag), lag


def z_of_chi_square(counts: Tensor, expected: float, freedom: float) -> float:
    chi = float(((counts.double() - expected) ** 2 / expected).sum())
    return (chi - freedom) / math.sqrt(2 * freedom)
