"""Random models on random plans give what one process gives: losses and all parameters."""

import pytest
from tests.stages.cases import random_case
from tests.stages.programs import check, train
from tests.stages.threads import run_threads


@pytest.mark.parametrize("seed", range(240))
def test_any_plan_gives_the_run_of_one_process(seed):
    num_peers = 1 + seed % 4
    case = random_case(seed, num_peers, dropout=False)  # threads have one generator
    models = [case.build() for _ in range(num_peers)]
    results = run_threads(num_peers, lambda carrier: train(case, carrier, models[carrier.rank]))
    for losses, layers in results:
        check(case, losses, layers)
    assert {index for _, layers in results for index in layers} == set(range(len(models[0])))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_processes_give_the_run_of_one(crew_of, world):
    with crew_of(world) as crew:
        crew.call("tests.stages.programs", "equal", range(1000 * world, 1000 * world + 30))
