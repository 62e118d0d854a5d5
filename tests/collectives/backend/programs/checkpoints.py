"""torch.distributed.checkpoint: saved by some ranks, loaded by others."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.collectives.backend.programs.training import (
    STEPS,
    batch_of,
    check_close,
    loss_of,
    make_model,
    sgd,
    train_alone,
    whole_batch,
)


def _sharded(seed: int):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = fully_shard(make_model(seed), mesh=mesh)
    return model, sgd(model.parameters())


def _train(model, optimizer, steps) -> None:
    rank = dist.get_rank()
    for step in steps:
        inputs, labels = batch_of(rank, step)
        optimizer.zero_grad()
        loss_of(model(inputs), labels).backward()
        optimizer.step()


def save(folder: str, *, asynchronous: bool) -> None:
    model, optimizer = _sharded(7)
    _train(model, optimizer, range(2))
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "note": {"steps": 2}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        if asynchronous:
            dcp.async_save(state, checkpoint_id=folder).result()
        else:
            dcp.save(state, checkpoint_id=folder)


def load_and_go_on(folder: str, saved_by: int) -> None:
    """By any number of ranks: as if one process had gone on with their data."""
    num = dist.get_world_size()
    model, optimizer = _sharded(99)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "note": {"steps": 0}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(state, checkpoint_id=folder)
    assert state["note"]["steps"] == 2
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    _train(model, optimizer, range(2, STEPS))
    batches = [whole_batch(saved_by if step < 2 else num, step) for step in range(STEPS)]
    reference = train_alone(make_model(), batches)
    whole = make_model()
    with torch.no_grad():
        for target, source in zip(whole.parameters(), model.parameters(), strict=True):
            target.copy_(source.full_tensor())
    check_close(whole, reference, tolerance=1e-4)
