"""One peer of hivemind's averager, for allreduce.py.

    python benchmarks/hivemind_peer.py RANK SIZE NUMEL PORT

Only the all-reduce is timed, from the permission to start it until its result is in the tensor:
the group is found before that, which takes hivemind a second or more. Nothing is compressed, all
traffic is on loopback, and a group counts only if everybody is in it; an attempt that fails is
repeated, and said on standard error. `cpu` and `extra` are of this process and of hivemind's own
(its DHT, its averager, its daemon). `sent` is the loopback interface's traffic divided by the
peers, headers and acknowledgements included, for hivemind counts none: only on a quiet machine it
is theirs alone.

Rank 0 begins with a line for the others: where its DHT is, and the port of the barriers (PORT). The
others read it; each says when it is ready. From there on the protocol is that of allreduce.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

import psutil
from allreduce import CHECKED, WARM_UP, have_the_mean, picked
from harness import cpu_of, forget_peaks, memory_of, peaks_of

os.environ.setdefault("HIVEMIND_LOGLEVEL", "CRITICAL")  # what fails is told and repeated here

import hivemind
import torch
import torch.distributed as dist
from hivemind.averaging.control import AveragingStage, StepControl

ATTEMPTS = 10  # of finding a group and averaging in it
GROUP_S = 20.0  # for finding it
AVERAGE_S = 60.0


class Took(NamedTuple):
    """What an all-reduce took: seconds, CPU seconds of this peer, bytes of all peers. `averaged`:
    whether they had the mean then, for hivemind's own word that they do is not always true.
    """

    seconds: float
    cpu: float
    sent: int
    averaged: bool


class HivemindPeer:
    """An averager and the processes that it is made of."""

    def __init__(self, size: int, numel: int, initial_peers: list[str] | None) -> None:
        self._size = size
        self.dht = hivemind.DHT(
            initial_peers=initial_peers, host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True
        )
        self.tensor = torch.zeros(numel)
        # Times for finding a group are as short as in hivemind's own tests; they are not measured.
        self._averager = hivemind.DecentralizedAverager(
            [self.tensor],
            self.dht,
            prefix="bench",
            target_group_size=size,
            min_group_size=size,
            min_matchmaking_time=1.0,
            request_timeout=0.5,
            start=True,
        )
        me = psutil.Process()
        self.pids = [me.pid, *(child.pid for child in me.children(recursive=True))]

    def average(self, seed: int) -> Took:
        """Average normal numbers of this seed; all peers call this together."""
        for _ in range(ATTEMPTS):
            with self._averager.get_tensors() as (tensor,):
                tensor.normal_(generator=torch.Generator().manual_seed(seed))
                given = picked(tensor)
            step = self._averager.step(
                wait=False, require_trigger=True, allow_retries=False, timeout=GROUP_S
            )
            if not agreed(self._found_group(step)):
                step.cancel()
                continue
            cpu, sent = cpu_of(self.pids), loopback_bytes()
            start = time.perf_counter()
            done = self._average_in(step)
            seconds = time.perf_counter() - start
            cpu = cpu_of(self.pids) - cpu
            sent = loopback_bytes() - sent
            if agreed(done):
                return Took(seconds, cpu, sent, have_the_mean(given, picked(self.tensor)))
        raise RuntimeError(f"hivemind failed to average {ATTEMPTS} times in a row")

    def _found_group(self, step: StepControl) -> bool:
        while not step.done() and step.stage is not AveragingStage.AWAITING_TRIGGER:
            time.sleep(0.002)
        return not step.done()

    def _average_in(self, step: StepControl) -> bool:
        step.allow_allreduce()
        try:
            return len(step.result(AVERAGE_S)) == self._size
        except Exception as error:  # noqa: BLE001  whatever hivemind raises
            print(f"an averaging of hivemind failed and is repeated: {error!r}", file=sys.stderr)
            return False

    def memory(self) -> int:
        """Resident in all processes; the averager has the tensor mapped, touched or not."""
        untouched = max(0, self.tensor.nbytes - memory_of(self._averager.pid, "RssShmem"))
        return sum(memory_of(pid, "VmRSS") for pid in self.pids) + untouched

    def close(self) -> None:
        """End hivemind's processes, which otherwise outlive this one."""
        self._averager.shutdown()
        self.dht.shutdown()
        for pid in self.pids[1:]:
            if psutil.pid_exists(pid):
                psutil.Process(pid).kill()


def agreed(yes: bool) -> bool:
    """Whether all peers say yes. A barrier, too."""
    said = torch.tensor([int(yes)])
    dist.all_reduce(said, dist.ReduceOp.MIN)
    return bool(said)


def loopback_bytes() -> int:
    """All that the loopback interface has carried."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    words = next(line for line in lines if line.strip().startswith("lo:")).split(":")[1].split()
    return int(words[8])


def take_turn(one: HivemindPeer, rounds: int, rank: int, size: int, numel: int) -> dict:
    """The same as allreduce.py's, with what hivemind needs around each round."""
    took: list[Took] = []
    base = 0
    for n in range(WARM_UP + rounds):
        if n == 0:
            one.tensor.normal_()
            forget_peaks(one.pids)
            base = one.memory()
        took.append(one.average(1000 * n + rank))
    took = took[WARM_UP:]
    extra = max(0, peaks_of(one.pids) - base)
    identical, error = True, 0.0
    for n in range(CHECKED):
        mean = torch.zeros(numel, dtype=torch.float64)
        for r in range(size):
            mean += torch.empty(numel).normal_(generator=torch.Generator().manual_seed(77 + n + r))
        one.average(77 + n + rank)
        error = max(error, float((one.tensor - mean / size).abs().max()))
        digest = hashlib.sha256(one.tensor.numpy().tobytes()).digest()
        said = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        everybody = [torch.empty_like(said) for _ in range(size)]
        dist.all_gather(everybody, said)
        identical &= all(torch.equal(said, other) for other in everybody)
    return {
        "times": [t.seconds for t in took],
        "averaged": [t.averaged for t in took],
        "cpu": sum(t.cpu for t in took),
        "sent": sum(t.sent for t in took) / rounds / size,
        "identical": identical,
        "error": error,
        "extra": extra,
    }


def main(rank: int, size: int, numel: int, port: int) -> None:
    torch.set_num_threads(1)
    first = None if rank == 0 else json.loads(sys.stdin.readline())
    # hivemind forks: that is before gloo has threads.
    one = HivemindPeer(size, numel, None if first is None else first["peers"])
    if first is None:
        first = {"peers": [str(place) for place in one.dht.get_visible_maddrs()], "port": port}
        print(json.dumps(first), flush=True)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{first['port']}", rank=rank, world_size=size
    )
    print(json.dumps({"ready": True}), flush=True)
    try:
        for line in sys.stdin:
            rounds = json.loads(line)["rounds"]
            print(json.dumps(take_turn(one, rounds, rank, size, numel)), flush=True)
    finally:
        one.close()
    os._exit(0)  # gloo aborts a process whose peers have ended first


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))
