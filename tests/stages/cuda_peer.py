"""One peer on a GPU: random cases, against one process there, and what is saved of them."""

import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from tests.stages.cases import alone, random_case
from torch.nn import functional as F

import manyhands  # noqa: F401  (the backend)
from manyhands.stages.pipeline import Pipeline

NUM_CASES = 12
NCCL_S = 60.0  # that a rank waits for another; torch's 10 minutes would outlast the test


def on_gpu(case):
    batches = [
        (x.cuda(), y.cuda(), {name: t.cuda() for name, t in extra.items()} if extra else None)
        for x, y, extra in case.batches
    ]
    build = case.build
    return case._replace(
        build=lambda: [layer.cuda() for layer in build()], batches=batches, exact=False
    )


def pipeline_of(case):
    return Pipeline(
        case.build(),
        case.plan,
        loss_fn=F.mse_loss,
        optimizer=case.optimizer,
        device="cuda",
        seed=case.seed,
        clip_norm=case.clip,
    )


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


def check(case, folder):
    losses, modules = alone(case)
    pipe = pipeline_of(case)
    *before, last = case.batches
    got = [pipe.step(*batch) for batch in before]
    pipe.save(folder)
    other = pipeline_of(case)
    assert other.load(folder) == {}
    for one in (pipe, other):  # it goes on, whether it was saved or loaded
        close(torch.tensor([*got, one.step(*last)]), torch.tensor(losses))
        for layer in one.layers():
            for name, value in layer.module.state_dict().items():
                assert value.is_cuda
                close(value, modules[layer.index].state_dict()[name])


def main():
    backend, where, folder, world, rank = *sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5])
    limit = {"timeout": timedelta(seconds=NCCL_S)} if backend == "nccl" else {}
    dist.init_process_group(backend, init_method=where, rank=rank, world_size=world, **limit)
    assert dist.get_backend() == backend
    for seed in range(NUM_CASES):
        check(on_gpu(random_case(seed, world)), f"{folder}/{seed}")
    print(json.dumps({"cases": NUM_CASES}), flush=True)
    if backend == "gloo":
        os._exit(0)  # gloo aborts a process whose peers have ended first
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
