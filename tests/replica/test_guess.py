"""What workers read ahead: never a sample that is none."""

import pytest

from manyhands.data.calendar import Calendar
from manyhands.data.fetch import Request
from manyhands.replica.loader import _guess


@pytest.mark.parametrize(
    ("size", "batch", "drop_last"),
    [
        *((size, batch, False) for size, batch in ((24, 16), (24, 24), (24, 100), (33, 16))),
        *((size, batch, True) for size, batch in ((24, 16), (24, 24), (33, 16), (48, 16))),
    ],
)
def test_a_guess_is_one_of_the_samples(size, batch, drop_last):
    """Shares of an evaluation go over the ends of batches: all of it is one round."""
    calendar = Calendar(size, batch, drop_last)
    guess, whole = _guess(calendar), calendar.samples_per_epoch
    for first in range(whole):
        for last in range(first, whole):
            request = Request(0, tuple(range(first, last + 1)))
            for _ in range(4):
                request = guess(request)
                assert all(0 <= position < whole for position in request.positions)
