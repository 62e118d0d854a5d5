"""A layer that stands at several places of the model."""

import pytest
import torch
from tests.stages.threads import run_threads
from torch import nn
from torch.nn import functional as F

import manyhands as mh

X, Y = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)


def losses(plan):
    models = []
    for _ in plan.peers:
        torch.manual_seed(0)
        first, second = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        models.append([first, second, first])

    def train(carrier):
        with mh.Pipeline(
            models[carrier.rank],
            plan,
            loss_fn=F.mse_loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            group=carrier,
        ) as pipe:
            return [pipe.step(X, Y) for _ in range(3)]

    return run_threads(len(plan.peers), train)


@pytest.mark.parametrize(
    "stages",
    [
        [(1, [0]), (1, [1]), (1, [0])],
        [(3, [0, 1])],
        [(1, [0, 1]), (1, [0]), (1, [0, 1])],  # one parameter in two stages that each add up
        [(1, [0, 1], [3, 1]), (1, [1]), (1, [0, 1], [3, 1])],
    ],
)
def test_a_layer_at_two_places_learns_from_both_once(stages):
    (alone,) = losses(mh.Plan.even(3, 1))
    for found in losses(mh.Plan.of_stages(stages, microbatches=2)):
        assert found == pytest.approx(alone, rel=1e-12)


def test_a_layer_at_places_on_different_peers_is_refused():
    for stages in ([(2, [0]), (1, [1])], [(2, [0, 1]), (1, [0, 1], [3, 1])]):
        with pytest.raises(mh.PlanError, match=r"layer 2 \(2\) shares its weight with layer 0"):
            losses(mh.Plan.of_stages(stages))
