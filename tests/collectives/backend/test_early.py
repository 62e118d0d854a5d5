"""What comes before an operation starts, and after it has ended."""

from __future__ import annotations

import pytest

from manyhands.collectives.backend import early
from manyhands.collectives.backend.early import Arrival, Early
from manyhands.collectives.backend.exchange import GIVEN, Key
from manyhands.collectives.backend.failure import TeamFailed
from manyhands.collectives.backend.messages import Piece
from manyhands.collectives.pool import Pool

KEY, OTHER = Key(1, 0), Key(1, 1)


def arrival(key, sender=2, k=0):
    return Arrival(sender, Piece(*key, "barrier", GIVEN, k), Pool(16, 1).take(0))


def test_an_operation_takes_what_came_for_it():
    book = Early()
    first, second = arrival(KEY, sender=2), arrival(KEY, sender=1, k=1)
    for one in (first, second):
        book.keep(KEY, one)
    book.keep(OTHER, arrival(OTHER))
    book.show(KEY, 3)
    assert set(book.waiting()) == {KEY, OTHER}
    assert book.take(KEY) == ([first, second], {1, 2, 3})
    assert book.take(KEY) == ([], set())
    assert book.waiting() == [OTHER]


def test_after_its_end_nothing_can_come():
    book = Early()
    book.take(KEY)
    book.finish(KEY)
    with pytest.raises(TeamFailed, match="rank 2 sent piece 5 of `barrier`"):
        book.keep(KEY, arrival(KEY, k=5))
    book.show(KEY, 2)  # it waits for this rank no longer, and will see that
    assert book.take(KEY) == ([], set())
    assert book.waiting() == []


def test_what_is_remembered_is_bounded():
    book = Early()
    for seq in range(early._MAX_KEYS + 10):
        book.show(Key(2, seq), 1)
        book.take(Key(3, seq))
        book.finish(Key(3, seq))
    assert len(book._shown) == len(book._finished) == early._MAX_KEYS
    assert book.take(Key(2, early._MAX_KEYS + 9)) == ([], {1})
    with pytest.raises(TeamFailed):
        book.keep(Key(3, early._MAX_KEYS + 9), arrival(KEY))
