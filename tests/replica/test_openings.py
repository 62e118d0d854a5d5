"""Rounds of the engine and rounds of the user."""

from manyhands.replica.openings import Openings, opened_chain


def test_rounds_with_samples_are_counted_without_the_openings():
    openings = Openings((0, 7))
    kinds = [openings.is_opening(n) for n in range(12)]
    assert kinds == [True, True] + [False] * 5 + [True, True] + [False] * 3
    assert [openings.count(n) for n in range(12)] == [0, 0, 0, 1, 2, 3, 4, 5, 5, 5, 6, 7]
    assert [n for n in range(12) if openings.is_gathering(n)] == [1, 8]


def test_openings_may_overlap():
    """A run that was resumed, ended while it opened, and was resumed again."""
    openings = Openings().opened(0).opened(1)
    assert [openings.count(n) for n in range(6)] == [0, 0, 0, 0, 1, 2]
    assert openings.num_rounds == 3


def test_an_opened_history_is_another_one():
    assert opened_chain(b"x") != b"x"
    assert opened_chain(b"x") != opened_chain(b"y")
