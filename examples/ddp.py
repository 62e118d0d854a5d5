"""Plain DistributedDataParallel between machines that can only dial out; handwritten digits.

    python examples/ddp.py                     one process
    manyhands run -n 3 examples/ddp.py         three, through a hub that the launcher brings along

Nothing but init_process_group knows of manyhands. Each step is one over the whole batch, so that
the digits are read as well as after training in one process. Needs scikit-learn.
"""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH, EPOCHS, TESTED = 96, 30, 360

if "MANYHANDS_URL" in os.environ:  # `manyhands run` says where the peers meet
    dist.init_process_group("manyhands", init_method=os.environ["MANYHANDS_URL"])
together = dist.is_initialized()
rank, size = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
if BATCH % size:
    raise SystemExit(f"a batch of {BATCH} cannot be shared out evenly among {size}")

images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
images, labels = images[order].float() / 16, labels[order]

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
model = DistributedDataParallel(net) if together else net
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for epoch in range(EPOCHS):
    shuffled = torch.randperm(
        len(labels) - TESTED, generator=torch.Generator().manual_seed(1 + epoch)
    )
    for batch in shuffled.split(BATCH):
        if len(batch) == BATCH:
            mine = TESTED + batch[rank::size]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[mine]), labels[mine]).backward()
            optimizer.step()

if rank == 0:
    right = int((net(images[:TESTED]).argmax(1) == labels[:TESTED]).sum())
    length = sum(p.double().pow(2).sum() for p in net.parameters()).sqrt()
    print(f"{right} of {TESTED} unseen digits right; the parameters' length is {length:.4f}")
if together:
    dist.destroy_process_group()
