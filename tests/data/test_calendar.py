"""Which samples a round covers: every sample of every epoch once, at any batch size."""

import pytest

from manyhands.core.errors import UsageError
from manyhands.data.calendar import Calendar, Span


@pytest.mark.parametrize("size", [1, 2, 7, 64, 65])
@pytest.mark.parametrize("batch", [1, 3, 8, 64, 100])
def test_every_position_of_every_epoch_once(size, batch):
    calendar = Calendar(size, batch)
    for epoch in range(3):
        first = epoch * calendar.rounds_per_epoch
        spans = [calendar.span(first + turn) for turn in range(calendar.rounds_per_epoch)]
        assert {span.epoch for span in spans} == {epoch}
        covered = [position for span in spans for position in range(span.start, span.stop)]
        assert covered == list(range(size))


def test_the_last_round_of_an_epoch_has_what_is_left():
    calendar = Calendar(10, 4)
    assert [calendar.num_samples(r) for r in range(6)] == [4, 4, 2, 4, 4, 2]
    assert calendar.span(5) == Span(1, 8, 10)


def test_or_does_not_take_place():
    calendar = Calendar(10, 4, drop_last=True)
    assert [calendar.num_samples(r) for r in range(4)] == [4, 4, 4, 4]
    assert calendar.span(2) == Span(1, 0, 4)


@pytest.mark.parametrize(("size", "batch"), [(0, 1), (1, 0), (-1, 4)])
def test_sizes_that_are_none(size, batch):
    with pytest.raises(UsageError):
        Calendar(size, batch)


def test_an_epoch_without_rounds_is_refused():
    with pytest.raises(UsageError, match="drop_last"):
        Calendar(3, 4, drop_last=True)
