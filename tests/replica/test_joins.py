"""Newcomers: those that die on the way, come in crowds, or cannot keep up. The run is the same."""

from __future__ import annotations

import re

import pytest

from tests.replica.hands import Hands, members, until_members, until_round

pytestmark = pytest.mark.usefixtures("zygote", "hub")  # before the leak check looks

HOLD = {"what": "Snapshot", "count": 2, "before": True, "then": "wait"}
"""In the middle of a state: one piece of it is on its way, the donor's others are held."""
COUNT = {"what": "Snapshot", "count": "any", "before": True, "then": "say"}
LINGER_S = 0.05
"""A pass of a member: the run is not over before a newcomer is in, which does not take its time."""


def begin_two(hands: Hands, *points: dict):
    """Two members; the second one has these points."""
    first = hands.join()
    until_round(first, 0)
    second = hands.join(*points)
    until_members(first, 2)
    return first, second


def test_killed_while_the_state_is_on_its_way(zygote, url):
    """The members go on, and the next newcomer gets in."""
    with Hands(zygote, url, epochs=25, linger_s=LINGER_S) as hands:
        first, donor = begin_two(hands, HOLD)
        victim = hands.join()
        donor.until(lambda said: said.get("at") == "Snapshot")
        victim.kill()
        donor.tell("go")
        hands.join(linger_s=0.0)
        until_members(first, 3)
        hands.finish(victim)


def test_members_go_on_while_the_state_is_on_its_way(zygote, url):
    """No round waits for a join, however long that takes; then the newcomer gets in."""
    with Hands(zygote, url, epochs=25, linger_s=LINGER_S) as hands:
        first, donor = begin_two(hands, HOLD)
        hands.join(linger_s=0.0)
        donor.until(lambda said: said.get("at") == "Snapshot")
        until_round(first, len(members(first)) + 10)
        assert max(members(first)) == 2
        donor.tell("go")
        until_members(first, 3)
        hands.finish()


def test_ten_at_once(zygote, url):
    """All get in, and their states come from all members."""
    with Hands(zygote, url, epochs=20, linger_s=LINGER_S) as hands:
        first, *_ = old = [hands.join(COUNT, min_peers=3) for _ in range(3)]
        until_members(first, 3)
        new = [hands.join(COUNT, linger_s=0.0) for _ in range(10)]
        until_members(first, 13)
        hands.finish()
        sent = [sum(said.get("at") == "Snapshot" for said in hand.said) for hand in old + new]
        assert all(sent[:3]), sent
        assert max(sent) <= sum(sent) / 2, sent


def test_one_without_a_state_while_the_run_opens(zygote, url, tmp_path):
    """It asks the founder, which is alone, and gets the state before any round with samples."""
    with Hands(zygote, url, epochs=1000, grain=None, min_peers=2) as hands:
        founder = hands.join(pace_s=0.005)
        founder.until(lambda said: "dialed" in said)
        newcomer = hands.join(checkpoints=str(tmp_path), resume=True)
        until_members(founder, 2)
        assert newcomer.until(lambda said: "round" in said)["round"] == 0


def test_one_that_cannot_keep_up(zygote, url):
    """It is told how fast the run is and how fast it was itself, and no round has waited for it."""
    with Hands(zygote, url, epochs=40, lease_s=2.0, linger_s=LINGER_S) as hands:
        first, _ = begin_two(hands)
        slow = hands.join(pace_s=8 * LINGER_S)  # slower than the others on any machine
        assert slow.wait() == 1, slow.report()
        rates = re.search(r"makes (\S+) rounds a second, .* replay (\S+),", slow.report())
        assert rates is not None, slow.report()
        assert float(rates[1]) > float(rates[2])
        hands.finish(slow)
        assert max(members(first)) == 2


def test_one_whose_state_never_comes_in_time(zygote, url):
    """Its link alone is too slow: what follows has a hole before the state is here, every time."""
    with Hands(zygote, url, epochs=1000, lease_s=2.0, linger_s=LINGER_S) as hands:
        first, _ = begin_two(hands)
        slow = hands.join(loses="Snapshot")
        assert slow.wait() == 1, slow.report()
        rates = re.search(r"makes (\S+) rounds a second, .* replay (\S+),", slow.report())
        assert rates is not None, slow.report()
        assert float(rates[1]) > float(rates[2]) == 0.0
        assert max(members(first)) == 2
