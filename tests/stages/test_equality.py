"""Random models on random plans give what one process gives: losses and all parameters."""

from itertools import permutations

import pytest
from tests.collectives.backend.crew import Crew
from tests.stages.cases import random_case
from tests.stages.programs import check, train
from tests.stages.threads import run_threads

THREADS = [(seed, 1 + seed % 4) for seed in range(240)]
WORLDS = {world: range(1000 * world, 1000 * world + 30) for world in (1, 2, 3, 4)}


@pytest.mark.parametrize(("seed", "num_peers"), THREADS)
def test_any_plan_gives_the_run_of_one_process(seed, num_peers):
    case = random_case(seed, num_peers, dropout=False)  # threads have one generator
    models = [case.model(case.build()) for _ in range(num_peers)]
    results = run_threads(num_peers, lambda carrier: train(case, carrier, models[carrier.rank]))
    for losses, layers in results:
        check(case, losses, layers)
    assert {index for _, layers in results for index in layers} == set(range(len(models[0])))


@pytest.mark.parametrize("world", WORLDS)
def test_processes_give_the_run_of_one(crew_of, world):
    with crew_of(world) as crew:
        crew.call("tests.stages.programs", "equal", WORLDS[world])


@pytest.mark.parametrize("world", [2, 3])
def test_a_group_for_each_direction(zygote, tmp_path, world):
    """As NCCL needs it, with gloo in its place; NCCL itself is in test_cuda.py."""
    with Crew(zygote, world) as crew:
        crew.call("tests.stages.programs", "enter", f"file://{tmp_path}/meeting", world)
        seeds = WORLDS[world][:20]
        for lines in crew.call("tests.stages.programs", "equal", seeds, lines=True).values():
            assert lines == list(permutations(range(world), 2))


def test_random_cases_are_of_all_kinds():
    """Otherwise the tests above would show less than they say."""
    kinds = set()
    for seed, num_peers in THREADS:
        case = random_case(seed, num_peers, dropout=False)
        modules, plan = case.build(), case.plan
        tied = len({*map(id, modules)}) < len(modules)
        kinds |= {("specs", case.as_specs), ("targets", case.targets, len(plan.stages) > 1)}
        if len(plan.peers) > 1:
            wide = any(len(stage.peers) > 1 for stage in plan.stages)
            kinds |= {("exact", case.exact), ("wide", wide), ("tied", tied, wide)}
            kinds |= {("exact and tied", case.exact and tied), plan.schedule}
            kinds.add(("exact", plan.schedule, case.exact))
    assert kinds >= {("exact", True), ("exact", False), ("wide", True), ("wide", False)}
    assert kinds >= {("tied", tied, wide) for tied in (False, True) for wide in (False, True)}
    assert kinds >= {("exact", name, True) for name in ("afab", "1f1b", "interleaved")}
    assert ("exact and tied", True) in kinds
    assert kinds >= {("specs", True), ("specs", False)}
    assert kinds >= {("targets", "first", True), ("targets", "last", True)}


@pytest.mark.parametrize(
    ("where", "least"),
    [
        ("threads", {"all": 60, "crosses": 45, "skips": 30, "looped": 10, "several": 8}),
        ("processes", {"all": 25, "crosses": 20, "skips": 12, "looped": 7, "several": 3}),
    ],
)
def test_so_many_cases_are_compared_to_the_bit(where, least):
    """Of those with several peers; of the last kind several stages take one variable."""
    if where == "threads":
        cases = [random_case(seed, num_peers, dropout=False) for seed, num_peers in THREADS]
    else:
        cases = [random_case(seed, world) for world in WORLDS for seed in WORLDS[world]]
    exact = [case.kinds | {"all"} for case in cases if case.exact and len(case.plan.peers) > 1]
    found = {kind: sum(kind in kinds for kinds in exact) for kind in least}
    assert all(found[kind] >= least[kind] for kind in least), found
