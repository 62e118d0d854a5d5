"""`mh.Trainer`: the history, the model and the log are those of one process, whoever takes part."""

from __future__ import annotations

import json

import pytest

from manyhands.checkpoint.store import Store
from tests.trainer.hands import ROUNDS, Hands, evaluated, first_to, logs, oracle, rounds_in, until
from tests.trainer.trainee import HELD_OUT

pytestmark = pytest.mark.usefixtures("zygote", "hub")  # before the leak check looks


@pytest.fixture
def hub_url(hub):
    return f"{hub.address}?insecure=1"


@pytest.mark.parametrize("number", [1, 3])
def test_any_number_of_peers(zygote, url, number, tmp_path):
    with Hands(zygote, url) as hands:
        for place in range(number):
            hands.join(min_peers=number, log=str(tmp_path / f"{place}.jsonl"))
        hands.finish()
        for after in range(ROUNDS, hands.epochs * ROUNDS + 1, ROUNDS):
            assert evaluated(hands.all, after) == list(range(HELD_OUT))
        assert sum(logs(hand) for hand in hands.all) == 1
        (file,) = tmp_path.glob("*.jsonl")  # nobody else has written
        beside = file.with_name(f"{file.stem}.hyperparams.json")
        assert sorted(tmp_path.iterdir()) == sorted([file, beside])
        assert json.loads(beside.read_text())["epochs"] == hands.epochs
        assert rounds_in(file) == list(range(hands.epochs * ROUNDS))


def test_layers_that_see_their_batch_or_chance(zygote, hub_url):
    with Hands(zygote, hub_url, grain=4) as hands:
        hands.start(2)
        hands.finish()


@pytest.mark.parametrize("place", [0, 1])  # of the roster: both add up a part, and have a share
@pytest.mark.parametrize(
    "point",
    [
        {"what": "forward", "round": ROUNDS + 1},
        {"what": "evaluate", "round": 2 * ROUNDS},
        {"what": "Part", "round": 2 + ROUNDS},  # two open a run, then an epoch, then the evaluation
        {"what": "Sum", "round": 2 + ROUNDS},
    ],
    ids=lambda point: point["what"],
)
def test_one_is_killed(zygote, hub_url, place, point):
    with Hands(zygote, hub_url, shares="equal") as hands:
        for number in range(3):
            points = [point | {"then": "die"}] if number == place else []
            hands.join(*points, min_peers=3).until(lambda said: "dialed" in said)
        victim = hands.all[place]
        assert victim.wait(60) == -9, victim.report()
        hands.finish(victim)


def kill_and_go_on(hands, victim):
    """All others pass by the point at which they wait, whoever comes to it next."""
    victim.kill()
    for hand in hands.all:
        if hand is not victim:
            hand.tell("go")


@pytest.mark.parametrize("round_", [2, ROUNDS - 1])
def test_the_leader_is_killed_before_it_logs(zygote, hub_url, round_):
    """The next one does: also the last round of an epoch, after its evaluation.

    Its logger hangs at that row, and training goes on without it.
    """
    hangs = {"what": "log", "round": round_, "then": "wait"}
    waits = {"what": "forward", "round": round_ + 2, "then": "wait"}
    with Hands(zygote, hub_url) as hands:
        for points in ([hangs, waits], [], []):
            hands.join(*points, min_peers=3).until(lambda said: "dialed" in said)
        leader = hands.all[0]
        leader.until(lambda said: said.get("at") == "log")
        leader.until(lambda said: said.get("at") == "forward")
        leader.kill()
        hands.finish(leader)
        assert sum(logs(hand) for hand in hands.all) == 2
        rows = {said["row"] for said in leader.said if "row" in said}
        assert rows == set(range(round_))


def test_on_one_peer(zygote, hub_url):
    with Hands(zygote, hub_url, one_peer=True) as hands:
        hands.start(3)
        hands.finish()
        for after in range(ROUNDS, hands.epochs * ROUNDS + 1, ROUNDS):
            assert evaluated(hands.all, after) == list(range(HELD_OUT))  # by one


def test_on_one_peer_that_dies(zygote, hub_url):
    with Hands(zygote, hub_url, one_peer=True) as hands:
        for _ in range(3):
            hands.join({"what": "evaluate", "round": ROUNDS, "then": "wait"}, min_peers=3)
        victim = first_to(hands.all, "evaluate")
        kill_and_go_on(hands, victim)
        hands.finish(victim)
        assert evaluated(hands.all, ROUNDS) == sorted([*range(HELD_OUT)] * 2)


def test_who_comes_late_has_the_whole_history(zygote, url):
    with Hands(zygote, url, epochs=12) as hands:
        first = hands.join(linger_s=0.1)  # the run is not over before the other is in
        first.until(lambda said: said.get("row", -1) >= ROUNDS)
        late = hands.join()
        late.until(lambda said: "after" in said)
        ends = hands.finish()
        assert len(ends) == 2
        assert min(said["after"] for said in late.said if "after" in said) > ROUNDS


def test_resumed_at_another_number_of_peers(zygote, hub_url, tmp_path):
    saved, log = tmp_path / "saved", str(tmp_path / "log.jsonl")
    options = {"checkpoints": str(saved), "save_every": 1, "log": log}
    with Hands(zygote, hub_url, epochs=4, **options) as hands:
        # It goes on, but not to the end: what comes while another is written is not saved.
        brink = {"what": "forward", "round": 4 * ROUNDS - 1, "then": "wait"}
        first = hands.join(brink, linger_s=1.0, linger_from=ROUNDS + 2)
        until(lambda: any(p.complete and p.round > ROUNDS for p in Store(saved).places()))
        first.kill()
        second = hands.join(min_peers=2, resume=True)
        third = hands.join(min_peers=2, resume=True, log=str(tmp_path / "other.jsonl"))
        hands.finish(first)
        begun = min(s["row"] for s in (*second.said, *third.said) if "row" in s)
        assert begun > ROUNDS  # not from the beginning
        rounds = [rounds_in(file) for file in tmp_path.glob("*.jsonl")]
        assert all(one == sorted(set(one)) for one in rounds)  # each once
        assert set().union(*rounds) == set(range(4 * ROUNDS))


def test_an_epoch_is_saved_with_its_evaluation(zygote, hub_url, tmp_path):
    with Hands(zygote, hub_url, checkpoints=str(tmp_path)) as hands:
        first = hands.join({"what": "forward", "round": 2 * ROUNDS - 1, "then": "wait"})
        until(lambda: any(place.complete for place in Store(tmp_path).places()))
        first.kill()
        second = hands.join(resume=True)
        hands.finish(first)
        assert min(said["after"] for said in second.said if "after" in said) == 2 * ROUNDS


def test_all_stop_early_at_the_same_epoch(zygote, hub_url):
    """Also if one is killed on the way."""
    rows = oracle(12, None)[1]
    watch = {"watch": "val/right", "mode": "min", "patience": 2}
    best = stop = None
    for epoch, row in enumerate(rows):
        if best is None or row["val/right"] < best[1]:
            best = epoch, row["val/right"]
        if epoch - best[0] >= 2:
            stop = epoch + 1
            break
    assert stop is not None
    assert 2 < stop < 12
    # With equal shares: who is slow may have none of an evaluation.
    with Hands(zygote, hub_url, epochs=12, trainer=watch, shares="equal") as hands:
        hands.join(min_peers=3)
        hands.join(min_peers=3)
        victim = hands.join({"what": "evaluate", "round": 2 * ROUNDS, "then": "die"}, min_peers=3)
        assert victim.wait(60) == -9, victim.report()
        ends = hands.finish(victim, epochs=stop)
        assert all(end["stopped"] for end in ends)
