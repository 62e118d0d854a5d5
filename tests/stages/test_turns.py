"""A pipeline that begins and ends at one peer, as a boss's does, costs what it costs without it."""

import pytest
import torch
from tests.stages.threads import run_threads
from torch import nn
from torch.nn import functional as F

from manyhands.core.plan import Plan
from manyhands.stages.pipeline import Pipeline
from manyhands.stages.schedule import Action, orders_of, play


def turning(num_others, microbatches):
    others = [(1, [peer]) for peer in range(1, num_others + 1)]
    return Plan.of_stages([(1, [0]), *others, (1, [0])], microbatches=microbatches)


@pytest.mark.parametrize("num_others", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 5, 8, 16])
def test_no_other_peer_waits_for_the_one_at_both_ends(num_others, microbatches):
    plan = turning(num_others, microbatches)
    orders = orders_of(plan)
    for peer, order in orders.items():
        stages = [stage.index for stage in plan.stages_of(peer)]
        for stage in stages:
            for way in "FB":
                wanted = [Action(way, stage, m) for m in range(microbatches)]
                assert [a for a in order if (a.stage, a.direction) == (stage, way)] == wanted
        assert len(order) == 2 * microbatches * len(stages)
    times = [1e-6, *[1.0] * num_others, 1e-6]
    played = play(orders, plan.stages, forward=times, backward=times)
    assert not played.stuck
    # As 1F1B of the others alone, and with as little in memory, but for one microbatch on its way.
    assert played.length == pytest.approx(2 * (microbatches + num_others - 1), abs=1e-3)
    for peer in range(1, num_others + 1):
        assert played.most_held(peer) <= min(microbatches, num_others - peer + 2)


@pytest.mark.parametrize("rounds", [2, 3])
@pytest.mark.parametrize("num_others", [2, 3, 4])
def test_nor_when_they_are_interleaved(num_others, rounds):
    """Backwards may take twice as long, too, as they mostly do."""
    others = [(1, [peer]) for peer in range(num_others)] * rounds
    around = [(1, [0]), *((size, [peer + 1]) for size, (peer,) in others), (1, [0])]
    for microbatches in (1, 2, 3, 4, 5, 8, 16):
        how = {"microbatches": microbatches, "schedule": "interleaved"}
        plan, alone = Plan.of_stages(around, **how), Plan.of_stages(others, **how)
        orders, wanted = orders_of(plan), orders_of(alone)
        for peer, order in wanted.items():
            assert orders[peer + 1] == tuple(a._replace(stage=a.stage + 1) for a in order)
        for backward in (0.5, 1.0, 2.0):
            times = [[1e-6, *[time] * len(others), 1e-6] for time in (1.0, backward)]
            played = play(orders, plan.stages, forward=times[0], backward=times[1])
            assert not played.stuck
            best = play(wanted, alone.stages, backward=backward).length
            assert played.length == pytest.approx(best, abs=1e-3)


def test_it_gives_the_run_of_one_process():
    torch.manual_seed(3)
    plan = turning(3, 5)
    x, y = torch.randn(10, 4), torch.randn(10, 4)

    def layers():
        torch.manual_seed(4)
        return [nn.Linear(4, 4) for _ in range(5)]

    models = [layers() for _ in range(4)]
    alone = nn.Sequential(*layers())
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        F.mse_loss(alone(x), y).backward()
        optimizer.step()

    def train(carrier):
        pipe = Pipeline(
            models[carrier.rank],
            plan,
            loss_fn=F.mse_loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            group=carrier,
        )
        for _ in range(3):
            pipe.step(x, y)
        return {layer.index: layer.module.state_dict() for layer in pipe.layers()}

    found = {index: state for part in run_threads(4, train) for index, state in part.items()}
    assert set(found) == set(range(5))
    for index, state in found.items():
        for name, wanted in alone[index].state_dict().items():
            torch.testing.assert_close(state[name], wanted)
