"""Who sends what to whom: every row once to whoever needs it, and to nobody else."""

import random

import pytest

from manyhands.core.plan import Plan
from manyhands.stages.moves import cut_batch, moves, split_rows
from manyhands.stages.schedule import orders_of
from manyhands.stages.traffic import Traffic
from manyhands.stages.values import Given, Kind, Rehearsed, carried_name, tabulate

ROW = Kind((4,), "float32", grad=True)
SCHEDULES = ("afab", "1f1b", "interleaved")


def table_of(plan, takers, kind=ROW):
    """Each stage hands one tensor on; `takers` says who takes the variable of which stage."""
    rehearsed = [
        Rehearsed(
            carried=(ROW,),
            stashed={f"v{stage}": (kind, f"layer {stage}")} if stage in takers else {},
            popped=tuple(f"v{giver}" for giver, those in takers.items() if stage in those),
        )
        for stage in range(len(plan.stages))
    ]
    return tabulate(plan, Given(carried=(ROW,), single=True, extra=()), rehearsed)


def messages_of(plan, table, num_rows, *, backward=True):
    rows = [len(span) for span in cut_batch(num_rows, plan.microbatches)]
    traffic = Traffic(plan, orders_of(plan), table, rows, backward=backward)
    return [message for line in traffic.lines.values() for message in line]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_variable_goes_straight_to_whoever_takes_it(schedule):
    """From stage 0 to stage 2, and back: peer 1 has nothing of it."""
    plan = Plan.even(3, 3, microbatches=4, schedule=schedule)
    found = messages_of(plan, table_of(plan, {0: [2]}), 8)
    skip = [m for m in found if m.value.name == "v0"]
    ways = [(m.direction, m.source, m.target) for m in skip]
    assert sorted(ways) == [("B", 2, 0)] * 4 + [("F", 0, 2)] * 4
    others = {(m.value.name, m.direction, m.source, m.target) for m in found if m not in skip}
    first, second = carried_name(0, 0), carried_name(1, 0)
    assert others == {(first, "F", 0, 1), (first, "B", 1, 0)} | {
        (second, "F", 1, 2),
        (second, "B", 2, 1),
    }


def test_what_several_stages_take_goes_to_each_of_them():
    plan = Plan.even(4, 4)
    found = messages_of(plan, table_of(plan, {0: [1, 3]}), 5)
    ways = [(m.direction, m.source, m.target) for m in found if m.value.name == "v0"]
    assert sorted(ways) == [("B", 1, 0), ("B", 3, 0), ("F", 0, 1), ("F", 0, 3)]


def test_without_a_backward_or_a_gradient_nothing_comes_back():
    plan = Plan.even(3, 3)
    mask = Kind((), "bool")
    found = messages_of(plan, table_of(plan, {0: [2]}, mask), 5)
    assert {m.direction for m in found if m.value.name == "v0"} == {"F"}
    assert {m.direction for m in found} == {"F", "B"}
    found = messages_of(plan, table_of(plan, {0: [2]}), 5, backward=False)
    assert {m.direction for m in found} == {"F"}


def random_stages(rng, num_peers):
    """Of any width and split, each peer somewhere."""
    stages = []
    for _ in range(rng.randint(2, 5)):
        peers = rng.sample(range(num_peers), rng.randint(1, num_peers))
        stages.append((1, peers, [rng.choice([1, 2, 5]) for _ in peers]))
    return [*stages, (1, list(range(num_peers)), [1] * num_peers)]


@pytest.mark.parametrize("seed", range(40))
def test_every_row_moves_once_to_whoever_needs_it(seed):
    rng = random.Random(seed)
    num_peers = rng.randint(1, 4)
    plan = Plan.of_stages(
        random_stages(rng, num_peers),
        microbatches=rng.choice([1, 2, 3]),
        schedule=rng.choice(SCHEDULES),
    )
    last = len(plan.stages) - 1
    takers = {0: [last]} if last else {}
    table, num_rows = table_of(plan, takers), rng.choice([1, 3, 7, 12])
    found = messages_of(plan, table, num_rows)
    for value in table.values:
        for consumer in value.consumers:
            source, target = plan.stages[value.producer], plan.stages[consumer]
            for microbatch, span in enumerate(cut_batch(num_rows, plan.microbatches)):
                held = _holders(source, len(span))
                needed = _holders(target, len(span))
                wanted = sorted(
                    (held[row], peer, row) for row, peer in needed.items() if held[row] != peer
                )
                of_it = [
                    m
                    for m in found
                    if m.value is value and (m.consumer, m.microbatch) == (consumer, microbatch)
                ]
                forward = [m for m in of_it if m.direction == "F"]
                back = [m for m in of_it if m.direction == "B"]
                assert sorted(_rows(forward)) == wanted
                assert sorted((b, a, row) for a, b, row in _rows(back)) == wanted


def _holders(stage, num_rows):
    """By row: the peer that has it."""
    shares = split_rows(num_rows, stage.split)
    pairs = zip(stage.peers, shares, strict=True)
    return {row: peer for peer, rows in pairs for row in range(rows.start, rows.end)}


def _rows(messages):
    return [(m.source, m.target, row) for m in messages for row in range(m.rows.start, m.rows.end)]


@pytest.mark.parametrize("seed", range(40))
def test_moves_cover_every_row_once_also_those_that_stay(seed):
    rng = random.Random(seed)
    stages = Plan.of_stages(random_stages(rng, rng.randint(1, 4))).stages
    num_rows = rng.randint(0, 12)
    for source in stages:
        for target in stages:
            found = [
                (move.source, move.target, row)
                for move in moves(source, target, num_rows)
                for row in range(move.rows.start, move.rows.end)
            ]
            held, needed = _holders(source, num_rows), _holders(target, num_rows)
            assert sorted(found) == sorted((held[row], needed[row], row) for row in needed)
            assert set(needed) == set(range(num_rows))
