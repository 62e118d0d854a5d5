"""What the processes of a crew do in these tests."""

import os

import pytest
import torch
import torch.distributed as dist
from tests.collectives.backend.programs import life
from tests.stages.cases import alone, random_case
from torch.nn import functional as F

from manyhands.stages.carrier import GroupCarrier
from manyhands.stages.pipeline import Pipeline

LEASE_S = 60.0  # nobody is to be out whom a busy machine keeps waiting


def enter(url, world):
    rank = int(os.environ["CREW_RANK"])
    if url.startswith("file:"):
        dist.init_process_group("gloo", init_method=url, rank=rank, world_size=world)
    else:
        life.join(url=url, world=world, lease_s=LEASE_S)


def train(case, group=None, modules=None):
    """Losses of each step, and the states of this peer's layers by index."""
    with Pipeline(
        modules or case.model(),
        case.plan,
        loss_fn=F.mse_loss,
        optimizer=case.optimizer,
        group=group,
        targets=case.targets,
        seed=case.seed,
        clip_norm=case.clip,
    ) as pipe:
        losses = [pipe.step(x, y, extra) for x, y, extra in case.batches]
        return losses, {layer.index: layer.module.state_dict() for layer in pipe.layers()}


def check(case, losses, layers):
    """Against one process."""
    wanted_losses, modules = alone(case)
    assert losses == pytest.approx(wanted_losses, rel=1e-11, abs=1e-13)
    for index, state in layers.items():
        for name, wanted in modules[index].state_dict().items():
            if case.exact:
                assert torch.equal(state[name], wanted), (index, name)
            torch.testing.assert_close(state[name], wanted, rtol=1e-9, atol=1e-11)


def equal(seeds, lines=False):
    """Random cases on all peers of the group; with lines, the pairs of peers that got one."""
    cpu = torch.device("cpu")
    carrier = GroupCarrier(dist.group.WORLD, cpu, lines=True) if lines else None
    for seed in seeds:
        case = random_case(seed, dist.get_world_size())
        try:
            check(case, *train(case, carrier))
        except Exception as error:
            error.add_note(f"seed {seed}\n{case.plan.picture()}")
            raise
    return sorted(carrier._lines) if lines else None
