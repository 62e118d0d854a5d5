"""Units: a round is never cut so that a model which needs two samples gets one of them alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from manyhands.collectives.ranges import EMPTY, Ranges
from manyhands.data.calendar import Calendar
from manyhands.replica.conductor import Turn
from manyhands.replica.units import Units
from tests.replica.loops import (
    ALONE,
    CLASSES,
    FEATURES,
    THREE,
    Kit,
    Points,
    Recipe,
    gather,
    mean_loss,
    together,
)

NORMAL = 2  # samples that batch normalisation needs
FIVE = (1, 1, 1, 1, 1)


def sizes_of(units: Units, round_: int = 0) -> list[int]:
    """Samples of each of its units; all of them are in one, in their order."""
    turns = [Turn(round_, 0, Ranges.of((n, n + 1))) for n in range(units.num(round_))]
    requests = [units.request(turn) for turn in turns]
    whole = units.request(Turn(round_, 0, Ranges.whole(len(turns))))
    assert sum((request.positions for request in requests), ()) == whole.positions
    sizes = [len(request.positions) for request in requests]
    assert sizes == [units.num_samples(turn) for turn in turns]
    return sizes


@pytest.mark.parametrize(
    ("samples", "grain", "least", "sizes"),
    [
        (5, None, 1, [1] * 5),
        (5, 2, 1, [2, 2, 1]),
        (8, None, NORMAL, [2] * 4),
        (9, None, NORMAL, [2, 2, 2, 3]),
        (93, 4, NORMAL, [4] * 22 + [5]),
        (94, 4, NORMAL, [4] * 23 + [2]),
        (3, 4, NORMAL, [3]),
        (3, 1, NORMAL, [1, 1, 1]),  # as was asked for
        (1, None, NORMAL, [1]),
        (1, 4, NORMAL, [1]),
    ],
)
def test_what_a_round_is_cut_into(samples, grain, least, sizes):
    assert sizes_of(Units(Calendar(samples, samples), grain, least)) == sizes


def test_every_round_of_an_epoch_has_its_own_samples():
    units = Units(Calendar(1437, 96), 4, NORMAL)
    last = Calendar(1437, 96).rounds_per_epoch - 1
    assert sizes_of(units, 0) == [4] * 24
    assert sizes_of(units, last) == [4] * 22 + [5]
    request = units.request(Turn(last, 0, Ranges.of((22, 23))))
    assert request.positions == tuple(range(1432, 1437))
    assert len(units.request(Turn(last, 0, EMPTY)).positions) == NORMAL  # its body runs too


@pytest.mark.parametrize(
    ("size", "batch", "max_pass", "most"),
    [
        (26, 13, None, 6),
        (26, 13, 4, 1),  # two units may be 5 samples
        (24, 12, 4, 2),
        (24, 12, 1, 1),  # one is more, and the least that can be computed
        (17, 12, None, 6),
        (17, 12, 4, 1),  # the last round is odd
    ],
)
def test_a_pass_is_no_longer_than_a_peer_can_take(size, batch, max_pass, most):
    assert Units(Calendar(size, batch), None, NORMAL).most(max_pass) == most


# -- runs ---------------------------------------------------------------------------------------


def normal() -> nn.Module:
    # No bias before it: its gradient is pure rounding, of which Adam makes full steps.
    first = nn.Linear(FEATURES, 8, bias=False)
    layers = first, nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES)
    return nn.Sequential(*layers).double()


def once(hand, model, optimizer, loader, scheduler):
    for batch in loader:
        optimizer.zero_grad()
        loss = mean_loss(model, batch)
        mean = hand.mean(loss)
        loss.backward()
        optimizer.step()
        hand.learnt(mean)


def recipe(size: int, batch: int, **options) -> Recipe:
    data = DataLoader(Points(size), batch, shuffle=True)
    return Recipe(once, model=normal, data=lambda: data, epochs=1, options=options)


def same(kits: list[Kit], others: list[Kit]) -> None:
    torch.testing.assert_close(
        dict(kits[0].model.state_dict()), dict(others[0].model.state_dict()), rtol=1e-9, atol=1e-9
    )
    assert kits[0].losses == pytest.approx(others[0].losses, abs=1e-9)


def test_a_last_grain_of_one_sample_alone_and_shared():
    """Batches of 10 and, at the end, 7, in grains of 3; whoever computes them."""
    kits = together(recipe(27, 10, grain_size=3), THREE)
    single = together(recipe(27, 10, grain_size=3), ALONE)
    assert single[0].sizes == [3, 3, 4] * 2 + [3, 4]
    same(kits, single)


def test_passes_of_a_batch_that_they_do_not_divide():
    (kit,) = together(recipe(26, 13, max_pass=4), ALONE)
    assert min(kit.sizes) >= NORMAL
    assert max(kit.sizes) <= 4


def test_more_peers_than_a_batch_has_pairs():
    kits = together(recipe(24, 8), FIVE)
    assert all(size >= NORMAL for kit in kits for size in kit.sizes)
    assert len(kits[0].losses) == 3


def test_a_batch_of_one_sample_in_all_is_an_error_as_without_us():
    _, errors = gather(recipe(5, 4), ALONE)
    assert "Expected more than 1 value per channel" in str(errors[0])
