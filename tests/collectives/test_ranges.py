"""Sets of samples behave like sets, and have one form only."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.collectives.ranges import EMPTY, Ranges

spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6)


def positions(items):
    return {p for start, stop in items for p in range(start, stop)}


@given(spans, spans)
def test_they_behave_like_sets(one, other):
    a, b = Ranges.of(*one), Ranges.of(*other)
    left, right = positions(one), positions(other)
    assert set(a) == left
    assert len(a) == len(left)
    assert set(a | b) == left | right
    assert set(a - b) == left - right
    assert set(a & b) == left & right
    assert bool(a) == bool(left)
    assert all((p in a) == (p in left) for p in range(31))
    assert Ranges.union([a, b, EMPTY]) == a | b


@given(spans, spans)
def test_equal_sets_are_equal_values(one, other):
    a, b = Ranges.of(*one), Ranges.of(*other)
    assert (a == b) == (set(a) == set(b))
    assert (a | b) - b == a - b
    assert hash(a | b) == hash(b | a)


@given(spans, st.lists(st.integers(0, 12), max_size=5))
def test_pieces_are_taken_in_order(items, sizes):
    ranges = Ranges.of(*items)
    pieces = ranges.pieces(sizes)
    taken = [p for piece in pieces for p in piece]
    assert taken == list(ranges)[: sum(sizes)]
    assert len(pieces) == len(sizes)
    assert all(len(piece) <= size for piece, size in zip(pieces, sizes, strict=True))


@pytest.mark.parametrize(
    "bad", [((3, 3),), ((4, 3),), ((0, 2), (2, 3)), ((5, 6), (0, 1)), ((-1, 2),), ((0, 1 << 60),)]
)
def test_no_other_form_comes_by_wire(bad):
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode([bad]), type=Ranges)


def test_what_is_shown():
    assert str(Ranges.of((0, 3), (5, 6))) == "{0-2, 5}"
    assert Ranges.whole(0) is EMPTY
    assert Ranges.whole(2) == Ranges.of((0, 1), (1, 2))
