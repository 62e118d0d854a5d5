"""One peer of hivemind.Optimizer, for train.py.

    python benchmarks/hivemind_trainer.py JOB

It runs the loop, the model, the samples and the order of the others, with `target_batch_size` as
the global batch and each peer's share of it a step: synchronous training, hivemind's default. What
it waits for is as short as in hivemind's own tests, and parameters, which do not differ as long as
all is well, are not averaged besides the gradients.

A step of the benchmark is an update with the gradients of all peers. Those that hivemind makes with
fewer, when it has found no group, take their time and do not count; a turn of nothing else is left
out. It may take in more samples than the global batch before an update, because peers go on while
they learn of each other's progress: `samples_taken` says how many; `samples_per_s` counts the
global batch, as for all others.
`cpu` and the memory are of this process and of hivemind's own.

The first peer begins with a line for the others: where its DHT is. Each says when a few updates
are made; from there on the protocol is that of foreign.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import psutil
from harness import cpu_of, forget_peaks, memory_of, peaks_of
from train import Job, Shares, Trainer, count_of, final, keep_heap, samples_of, smooth_model_of

os.environ.setdefault("HIVEMIND_LOGLEVEL", "CRITICAL")  # an averaging that fails is its own matter

import hivemind
import torch
from hivemind.optim.grad_averager import GradientAverager
from torch.utils.data import DataLoader

STEPS = 3  # of a turn: each takes seconds
LONELY_S = 0.3


class Trained(NamedTuple):
    """Updates of all peers together, and samples that this one took in."""

    updates: int
    samples: int


class HivemindTrainer:
    """An optimizer and the processes that it is made of."""

    def __init__(self, job: Job, initial_peers: list[str] | None) -> None:
        self._job = job
        self.dht = hivemind.DHT(
            initial_peers=initial_peers, host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True
        )
        self.module, width = smooth_model_of(job.millions)
        self._optimizer = hivemind.Optimizer(
            dht=self.dht,
            run_id="bench",
            target_batch_size=job.batch,
            batch_size_per_step=job.batch // job.size,
            optimizer=torch.optim.SGD(self.module.parameters(), lr=0.05, momentum=0.9),
            matchmaking_time=1.0,
            averaging_timeout=10.0,
            average_state_every=1 << 30,
            averager_opts={"request_timeout": 0.5},
            grad_averager_factory=partial(GradientAverager, request_timeout=0.5),
            tracker_opts={"min_refresh_period": 0.1, "max_refresh_period": 1.0},
        )
        loader = DataLoader(samples_of(job, width), batch_sampler=Shares(job))
        heap_kept = keep_heap(self.module)
        self._trainer = Trainer(self.module, self.module, self._optimizer, loader, heap_kept)
        self._steps = self._endless()
        me = psutil.Process()
        self.pids = [me.pid, *(child.pid for child in me.children(recursive=True))]

    def _endless(self) -> Iterator[None]:
        while True:
            yield from self._trainer.epoch()

    def gather(self) -> None:
        """A few updates, by which all have seen each other."""
        self._end = STEPS
        self._train_until(self._end)

    def take_turn(self) -> dict:
        """A few updates."""
        forget_peaks(self.pids)
        base = sum(memory_of(pid, "VmRSS") for pid in self.pids)
        cpu, start = cpu_of(self.pids), time.perf_counter()
        self._end += STEPS
        updates, taken = self._train_until(self._end)
        seconds, peak = time.perf_counter() - start, peaks_of(self.pids)
        cpu, counted = cpu_of(self.pids) - cpu, max(1, updates)
        return {
            "updates": updates,
            "step_s": seconds / counted,
            "cpu": cpu / counted,
            "sent": None,  # hivemind does not count
            "taken": taken / counted,
            "peak": peak,
            "extra": max(0, peak - base),
            "heap_kept": self._trainer.heap_kept,
        }

    def _train_until(self, epoch: int) -> Trained:
        """An epoch of hivemind's is an update. Whoever lags takes over the others' state and epoch:
        by that all end a turn, whatever goes wrong in it.
        """
        updates, taken, at = 0, 0, self._optimizer.local_epoch
        while at < epoch:
            next(self._steps)
            taken += self._job.batch // self._job.size
            if self._optimizer.local_epoch > at:
                at = self._optimizer.local_epoch
                updates += self._was_together()
            if self._optimizer.tracker.global_progress.num_peers < self._job.size:
                time.sleep(LONELY_S)  # whoever sees nobody goes on alone, and fast
        return Trained(updates, taken)

    def _was_together(self) -> bool:
        averaging = self._optimizer.scheduled_grads
        if averaging is None or not averaging.done() or averaging.cancelled():
            return False
        return averaging.exception() is None and len(averaging.result()) == self._job.size

    def close(self) -> None:
        """End hivemind's processes, which otherwise outlive this one."""
        self._optimizer.shutdown()
        self.dht.shutdown()
        for pid in self.pids[1:]:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()


def main(job: Job) -> None:
    torch.set_num_threads(1)
    first = None if job.rank == 0 else json.loads(sys.stdin.readline())
    one = HivemindTrainer(job, None if first is None else first["peers"])
    try:
        if first is None:
            places = [str(place) for place in one.dht.get_visible_maddrs()]
            print(json.dumps({"peers": places}), flush=True)
        one.gather()
        print(json.dumps({"parameters": count_of(one.module)}), flush=True)
        for line in sys.stdin:
            save_to = json.loads(line)["save_to"]
            print(json.dumps(one.take_turn() | final(one.module, job, save_to)), flush=True)
    finally:
        one.close()
    os._exit(0)  # threads of hivemind's may still wait for processes that are gone


if __name__ == "__main__":
    main(Job(**json.loads(sys.argv[1])))
