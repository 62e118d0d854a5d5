"""One peer on a GPU: random cases, against one process there."""

import json
import os
import sys

import torch
import torch.distributed as dist
from tests.stages.cases import alone, random_case
from torch.nn import functional as F

import manyhands  # noqa: F401  (the backend)
from manyhands.stages.pipeline import Pipeline


def on_gpu(case):
    batches = [
        (x.cuda(), y.cuda(), {name: t.cuda() for name, t in extra.items()} if extra else None)
        for x, y, extra in case.batches
    ]
    build = case.build
    return case._replace(
        build=lambda: [layer.cuda() for layer in build()], batches=batches, exact=False
    )


def main():
    where, world, rank = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if world > 1:
        backend = "gloo" if where.startswith("file:") else "manyhands"
        dist.init_process_group(backend, init_method=where, rank=rank, world_size=world)
    done = 0
    for seed in range(12):
        case = on_gpu(random_case(seed, world))
        losses, modules = alone(case)
        pipe = Pipeline(
            case.build(),
            case.plan,
            loss_fn=F.mse_loss,
            optimizer=case.optimizer,
            device="cuda",
            seed=case.seed,
            clip_norm=case.clip,
        )
        got = [pipe.step(x, y, extra) for x, y, extra in case.batches]
        torch.testing.assert_close(torch.tensor(got), torch.tensor(losses), rtol=1e-9, atol=1e-11)
        for layer in pipe.layers():
            for name, value in layer.module.state_dict().items():
                wanted = modules[layer.index].state_dict()[name]
                assert value.is_cuda
                torch.testing.assert_close(value, wanted, rtol=1e-9, atol=1e-11)
        done += 1
    print(json.dumps({"cases": done}), flush=True)
    if where.startswith("file:") and world > 1:
        os._exit(0)  # gloo aborts a process whose peers have ended first
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
