"""A user's program: trains by a plan for as many peers as there are, from what is saved."""

import os
import signal
import sys
import warnings

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from tests.stages.deaths import adam, batches, layers  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import manyhands as mh  # noqa: E402

torch.set_num_threads(1)
dist.init_process_group("manyhands", init_method=os.environ["MANYHANDS_URL"])
peers = range(dist.get_world_size())
plan = mh.Plan.of_stages([(6 // len(peers), [peer]) for peer in peers], microbatches=2)
with mh.Pipeline(layers(), plan, loss_fn=F.mse_loss, optimizer=adam) as pipe:
    pipe.load(sys.argv[1])
    while (number := pipe.num_steps) < len(batches()):
        if os.environ.get("DIES") == f"{pipe.me} at {number}":
            os.kill(os.getpid(), signal.SIGKILL)
        x, y, _ = batches()[number]
        print("loss", number, pipe.step(x, y).hex())
        if pipe.num_steps % 2 == 0:
            pipe.save(sys.argv[1])
dist.destroy_process_group()
