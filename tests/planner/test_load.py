"""What a stage asks of its peer: the arithmetic against the schedules themselves."""

import pytest

from manyhands.core.plan import Plan, PlanError
from manyhands.planner.cost import LayerCost, PeerPower
from manyhands.planner.load import Loads, held, loads_of, table
from manyhands.stages.schedule import orders_of

MIB = 1 << 20


def truly_held(plan):
    """Of each stage, the most microbatches between forward and backward, counted."""
    most = {}
    for order in orders_of(plan).values():
        now = dict.fromkeys((action.stage for action in order), 0)
        for action in order:
            now[action.stage] += 1 if action.direction == "F" else -1
            most[action.stage] = max(most.get(action.stage, 0), now[action.stage])
    return most


@pytest.mark.parametrize("schedule", ["afab", "1f1b", "interleaved"])
@pytest.mark.parametrize("peers", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_held_microbatches_are_those_of_the_schedule(schedule, peers, chunks):
    if peers == 1:
        chunks = 1
    for microbatches in range(1, 4 * peers + 2):
        stages = [(1, [peer]) for _ in range(chunks) for peer in range(peers)]
        plan = Plan.of_stages(stages, microbatches=microbatches, schedule=schedule)
        known = {"num_peers": peers, "chunks": chunks, "schedule": schedule}
        for stage, true in truly_held(plan).items():
            said = held(stage, microbatches=microbatches, **known)
            if chunks == 1 or microbatches % peers == 0:
                assert said == true
            else:  # the last group is smaller than the others: a bound
                assert true <= said == microbatches


def costs():
    return [
        LayerCost(
            name=f"l{index}",
            forward_s=1.0,
            backward_s=2.0,
            parameter_bytes=10,
            optimizer_bytes=20,
            activation_bytes=100 + index,
            output_bytes=1000 + index,
            input_bytes=7,
        )
        for index in range(4)
    ]


def peers(count, **values):
    return [PeerPower(name=f"p{index}", **values) for index in range(count)]


def test_memory_is_state_and_what_the_schedule_holds():
    def needed(stage, first, end, **kind):
        return Loads(costs(), peers(2), microbatches=8, **kind).of(stage, first, end).needed_bytes

    state = 2 * (10 + 10 + 20)
    assert needed(0, 0, 2) == state + 2 * (7 + 100 + 101)  # the stage behind, and itself
    assert needed(1, 2, 4) == state + 1 * (1001 + 102 + 103)
    assert needed(0, 0, 2, schedule="afab") == state + 8 * (7 + 100 + 101)
    assert needed(1, 2, 4, schedule="afab") == state + 8 * (1001 + 102 + 103)
    assert needed(1, 2, 4, schedule="afab", recompute=True) == state + 8 * 1001 + 102 + 103
    assert needed(0, 0, 2, recompute=True) == state + 2 * 7 + 100 + 101


def test_time_is_that_of_the_peer_and_of_what_it_sends():
    fast = [PeerPower(name="a"), PeerPower(name="b", speed=4.0), PeerPower(name="c")]
    assert Loads(costs(), fast).of(1, 1, 3).time_s == pytest.approx(6 / 4)
    slow = Loads(costs(), fast, bandwidth_bytes_s=100.0)
    assert slow.of(0, 0, 1).time_s == pytest.approx(3 + 10.00)  # its output
    assert slow.of(1, 1, 3).time_s == pytest.approx(6 / 4 + 10.00 + 10.02)  # and a gradient back
    assert slow.of(2, 3, 4).time_s == pytest.approx(3 + 10.02)  # only a gradient


def test_a_table():
    plan = Plan.of_stages(
        [(1, [0]), (3, [1])], names=["l0", "l1", "l2", "l3"], peers=["one", "two"], microbatches=4
    )
    large = [
        LayerCost(name=c.name, forward_s=0.001, backward_s=0.002, parameter_bytes=MIB)
        for c in costs()
    ]
    powers = [PeerPower(name="one", memory_bytes=4 * MIB), PeerPower(name="two", speed=2.0)]
    assert table(plan, large, powers).splitlines() == [
        "stage  peer  layers     ms  MiB  free MiB",
        "0      one   l0        3.0  2.0       4.0",
        "1      two   l1 .. l3  4.5  6.0         -",
    ]


def test_loads_of_other_plans_are_refused():
    names = [cost.name for cost in costs()]
    wide = Plan.of_stages([(4, [0, 1])], names=names)
    with pytest.raises(PlanError, match="do not go round the peers"):
        loads_of(wide, costs(), peers(2))
    other = Plan.of_stages([(2, [0]), (2, [1])])
    with pytest.raises(PlanError, match="of different layers"):
        loads_of(other, costs(), peers(2))
