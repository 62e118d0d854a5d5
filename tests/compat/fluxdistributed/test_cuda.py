"""Replicas on a GPU: in step with each other and with a CPU, and out of its memory for real."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from manyhands.compat.fluxdistributed import prepare_training, train
from tests.compat.fluxdistributed.models import (
    CLASSES,
    FEATURES,
    SGD,
    close,
    data,
    mlp,
    quiet,
    same,
    trained,
)

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no GPU here: replicas on one are NOT tested"
    ),
    pytest.mark.usefixtures("started_gpu"),
]
GPU = "cuda:0"
FAR_TOO_MUCH = 1 << 50  # bytes


@pytest.mark.parametrize("devices", [[GPU], [GPU, GPU], ["cpu", GPU], [GPU, "cpu", GPU]])
def test_devices_with_a_part_of_the_rows_are_one_with_all_of_them(devices):
    one, _ = trained(mlp(), data(48), ["cpu"], 12, options={"cycles": 6})
    many, result = trained(mlp(), data(48), devices, 12 // len(devices), options={"cycles": 6})
    assert [model.state_dict()["0.weight"].device for model in many.models] == [
        torch.device(device) for device in devices
    ]
    first = many.models[0].cpu()
    assert all(same(model.cpu(), first) for model in many.models)
    close(first, one.models[0])
    assert all(p.device.type == "cpu" for _, model in result.models for p in model.parameters())


class Hungry(nn.Module):
    """Wants more memory than there is in the third forward of one replica."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES).double()
        self.hungry, self.count = False, 0

    def forward(self, x):
        self.count += 1
        if self.hungry and self.count == 3:
            torch.empty(FAR_TOO_MUCH, dtype=torch.uint8, device=x.device)
        return self.layer(x)


@pytest.mark.parametrize("on_oom", ["skip", "split"])
def test_out_of_its_memory(on_oom):
    setup, buffer = prepare_training(Hungry(), data(48), [GPU, GPU], SGD, 4, cycles=6)
    setup.models[1].hungry = True
    result = train(F.cross_entropy, setup, buffer, on_oom=on_oom, logger=quiet)
    assert (result.steps, result.skipped) == ((5, 1) if on_oom == "skip" else (6, 0))
    assert same(setup.models[0], setup.models[1])
