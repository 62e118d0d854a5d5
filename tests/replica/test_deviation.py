"""Peers whose bits are not those of the others: they are found, and get the others' state."""

from __future__ import annotations

import pytest

from tests.replica.hands import Hands, until_members, until_round

pytestmark = pytest.mark.usefixtures("zygote", "hub")  # before the leak check looks


def num_lives(hand) -> int:
    return sum("dialed" in said for said in hand.said)


def begin(hands: Hands, astray: list[int]):
    """Three peers, of which the second goes astray."""
    first, second, third = (
        hands.join(min_peers=3, pace_s=0.005, astray=bad) for bad in (None, astray, None)
    )
    hands.strays[second] = []
    until_members(first, 3)
    return first, second, third


def test_one_that_is_off_by_one_bit_once(zygote, url):
    """It is named, takes the state of the others, and is one of them again; they never stop."""
    with Hands(zygote, url, epochs=25) as hands:
        first, astray, third = begin(hands, [20])
        apart = until_members(first, 2, after=20)
        until_members(first, 3, after=apart)
        until_round(astray, hands.num_rounds - 1)  # from the run's first round to its last
        hands.finish()
        rounds = hands.strays[astray]
        assert rounds == list(range(20, rounds[-1] + 1))
        assert len(rounds) < 10
        assert [num_lives(hand) for hand in (first, astray, third)] == [1, 2, 1]
        for hand in (first, third):
            (named,) = hand.said[-2 if "threads" in hand.said[-1] else -1]["deviated"]
            assert named == ["hand1", 21, "2.weight"]
            said = [said["round"] for said in hand.said if "round" in said]
            assert said == list(range(hands.num_rounds))


def test_one_that_is_off_again_and_again(zygote, url):
    """It stops with an error that says where to look, and the others go on."""
    with Hands(zygote, url, epochs=60) as hands:
        first, astray, third = begin(hands, list(range(10, 240)))
        assert astray.wait() == 1, astray.report()
        assert "Differs" in astray.report()
        assert "2.weight of hand1" in astray.report()
        assert "look for what depends on the peer" in astray.report()
        hands.finish(astray)
        assert [num_lives(hand) for hand in (first, astray, third)] == [1, 3, 1]
