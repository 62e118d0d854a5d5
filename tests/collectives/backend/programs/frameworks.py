"""Accelerate and Lightning Fabric: both take a process group that is there already."""

from __future__ import annotations

import os
import warnings

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from tests.collectives.backend.programs.training import (
    BATCH,
    STEPS,
    batch_of,
    check_close,
    digest,
    loss_of,
    make_model,
    sgd,
    train_alone,
    whole_batch,
)


def _as_launched() -> None:
    """The variables that a launcher sets; both look for them."""
    rank, num = dist.get_rank(), dist.get_world_size()
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num),
        "LOCAL_WORLD_SIZE": str(num),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "none",
    }


def _loader() -> DataLoader:
    """Samples in such an order that the n-th of each batch goes to the n-th rank."""
    num = dist.get_world_size()
    batches = [batch_of(rank, step) for step in range(STEPS) for rank in range(num)]
    inputs, labels = (torch.cat(column) for column in zip(*batches, strict=True))
    return DataLoader(TensorDataset(inputs, labels), batch_size=BATCH)


def _alone():
    num = dist.get_world_size()
    return train_alone(make_model(), (whole_batch(num, step) for step in range(STEPS)))


def accelerate() -> str:
    _as_launched()
    warnings.simplefilter("ignore")  # of other people's packages
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == dist.get_world_size()
    assert accelerator.process_index == dist.get_rank()
    model = make_model()
    wrapped, optimizer, loader = accelerator.prepare(model, sgd(model.parameters()), _loader())
    num_batches = 0
    for inputs, labels in loader:
        optimizer.zero_grad()
        accelerator.backward(loss_of(wrapped(inputs), labels))
        optimizer.step()
        num_batches += 1
    assert num_batches == STEPS
    check_close(accelerator.unwrap_model(wrapped), _alone())
    ranks = accelerator.gather(torch.tensor([dist.get_rank()]))
    assert ranks.tolist() == list(range(dist.get_world_size()))
    accelerator.wait_for_everyone()
    return digest(model)


def fabric() -> str:
    _as_launched()
    warnings.simplefilter("ignore")  # of other people's packages
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import TorchElasticEnvironment
    from lightning_fabric.strategies import DDPStrategy

    made = Fabric(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=DDPStrategy(process_group_backend="manyhands"),
        plugins=[TorchElasticEnvironment()],
    )
    made.launch()
    assert (made.global_rank, made.world_size) == (dist.get_rank(), dist.get_world_size())
    model = make_model()
    wrapped, optimizer = made.setup(model, sgd(model.parameters()))
    for step in range(STEPS):
        inputs, labels = batch_of(dist.get_rank(), step)
        optimizer.zero_grad()
        made.backward(loss_of(wrapped(inputs), labels))
        optimizer.step()
    check_close(model, _alone())
    gathered = made.all_gather(torch.tensor([float(dist.get_rank())]))
    assert gathered.flatten().tolist() == [float(r) for r in range(dist.get_world_size())]
    assert made.broadcast("said" if dist.get_rank() == 0 else None) == "said"
    made.barrier()
    return digest(model)
