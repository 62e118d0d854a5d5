"""A user's program: run as it is, by python or by torchrun."""

from __future__ import annotations

import os
import sys
import warnings

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

how, url = sys.argv[1:3]
if how == "before":
    import manyhands
import torch  # noqa: E402  (the order is what is tested)
import torch.distributed as dist  # noqa: E402

if how in ("after", "no autoload"):
    import manyhands  # noqa: F401

torch.set_num_threads(1)
dist.init_process_group("manyhands", init_method=url)
total = torch.full((20_000,), float(dist.get_rank() + 1))
dist.all_reduce(total)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
model(torch.ones(2, 4)).sum().backward()
# One write, and short: lines of several processes do not mix.
os.write(1, f"{how} {dist.get_rank()}/{dist.get_world_size()} {total[0].item():g}\n".encode())
if how == "raise" and dist.get_rank() == 1:
    raise ValueError("a mistake of rank 1")
if how == "raise":
    dist.barrier()
if how == "fork":
    child = os.fork() if dist.get_rank() == 0 else None
    if child == 0:
        sys.exit(0)
    if child is not None:
        assert os.waitpid(child, 0)[1] == 0
    for _ in range(3):
        dist.all_reduce(total)
if how in ("before", "fork", "torchrun"):
    dist.destroy_process_group()
# The others end without it, one of them in the middle of an operation.
elif how == "after":
    dist.irecv(torch.empty(1), tag=3)
