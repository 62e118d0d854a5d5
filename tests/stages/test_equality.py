"""Random models on random plans give what one process gives: losses and all parameters."""

import pytest
import torch
from tests.stages.cases import alone, random_case
from tests.stages.threads import run_threads
from torch.nn import functional as F

from manyhands.stages.pipeline import Pipeline


def train(case, carrier, modules=None):
    with Pipeline(
        modules or case.build(),
        case.plan,
        loss_fn=F.mse_loss,
        optimizer=case.optimizer,
        group=carrier,
        seed=case.seed,
        clip_norm=case.clip,
    ) as pipe:
        losses = [pipe.step(x, y, extra) for x, y, extra in case.batches]
        return losses, {layer.index: layer.module.state_dict() for layer in pipe.layers()}


def check(case, results):
    losses, modules = alone(case)
    seen = set()
    for got, layers in results:
        assert got == pytest.approx(losses, rel=1e-11, abs=1e-13)
        for index, state in layers.items():
            seen.add(index)
            for name, wanted in modules[index].state_dict().items():
                if case.exact:
                    assert torch.equal(state[name], wanted), (index, name)
                torch.testing.assert_close(state[name], wanted, rtol=1e-9, atol=1e-11)
    assert seen == set(range(len(modules)))


@pytest.mark.parametrize("seed", range(250))
def test_any_plan_gives_the_run_of_one_process(seed):
    num_peers = 1 + seed % 4
    case = random_case(seed, num_peers, dropout=False)  # threads have one generator
    models = [case.build() for _ in range(num_peers)]
    check(case, run_threads(num_peers, lambda carrier: train(case, carrier, models[carrier.rank])))
