"""Any number of hands, the same run: whoever comes, goes, dies or is slow."""

from __future__ import annotations

import random
import time

import pytest

from tests.replica.hands import Hands, held_at, until_members

pytestmark = pytest.mark.usefixtures("zygote", "hub")  # before the leak check looks


# At a broker one may be a little late for the first rounds: the others do not end without it.
IN_TIME = {"linger_s": 0.5, "linger_from": 4}
STOPPED_S = 5.0
LONG_STOP_S = 10.0


def until_all_are_in(hands, *dead):
    for hand in hands.all:
        if hand not in dead:
            hand.until(lambda said: "round" in said)


@pytest.mark.parametrize("number", [1, 2, 3, 5])
def test_any_number_of_peers_for_long(zygote, hub, number):
    """300 steps; each peer is slower than the one before it."""
    url = f"{hub.address}?insecure=1"
    with Hands(zygote, url, epochs=75, **IN_TIME) as hands:
        for place in range(number):
            hands.join(min_peers=number, pace_s=place * 0.001)
        until_all_are_in(hands)
        hands.finish()


@pytest.mark.parametrize("number", [1, 2, 3, 5])
def test_any_number_of_peers(zygote, url, number):
    with Hands(zygote, url, **IN_TIME) as hands:
        hands.start(number)
        until_all_are_in(hands)
        hands.finish()


def test_peers_of_different_speed(zygote, url):
    with Hands(zygote, url, **IN_TIME) as hands:
        for pace_s in (0.0, 0.005, 0.02):
            hands.join(min_peers=3, pace_s=pace_s)
        until_all_are_in(hands)
        hands.finish()


def test_one_that_comes_late_is_taken_in(zygote, url):
    with Hands(zygote, url, epochs=10, linger_s=0.1) as hands:
        first = hands.join()
        first.until(lambda said: said.get("round", -1) >= 5)
        late = hands.join()
        until_members(first, 2)
        hands.finish()
        members = max(said["members"] for said in first.said if "members" in said)
        assert members == 2
        assert min(said["round"] for said in late.said if "round" in said) > 0


@pytest.mark.parametrize("seed", [1, 2])
def test_three_hundred_steps_with_deaths_and_arrivals(zygote, url, seed):
    """Up to five peers of uneven speed; whom, when and how many is drawn."""
    dice = random.Random(seed)
    # Nobody comes to the end before the last one has come in.
    with Hands(zygote, url, epochs=75, linger_s=0.1, linger_from=185) as hands:
        keeper, *_ = hands.start(3, pace_s=0.002)
        dead = []
        for at in sorted(dice.sample(range(10, 180), 8)):
            keeper.until(lambda said, at=at: said.get("round", -1) >= at)
            mortal = [hand for hand in hands.all[1:] if hand not in dead]
            if mortal and (len(mortal) == 4 or dice.random() < 0.5):
                victim = dice.choice(mortal)
                victim.kill()
                dead.append(victim)
            else:
                hands.join(pace_s=dice.choice((0.0, 0.002, 0.006)))
        until_all_are_in(hands, *dead)
        hands.finish(*dead)


POINTS = [
    {"what": "forward", "round": 4},
    {"what": "backward", "round": 4},
    {"what": "Part", "round": 4, "before": True},
    {"what": "Part", "round": 4},
    {"what": "Sum", "round": 4, "before": True},
    {"what": "Sum", "round": 4},
    {"what": "step", "round": 4},
    {"what": "stepped", "round": 4},
]


def name_of(point: dict) -> str:
    return f"{'before ' if point.get('before') else ''}{point['what']}"


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("point", POINTS, ids=name_of)
def test_killed_in_any_phase(zygote, url, place, point):
    """The first peer of the roster, and another that adds up a part: the third of them does not."""
    with Hands(zygote, url, lease_s=10.0) as hands:  # a run waits so long for its first peers
        for number in range(3):
            points = [point | {"then": "die"}] if number == place else []
            hands.join(*points, min_peers=3).until(lambda said: "dialed" in said)
        victim = hands.all[place]
        assert victim.wait(60) == -9, victim.report()
        hands.finish(victim)


def test_all_but_one_are_killed(zygote, url):
    with Hands(zygote, url, epochs=6) as hands:
        for points in ((held_at(5),), (), (held_at(5),), (held_at(5),)):
            hands.join(*points, min_peers=4)
        hands.all[1].until(lambda said: said.get("round", -1) >= 3)
        for victim in (hands.all[0], hands.all[3], hands.all[2]):
            victim.kill()
        hands.finish(*(hand for hand in hands.all if hand is not hands.all[1]))


def test_stopped_for_longer_than_its_lease(zygote, url):
    """It comes back by itself, as a new incarnation, and takes part again."""
    with Hands(zygote, url, epochs=14, lease_s=3.0, linger_s=0.2) as hands:
        first, second = hands.start(2)
        hands.strays[second] = []
        second.until(lambda said: said.get("round", -1) >= 2)
        second.stop()
        alone = until_members(first, 1)
        second.go_on()
        until_members(first, 2, after=alone)
        hands.finish()
        # The end of one round may have been seen by it alone: the other did that anew (I8).
        assert len(hands.strays[second]) <= 1
        assert [said["members"] for said in first.said if "members" in said][-1] == 2


def test_stopped_for_ten_seconds(zygote, url):
    """With a lease of three: it is put out while it stands still, and takes part again later."""
    with Hands(zygote, url, epochs=20, lease_s=3.0, linger_s=0.5) as hands:
        first, second, third = hands.start(3)
        hands.strays[second] = []
        until_members(first, 3)
        second.stop()
        stopped_at = time.monotonic()
        without = until_members(first, 2)
        until_members(third, 2)
        time.sleep(max(0.0, stopped_at + LONG_STOP_S - time.monotonic()))  # a stop has a length
        second.go_on()
        until_members(first, 3, after=without)
        hands.finish()
        assert len(hands.strays[second]) <= 1  # as above


def test_stopped_for_less_than_its_lease(zygote, url):
    """The others wait: nobody is put out, and no round is done anew."""
    with Hands(zygote, url, epochs=5, lease_s=60.0, linger_s=0.1) as hands:
        first, second = hands.start(2)
        second.until(lambda said: said.get("round", -1) >= 2)
        together = until_members(first, 2)
        second.stop()
        time.sleep(STOPPED_S)  # what is tested: a stop has a length
        second.go_on()
        hands.finish()
        counted = [said for said in first.said if "members" in said]
        assert {said["members"] for said in counted if said["counted"] >= together} == {2}
