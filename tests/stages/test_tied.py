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


@pytest.mark.parametrize("peers", [[0, 1], [0, 0]])
def test_statistics_without_parameters_are_shared_by_places_on_the_same_peers_only(peers):
    """A norm at two places sees two batches a step; apart, each would see one."""
    first, second = peers
    plan = mh.Plan.of_stages([(1, [first]), (1, [1]), (1, [second])])
    models = []
    for _ in plan.peers:
        norm = nn.BatchNorm1d(4, affine=False).double()
        models.append([nn.Sequential(norm), nn.Linear(4, 4).double(), nn.Sequential(norm)])

    def train(carrier):
        options = {"loss_fn": F.mse_loss, "optimizer": torch.optim.SGD, "group": carrier}
        return mh.Pipeline(models[carrier.rank], plan, **options).step(X, Y)

    if first == second:
        run_threads(2, train)
        assert models[0][0][0].num_batches_tracked == 2
    else:
        said = r"layer 2 \(2\) shares its 0.running_mean with layer 0 \(0\), and .* different peers"
        with pytest.raises(mh.PlanError, match=said):
            run_threads(2, train)


def test_constants_may_be_shared_by_any_peers():
    class Adds(nn.Module):
        def __init__(self, table):
            super().__init__()
            self.register_buffer("table", table)

        def forward(self, x):
            return x + self.table

    plan = mh.Plan.of_stages([(2, [0]), (1, [1])])
    table = torch.ones(4, dtype=torch.float64)

    def predict(carrier):
        model = [Adds(table), nn.Identity(), Adds(table)]
        return mh.Pipeline(model, plan, group=carrier).predict(X)

    assert torch.equal(run_threads(2, predict)[1], X + 1 + 1)
