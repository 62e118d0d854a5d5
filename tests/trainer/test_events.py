"""What happens to a run, and what its peers tell, in one log: nothing twice, nothing missing."""

from __future__ import annotations

import collections

import pytest

from manyhands.observe import merge
from tests.trainer.hands import ROUNDS, Hands

pytestmark = pytest.mark.usefixtures("zygote", "hub")  # before the leak check looks


@pytest.fixture
def hub_url(hub):
    return f"{hub.address}?insecure=1"


@pytest.mark.parametrize("victim", [0, 2])  # 0 leads
def test_one_is_killed_and_one_comes_late(zygote, hub_url, tmp_path, victim):
    place = {"what": "forward", "round": ROUNDS + 1, "then": "wait"}
    # All have samples in the last round: who has none reports before it has something to tell.
    options = {"tells": True, "epochs": 12, "company": 3, "shares": "equal"}
    with Hands(zygote, hub_url, **options) as hands:
        for number in range(3):
            points = [place] if number == victim else []
            events = str(tmp_path / f"{number}.jsonl")
            hand = hands.join(*points, min_peers=3, events=events)
            hand.until(lambda said: "dialed" in said)
        killed = hands.all[victim]
        killed.until(lambda said: said.get("at") == "forward")
        killed.kill()
        hands.join(events=str(tmp_path / "3.jsonl"))
        hands.finish(killed)
        files = sorted(tmp_path.iterdir())
        assert len(files) == (2 if victim == 0 else 1)  # of those that have led
        found = merge(files)
        for file in files:
            ids = [event.id for event in merge([file])]
            assert len(ids) == len(file.read_text().splitlines())  # each once
        told = collections.Counter(event.text for event in found if event.what == "test")
        assert set(told.values()) == {1}
        for hand in hands.all:
            mine = {said["told"] for said in hand.said if "told" in said}
            assert mine
            if hand is not killed:
                assert mine <= told.keys(), hand.report()
        # Of the dead one, all that came with a round that was committed.
        dead = {f"{killed.name} in round {round_}" for round_ in range(ROUNDS + 1)}
        assert dead <= told.keys()
        joined = [event.peer.split("#")[0] for event in found if event.what == "joined"]
        assert sorted(joined) == sorted(hand.name for hand in hands.all)
        left = [event.peer.split("#")[0] for event in found if event.what == "left"]
        assert left == [killed.name]
        steps = [event.step for event in found]
        assert steps == sorted(steps)


def test_checkpoints_are_told_of(zygote, hub_url, tmp_path):
    saved, log = tmp_path / "saved", tmp_path / "events.jsonl"
    with Hands(zygote, hub_url, checkpoints=str(saved), save_every=2, events=str(log)) as hands:
        hands.start(2)
        hands.finish()
        found = [event for event in merge([log]) if event.what == "saved"]
        assert found
        assert all(str(saved) in event.text for event in found)
