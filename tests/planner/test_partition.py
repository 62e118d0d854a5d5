"""Partitions against all partitions there are, the rule of memory, and the words of errors."""

import random
from itertools import combinations

import pytest

from manyhands.core.plan import Plan, PlanError
from manyhands.planner.cost import LayerCost, PeerPower
from manyhands.planner.load import Loads, loads_of
from manyhands.planner.partition import DoesNotFit, partition

MIB = 1 << 20


def layers(times, num_bytes=None):
    num_bytes = num_bytes or [0] * len(times)
    return [
        LayerCost(name=f"l{i}", forward_s=t / 3, backward_s=2 * t / 3, parameter_bytes=b)
        for i, (t, b) in enumerate(zip(times, num_bytes, strict=True))
    ]


def peers(*memory, speeds=None):
    speeds = speeds or [1.0] * len(memory)
    return [
        PeerPower(name=f"p{i}", memory_bytes=m, speed=s)
        for i, (m, s) in enumerate(zip(memory, speeds, strict=True))
    ]


def sizes(plan):
    return [stage.end - stage.first for stage in plan.stages]


# -- by time ------------------------------------------------------------------------------------


def test_the_slowest_stage_is_as_fast_as_can_be():
    # To fill stage after stage up to the mean, 10, would give 9 | 6 | 15.
    assert sizes(partition(layers([3, 6, 6, 8, 7]), peers(*[None] * 3), by="time")) == [2, 2, 1]
    assert sizes(partition(layers([1, 1, 1, 9]), peers(None, None), by="time")) == [3, 1]
    assert sizes(partition(layers([9, 1, 1, 1]), peers(None, None), by="time")) == [1, 3]


def test_a_fast_peer_gets_more():
    plan = partition(layers([1] * 8), peers(None, None, speeds=[3.0, 1.0]), by="time")
    assert sizes(plan) == [6, 2]


def test_stages_that_are_not_the_slowest_are_alike():
    plan = partition(layers([10, 1, 1, 1, 1, 1, 1]), peers(*[None] * 3), by="time")
    assert sizes(plan) == [1, 3, 3]


def test_a_large_output_is_not_sent_over_a_slow_link():
    small, large = 10, 1000
    costs = [
        LayerCost(name=str(i), forward_s=1.0, output_bytes=large if i == 1 else small)
        for i in range(4)
    ]
    two = peers(None, None)
    assert sizes(partition(costs, two, by="time")) == [2, 2]
    assert sizes(partition(costs, two, by="time", bandwidth_bytes_s=100.0)) in ([1, 3], [3, 1])


# -- by memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("memory", "dealt"),
    [
        ((8, 2), [8, 2]),
        ((1, 1, 3), [2, 2, 6]),
        ((1000, 1), [9, 1]),  # every peer gets one
        ((1, 1000, 1), [1, 8, 1]),
        ((None, None), [5, 5]),
        ((None, 4, 2), [4, 4, 2]),  # without a limit: as the largest
        ((0, 5), [1, 9]),
    ],
)
def test_layers_are_dealt_in_proportion_to_free_memory(memory, dealt):
    """No bytes are known: layers count."""
    costs = [LayerCost(name=str(index)) for index in range(10)]
    assert sizes(partition(costs, peers(*memory), by="memory")) == dealt


def test_known_bytes_are_dealt_in_proportion():
    costs = layers([0] * 5, [4 * MIB, 1 * MIB, 1 * MIB, 1 * MIB, 1 * MIB])
    assert sizes(partition(costs, peers(10 * MIB, 10 * MIB), by="memory")) == [1, 4]
    assert sizes(partition(costs, peers(100 * MIB, 300 * MIB), by="memory")) == [1, 4]
    assert sizes(partition(costs, peers(70 * MIB, 10 * MIB), by="memory")) == [4, 1]


def test_a_peer_without_a_limit_takes_what_does_not_fit_elsewhere():
    costs = layers([1] * 10, [MIB] * 10)  # 2 MiB each, with gradients
    for by in ("memory", "auto"):
        assert sizes(partition(costs, peers(None, 2 * MIB), by=by)) == [9, 1]


# -- auto ---------------------------------------------------------------------------------------


def test_auto_is_by_time_as_long_as_it_fits():
    costs = layers([1, 1, 1, 1, 4], [MIB] * 5)
    assert sizes(partition(costs, peers(None, None))) == [4, 1]
    assert sizes(partition(costs, peers(8 * MIB, 8 * MIB))) == [4, 1]
    assert sizes(partition(costs, peers(6 * MIB, 8 * MIB))) == [3, 2]
    assert sizes(partition(costs, peers(6 * MIB, 8 * MIB), by="time")) == [4, 1]


def test_schedules_and_recomputation_decide_what_fits():
    costs = [
        LayerCost(name=str(i), forward_s=1.0, activation_bytes=10, output_bytes=1, input_bytes=1)
        for i in range(4)
    ]
    two = peers(42, 42)

    def deal(**kind):
        return partition(costs, two, microbatches=8, **kind)

    assert sizes(deal()) == [2, 2]  # 2 x 21 and 1 x 21
    with pytest.raises(DoesNotFit):
        deal(schedule="afab")
    assert sizes(deal(schedule="afab", recompute=True)) == [2, 2]
    assert deal(schedule="afab", recompute=True).recompute


def test_the_plan_is_as_asked():
    plan = partition(
        layers([1] * 8), peers(None, None), microbatches=4, schedule="interleaved", chunks=2
    )
    assert plan == Plan.of_stages(
        [(2, [0]), (2, [1]), (2, [0]), (2, [1])],
        names=[f"l{i}" for i in range(8)],
        peers=["p0", "p1"],
        microbatches=4,
        schedule="interleaved",
    )


def test_a_single_peer_has_one_stage_whatever_the_chunks():
    assert sizes(partition(layers([1] * 4), peers(None), chunks=3)) == [4]


# -- against all partitions ---------------------------------------------------------------------


def all_partitions(loads):
    num_layers = len(loads.costs)
    for cuts in combinations(range(1, num_layers), loads.num_stages - 1):
        bounds = [0, *cuts, num_layers]
        yield [loads.of(i, bounds[i], bounds[i + 1]) for i in range(loads.num_stages)]


def fits(stages, powers):
    return all(
        power.memory_bytes is None
        or sum(load.needed_bytes for load in stages if load.peer == index) <= power.memory_bytes
        for index, power in enumerate(powers)
    )


def random_case(rng):
    num_peers, chunks = rng.choice([(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (2, 3)])
    costs = [
        LayerCost(
            name=str(index),
            forward_s=rng.choice([0.0, 1.0, rng.random()]) + 0.01,
            backward_s=rng.random(),
            parameter_bytes=rng.randint(0, 50),
            optimizer_bytes=rng.randint(0, 100),
            activation_bytes=rng.randint(0, 100),
            output_bytes=rng.randint(0, 40),
            input_bytes=rng.randint(0, 40),
        )
        for index in range(rng.randint(num_peers * chunks, num_peers * chunks + 5))
    ]
    powers = peers(
        *(rng.choice([None, rng.randint(100, 1500)]) for _ in range(num_peers)),
        speeds=[rng.choice([0.5, 1.0, 2.0]) for _ in range(num_peers)],
    )
    kind = {
        "microbatches": rng.randint(1, 6),
        "schedule": rng.choice(["afab", "1f1b"] if chunks == 1 else ["afab", "interleaved"]),
        "recompute": rng.random() < 0.3,
        "bandwidth_bytes_s": rng.choice([None, 100.0]),
    }
    return costs, powers, chunks, kind


@pytest.mark.parametrize("seed", range(300))
def test_no_other_partition_is_better(seed):
    costs, powers, chunks, kind = random_case(random.Random(seed))
    loads = Loads(costs, powers, chunks=chunks, **kind)
    everything = list(all_partitions(loads))

    def slowest(stages):
        return max(load.time_s for load in stages)

    def stages_by(by):
        plan = partition(costs, powers, by=by, chunks=chunks, **kind)
        return loads_of(plan, costs, powers, bandwidth_bytes_s=kind["bandwidth_bytes_s"])

    assert slowest(stages_by("time")) == pytest.approx(min(map(slowest, everything)))
    fitting = [stages for stages in everything if fits(stages, powers)]
    if fitting:
        found = stages_by("auto")
        assert fits(found, powers)
        assert slowest(found) == pytest.approx(min(map(slowest, fitting)))
        assert fits(stages_by("memory"), powers)
    else:
        for by in ("auto", "memory"):
            with pytest.raises(DoesNotFit) as caught:
                stages_by(by)
            assert caught.value.missing_bytes > 0
            free = {power.name: power.memory_bytes for power in powers}
            assert caught.value.free_bytes == free[caught.value.peer]


def test_random_cases_are_of_both_kinds():
    """Otherwise the test above would show less than it says."""
    outcomes = set()
    for seed in range(300):
        costs, powers, chunks, kind = random_case(random.Random(seed))
        try:
            fast = partition(costs, powers, by="time", chunks=chunks, **kind)
            outcomes.add((chunks > 1, fast == partition(costs, powers, chunks=chunks, **kind)))
        except DoesNotFit:
            outcomes.add((chunks > 1, "none"))
    assert outcomes == {(c, o) for c in (False, True) for o in (False, True, "none")}


def test_a_long_model_with_little_memory_is_dealt_in_time():
    """Several stages a peer, all short of memory: the search stays bounded."""
    rng = random.Random(1)
    costs = layers([rng.random() for _ in range(48)], [rng.randint(1, 9) for _ in range(48)])
    total = sum(cost.state_bytes for cost in costs)
    powers = peers(*[total // 4 + 12] * 4)
    plan = partition(costs, powers, chunks=3, schedule="interleaved", microbatches=4)
    assert fits(loads_of(plan, costs, powers), powers)


# -- errors -------------------------------------------------------------------------------------


def refusal(*given, **kind):
    with pytest.raises(PlanError) as caught:
        partition(*given, **kind)
    return str(caught.value)


def test_fewer_layers_than_peers():
    assert refusal(layers([1, 1]), peers(None, None, None)) == (
        "2 layers cannot be dealt to 3 peers, at least one to each\n"
        "hint: use fewer peers, or smaller layers"
    )
    assert refusal(layers([1, 1, 1]), peers(None, None), chunks=2) == (
        "3 layers cannot be dealt to 2 peers, at least 2 to each\n"
        "hint: use fewer peers or chunks, or smaller layers"
    )


def test_wrong_arguments():
    two = layers([1, 1]), peers(None, None)
    assert refusal(*two, by="size") == (
        "there is no partition by 'size'\nhint: there are: memory, time, auto"
    )
    assert refusal(two[0], []) == "there are no peers to give layers to\nhint: name at least one"
    assert refusal(*two, chunks=0) == "0 chunks\nhint: 1 is one stage a peer"
    assert refusal(*two, bandwidth_bytes_s=0.0) == (
        "a bandwidth of 0.0 bytes/s\nhint: None: do not count it"
    )
    assert refusal(*two, microbatches=0).startswith("0 microbatches")
    assert refusal(*two, schedule="zb") == (
        "there is no schedule 'zb'\nhint: there are: afab, 1f1b, interleaved"
    )
    for by in ("time", "auto"):
        assert refusal(layers([0, 0]), peers(None, None), by=by) == (
            f"a partition by '{by}' needs the layers' times, and all are 0\n"
            'hint: measure them (profile_layers), or use by="memory"'
        )


def test_a_model_that_does_not_fit_says_where_and_by_how_much():
    costs = [
        LayerCost(
            name=f"block{i}",
            forward_s=1.0,
            parameter_bytes=10 * MIB,
            optimizer_bytes=20 * MIB,
            activation_bytes=5 * MIB,
        )
        for i in range(6)
    ]
    with pytest.raises(DoesNotFit) as caught:
        partition(costs, peers(100 * MIB, 150 * MIB), microbatches=4)
    error = caught.value
    assert (error.peer, error.layers, error.layer) == (
        "p1",
        ("block2", "block3", "block4", "block5"),
        2,
    )
    assert (error.needed_bytes, error.free_bytes) == (180 * MIB, 150 * MIB)
    assert str(error) == (
        "the model does not fit, however it is cut: peer p1 has 150.0 MiB free and needs 180.0 MiB "
        "for layers 2 to 5 (block2 .. block5), 30.0 MiB more (160.0 are parameters, gradients and "
        "optimizer, 20.0 activations)\n"
        "hint: add a peer, make the microbatches smaller, keep inputs instead of activations "
        "(recompute=True), or cut a large layer in two"
    )


def test_a_peer_without_memory():
    message = refusal(layers([1, 1], [MIB, MIB]), peers(0, None))
    assert "peer p0 has 0.0 MiB free and needs 2.0 MiB for layer 0 (l0), 2.0 MiB more" in message


def test_a_few_bytes_are_not_none():
    message = refusal(layers([1, 1], [96, MIB]), peers(0, None))
    assert "peer p0 has 0.0 MiB free and needs 0.0002 MiB for layer 0 (l0), 0.0002 MiB" in message
    message = refusal(layers([1], [MIB]), peers(2 * MIB - 1))
    assert "peer p0 has 2.0 MiB free and needs 2.0 MiB for layer 0 (l0), 0.000001 MiB" in message


def test_of_several_peers_the_one_that_lacks_most_is_named():
    message = refusal(layers([1, 1, 1], [MIB, 3 * MIB, 2 * MIB]), peers(MIB, MIB, 2 * MIB))
    assert "peer p1 has 1.0 MiB free and needs 6.0 MiB for layer 1 (l1), 5.0 MiB more" in message


def test_all_stages_of_the_peer_are_named():
    message = refusal(layers([1] * 5, [MIB] * 5), peers(MIB, None), chunks=2)
    assert "for layer 0 (l0) and layer 2 (l2)" in message
