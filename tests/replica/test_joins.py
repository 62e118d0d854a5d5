"""Newcomers: those that die on the way, come in crowds, or cannot keep up. The run is the same."""

from __future__ import annotations

import re

import pytest

from tests.replica.hands import Hands, members, until_members, until_round

pytestmark = pytest.mark.usefixtures("zygote", "hub")  # before the leak check looks

HOLD = {"what": "Snapshot", "count": 2, "before": True, "then": "wait"}
"""In the middle of a state: one piece of it is on its way, the others are held."""
TELL = {"what": "Snapshot", "count": "any", "before": True, "then": "say"}


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
        until_members(first, 3)
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


def test_one_that_cannot_keep_up(zygote, url):
    """It is told how fast the run is and how fast it was itself, and no round has waited for it."""
    with Hands(zygote, url, epochs=40, lease_s=1.0) as hands:
        first = hands.join(pace_s=0.005)
        until_round(first, 0)
        hands.join(pace_s=0.005)
        until_members(first, 2)
        slow = hands.join(pace_s=0.25)
        assert slow.wait() == 1
        said = re.search(r"makes (\S+) rounds a second, this peer managed to replay (\S+),", slow.report())
        assert said is not None, slow.report()
        assert float(said[1]) > float(said[2])
        assert "TooSlow" in slow.report()
        assert not any("done" in said for said in first.said)
        hands.finish(slow)
        assert max(members(first)) == 2
