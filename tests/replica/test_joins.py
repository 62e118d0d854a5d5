"""Newcomers: those that die on the way, come in crowds, or cannot keep up. The run is the same."""

from __future__ import annotations

import pytest

from tests.replica.hands import Hands, members, until_members, until_round

pytestmark = pytest.mark.usefixtures("zygote", "hub")  # before the leak check looks

HOLD = {"what": "Snapshot", "count": 2, "before": True, "then": "wait"}
"""In the middle of a state: one piece of it is on its way, the others are held."""
TELL = {"what": "Snapshot", "count": "any", "before": True, "then": "say"}


def begin_two(hands, *points):
    """Two members; the first has these points."""
    first = hands.join(*points, pace_s=0.005)
    until_round(first, 0)
    second = hands.join(pace_s=0.005)
    until_members(first, 2)
    return first, second


def is_in(hand):
    """It has seen a round in which somebody else took part, too."""
    return any("round" in said for said in hand.said)


def test_killed_while_the_state_is_on_its_way(zygote, url):
    """The members go on, and the next newcomer gets in."""
    with Hands(zygote, url, epochs=30) as hands:
        first = hands.join(pace_s=0.005)
        until_round(first, 0)
        second = hands.join(HOLD, pace_s=0.005)
        until_members(first, 2)
        victim = hands.join()
        second.until(lambda said: said.get("at") == "Snapshot")
        victim.kill()
        second.tell("go")
        hands.join()
        until_members(first, 3)
        hands.finish(victim)


def test_members_go_on_while_a_newcomer_waits(zygote, url):
    """Nobody waits for a join: the rounds that the state is behind are made without the newcomer."""
    with Hands(zygote, url, epochs=30) as hands:
        first = hands.join(pace_s=0.005)
        until_round(first, 0)
        second = hands.join(HOLD, pace_s=0.005)
        until_members(first, 2)
        hands.join()
        second.until(lambda said: said.get("at") == "Snapshot")
        reached = len(members(first))
        until_round(first, reached + 10)
        assert max(members(first)) == 2
        second.tell("go")
        try:
            until_members(first, 3)
        except AssertionError:
            for h in hands.all: print(h.report())
            raise
        hands.finish()


def test_ten_at_once(zygote, url):
    """All get in, and all members send them their states."""
    with Hands(zygote, url, epochs=40, lease_s=10.0) as hands:
        first, *_ = old = [hands.join(TELL, min_peers=3, pace_s=0.01) for _ in range(3)]
        until_members(first, 3)
        new = [hands.join(TELL) for _ in range(10)]
        until_members(first, 13)
        hands.finish()
        sent = [sum(said.get("at") == "Snapshot" for said in hand.said) for hand in old + new]
        print(sent)
        assert all(sent[:3])
        assert max(sent) <= sum(sent) / 2
