"""Schedules against theory, and any plan's orders against the rules that every runtime needs."""

import itertools
import random

import pytest

from manyhands.core.plan import Plan
from manyhands.stages.schedule import Action, bubble_of, orders_of, picture, play


def pipeline(peers, microbatches, schedule, chunks=1):
    stages = [(1, [peer]) for _ in range(chunks) for peer in range(peers)]
    return Plan.of_stages(stages, microbatches=microbatches, schedule=schedule)


@pytest.mark.parametrize("schedule", ["afab", "1f1b"])
@pytest.mark.parametrize("peers", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("microbatches", [1, 2, 4, 8, 13])
@pytest.mark.parametrize("ratio", [1, 2])
def test_bubbles_of_a_pipeline_are_those_of_theory(schedule, peers, microbatches, ratio):
    plan = pipeline(peers, microbatches, schedule)
    played = play(orders_of(plan), plan.stages, forward=1, backward=ratio)
    assert played.bubble() == pytest.approx((peers - 1) / (microbatches + peers - 1))


@pytest.mark.parametrize("peers", [2, 3, 4])
@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("times", [1, 2, 5])
@pytest.mark.parametrize("ratio", [1, 2])
def test_interleaving_divides_the_bubble_by_the_stages_of_a_peer(peers, chunks, times, ratio):
    microbatches = peers * times
    plan = pipeline(peers, microbatches, "interleaved", chunks)
    played = play(orders_of(plan), plan.stages, forward=1, backward=ratio)
    assert played.bubble() == pytest.approx((peers - 1) / (chunks * microbatches + peers - 1))


def test_1f1b_holds_as_many_activations_as_there_are_stages_behind_and_afab_all():
    for schedule, held in [("1f1b", [4, 3, 2, 1]), ("afab", [16] * 4)]:
        plan = pipeline(4, 16, schedule)
        played = play(orders_of(plan), plan.stages)
        assert [played.most_held(peer) for peer in range(4)] == held


def test_one_microbatch_is_plain_model_parallel():
    plan = pipeline(3, 1, "afab")
    assert bubble_of(plan) == pytest.approx(2 / 3)
    assert orders_of(plan)[1] == (Action("F", 1, 0), Action("B", 1, 0))


def random_plan(rng):
    num_peers = rng.randint(1, 5)
    stages = []
    for _ in range(rng.randint(1, 7)):
        width = rng.randint(1, num_peers)
        stages.append((1, rng.sample(range(num_peers), width)))
    for peer in range(num_peers):
        if not any(peer in stage[1] for stage in stages):
            stages.append((1, [peer]))
    schedule = rng.choice(["afab", "1f1b", "interleaved"])
    return Plan.of_stages(stages, microbatches=rng.randint(1, 9), schedule=schedule)


@pytest.mark.parametrize("seed", range(300))
def test_any_plan_is_carried_out_without_a_circle_and_in_the_order_of_microbatches(seed):
    plan = random_plan(random.Random(seed))
    orders = orders_of(plan)
    assert not play(orders, plan.stages).stuck
    for peer, order in orders.items():
        own = [stage.index for stage in plan.stages_of(peer)]
        wanted = itertools.product("FB", own, range(plan.microbatches))
        assert sorted(order) == sorted(Action(*action) for action in wanted)
        for direction, stage in itertools.product("FB", own):
            got = [a.microbatch for a in order if (a.direction, a.stage) == (direction, stage)]
            assert got == sorted(got)


def test_a_circle_is_noticed():
    plan = pipeline(2, 1, "afab")
    orders = dict(orders_of(plan))
    orders[0] = orders[0][::-1]  # backward first: peer 1 waits for its forward
    stuck = play(orders, plan.stages).stuck
    assert stuck == {0: Action("B", 0, 0), 1: Action("F", 1, 0)}


def test_microbatches_that_do_not_fill_the_last_group_need_little_more_memory():
    plan = pipeline(5, 12, "interleaved", 4)
    played = play(orders_of(plan), plan.stages)
    even = pipeline(5, 10, "interleaved", 4)
    held = play(orders_of(even), even.stages)
    for peer in range(5):
        assert played.most_held(peer) <= held.most_held(peer) + 2


def test_a_picture():
    assert picture(pipeline(2, 3, "1f1b")).splitlines() == [
        "0 | 0   1   .  (0)  2  (1)  .  (2)|",
        "1 | .   0  (0)  1  (1)  2  (2)  . |",
        "25.0% of the time is waiting",
    ]
