"""Who computes once more what was refused, and what counts nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from manyhands.collectives.messages import Share
from manyhands.collectives.ranges import EMPTY, Ranges
from manyhands.collectives.refusal import Doubts, ask_others

SHARES = (Share(1, Ranges.of((0, 4))), Share(2, Ranges.of((4, 8))), Share(3, Ranges.of((8, 12))))


def test_others_compute_it_once_more():
    found = ask_others(Doubts(), SHARES, SHARES[0].ranges)
    assert found.claims == {2: Ranges.of((0, 2)), 3: Ranges.of((2, 4))}
    assert found.doubts == Doubts(frozenset({1}), SHARES[0].ranges)
    assert not found.quarantine


def test_what_is_refused_twice_counts_nothing():
    doubts = Doubts(frozenset({1}), Ranges.of((0, 4)))
    shares = (
        Share(1, EMPTY),
        Share(2, Ranges.of((0, 2), (4, 8))),
        Share(3, Ranges.of((2, 4), (8, 12))),
    )
    found = ask_others(doubts, shares, shares[1].ranges)
    assert found.quarantine == Ranges.of((0, 2))
    assert found.claims == {3: Ranges.of((4, 8))}


def test_with_nobody_left_to_ask_it_counts_nothing():
    found = ask_others(Doubts(), SHARES, Ranges.whole(12))
    assert found.quarantine == Ranges.whole(12)
    assert not found.claims


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_there_are_at_most_as_many_refusals_as_members(spoilers):
    """Whoever is refused, in whatever order: nothing is lost or doubled, and it comes to an end."""
    claims = {peer: Ranges.of((4 * peer, 4 * peer + 4)) for peer in range(5)}
    doubts, quarantine, refusals = Doubts(), EMPTY, 0
    for peer in spoilers:
        refused = claims[peer]
        if not refused:
            continue
        refusals += 1
        found = ask_others(doubts, tuple(Share(*item) for item in claims.items()), refused)
        doubts, quarantine = found.doubts, quarantine | found.quarantine
        claims = {p: (c - refused) | found.claims.get(p, EMPTY) for p, c in claims.items()}
        assert Ranges.union([quarantine, *claims.values()]) == Ranges.whole(20)
        assert len(quarantine) + sum(map(len, claims.values())) == 20
    assert refusals <= 5
