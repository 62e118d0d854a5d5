"""One peer of torchft's DDP, for train.py.

    python benchmarks/torchft_trainer.py JOB

It runs the loop, the model, the samples, the order and the steps of the others, each peer a replica
group of one process, with torchft's own gloo process group, DistributedDataParallel and optimizer.
All begin with the same weights, so that none are sent (`init_sync`), and no step counts with fewer
than all: a turn with a step that was not committed is left out.
The first peer has the lighthouse, in its own process, so that `cpu` and the memory include it.

The first peer begins with a line for the others: where the lighthouse is. From there on the
protocol is that of foreign.py.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta

os.environ.setdefault("RUST_LOG", "error")  # torchft tells of every step, and that takes time

import torch
import torchft
from torch.utils.data import DataLoader
from torchft.coordination import LighthouseServer
from train import Job, Shares, Trainer, count_of, final, keep_heap, samples_of, smooth_model_of
from train import take_turn as turn_of

HERE = "127.0.0.1"
PATIENCE = timedelta(seconds=60)


class TorchftTrainer:
    """A loop, and the manager that its optimizer asks."""

    def __init__(self, job: Job, lighthouse: str) -> None:
        self._job = job
        self.module, width = smooth_model_of(job.millions)
        self._store = torch.distributed.TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
        sgd = torch.optim.SGD(self.module.parameters(), lr=0.05, momentum=0.9)
        self._manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(PATIENCE),
            load_state_dict=self._refuse_state,
            state_dict=lambda: {"model": self.module.state_dict(), "sgd": sgd.state_dict()},
            min_replica_size=job.size,
            init_sync=False,
            rank=0,
            world_size=1,
            store_addr=HERE,
            store_port=self._store.port,
            lighthouse_addr=lighthouse,
            hostname=HERE,
            replica_id=f"peer{job.rank}",
        )
        self._trainer = Trainer(
            self.module,
            torchft.DistributedDataParallel(self._manager, self.module),
            torchft.Optimizer(self._manager, sgd),
            DataLoader(samples_of(job, width), batch_sampler=Shares(job)),
            keep_heap(self.module),
        )

    def _refuse_state(self, state: object) -> None:
        """Who needs another's state has missed a step, and is out of this comparison."""
        raise RuntimeError("torchft wants to heal a peer that nobody has hurt")

    def take_turn(self) -> dict:
        """A turn like everybody's; `updates` are none if a step was not committed."""
        before = self._manager.current_step()
        answer = turn_of(self._trainer, self._job)
        made = self._manager.current_step() - before
        return answer | {"updates": made if made == self._job.steps else 0}


def main(job: Job) -> None:
    torch.set_num_threads(1)
    if job.rank == 0:
        server = LighthouseServer(bind=f"{HERE}:0", min_replicas=job.size)
        port = server.address().rsplit(":", 1)[1]  # the name of this machine may lead elsewhere
        first = {"lighthouse": f"http://{HERE}:{port}"}
        print(json.dumps(first), flush=True)
    else:
        first = json.loads(sys.stdin.readline())
    one = TorchftTrainer(job, first["lighthouse"])
    print(json.dumps({"parameters": count_of(one.module)}), flush=True)
    for line in sys.stdin:
        save_to = json.loads(line)["save_to"]
        print(json.dumps(one.take_turn() | final(one.module, job, save_to)), flush=True)
    os._exit(0)  # threads of torchft's may still ask a lighthouse that is gone


if __name__ == "__main__":
    main(Job(**json.loads(sys.argv[1])))
