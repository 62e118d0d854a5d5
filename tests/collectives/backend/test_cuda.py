"""CUDA tensors over the hub: two processes on one GPU. Skips, and says so, where there is none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from manyhands.links.hub import Hub

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: run this on a machine that has one"
)

PROGRAM = """
import json, sys, time, torch, torch.distributed as dist
import manyhands
from torch.nn.parallel import DistributedDataParallel
rank, world, url = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.cuda.set_device(0)
dist.init_process_group("manyhands", init_method=url, rank=rank, world_size=world)
device = torch.device("cuda", 0)
facts = {}

# Sums and transfers, of all kinds of memory.
for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64):
    for numel in (0, 1, 5000, 3_000_001):
        x = torch.arange(numel, device=device).remainder(50).to(dtype) + rank
        dist.all_reduce(x)
        given = torch.arange(numel).remainder(50)
        wanted = sum((given.to(dtype) + r).double() for r in range(world))
        assert torch.equal(x.cpu().double(), wanted), (dtype, numel)
x = torch.arange(24.0, device=device).view(4, 6).t()  # not contiguous
dist.broadcast(x, 0)
assert torch.equal(x.cpu(), torch.arange(24.0).view(4, 6).t())
outs = [torch.empty(70000, device=device) for _ in range(world)]
dist.all_gather(outs, torch.full((70000,), float(rank), device=device))
assert [float(o.max()) for o in outs] == [float(r) for r in range(world)]
if rank == 0:
    dist.send(torch.full((500_000,), 3.0, device=device), 1)
elif rank == 1:
    got = torch.empty(500_000, device=device)
    dist.recv(got, 0)
    assert bool((got == 3).all())

# Work that is still queued on the user's stream counts; what follows on it sees the result.
big = torch.randn(3000, 3000, device=device, generator=torch.Generator(device).manual_seed(1))
for _ in range(20):
    big = big @ big
    big /= big.abs().max()
mine = big.flatten()[:1_000_000].clone()
expected = mine * world
torch.cuda.set_sync_debug_mode("error")  # the call itself must not wait for the GPU
work = dist.all_reduce(mine, async_op=True)
torch.cuda.set_sync_debug_mode("default")
work.wait()
after = mine - expected  # queued behind the result, without a synchronisation in between
assert float(after.abs().max()) == 0.0

# DDP: the gradients of one process on the whole batch.
def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024), torch.nn.ReLU(),
        torch.nn.Linear(1024, 10)
    ).to(device).double()

def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8 * world, 64, generator=generator).double().to(device)

def train(model, share):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(6):
        optimizer.zero_grad()
        model(share(batch(step))).pow(2).mean().backward()
        optimizer.step()

def off(model):
    pairs = zip(model.parameters(), alone.parameters())
    return max(float((a - b).abs().max()) for a, b in pairs)

model, alone, coarse = make(), make(), make()
train(DistributedDataParallel(model, bucket_cap_mb=1), lambda x: x[rank::world])
train(alone, lambda x: x)
facts["off"] = off(model)
wrapped = DistributedDataParallel(coarse, bucket_cap_mb=1)
wrapped.register_comm_hook(None, manyhands.compressed("bf16"))
train(wrapped, lambda x: x[rank::world])
facts["off_bf16"] = off(coarse)
facts["sum_bf16"] = sum(float(p.abs().sum()) for p in coarse.parameters()).hex()

# How long a bucket takes from GPU to GPU.
x = torch.randn(2_000_000, device=device)
times = []
for _ in range(20):
    dist.barrier()
    torch.cuda.synchronize()
    start = time.perf_counter()
    dist.all_reduce(x)
    torch.cuda.synchronize()
    times.append(time.perf_counter() - start)
    x /= world
facts["ms_8_mb"] = 1e3 * sorted(times)[10]
dist.destroy_process_group()
print(json.dumps(facts))
"""


# A device that fails while values are on their way from it: what comes after it fails too.
BROKEN = """
import json, sys, time, torch, torch.distributed as dist
rank, world, url = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.cuda.set_device(0)
dist.init_process_group("manyhands", init_method=url, rank=rank, world_size=world)
x = torch.ones(1_000_000, device="cuda")
dist.all_reduce(x)
torch.cuda.synchronize()
if rank == 1:
    torch.zeros(3, device="cuda")[torch.tensor([7], device="cuda")]
start = time.perf_counter()
try:
    dist.all_reduce(x)
    torch.cuda.synchronize()
except RuntimeError as error:
    print(json.dumps({"text": str(error), "took_s": time.perf_counter() - start}))
"""


# A whole step of DDP asks nothing of the CPU: whatever of torch waits for the GPU raises. The mode
# holds for all threads, also those that copy results back. It does not see a wait for an event: our
# code has one, for a bucket to be in pinned memory before it leaves, and that is on a thread which
# nobody else needs.
STEP = """
import json, sys, threading, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
rank, world, url = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.cuda.set_device(0)
dist.init_process_group("manyhands", init_method=url, rank=rank, world_size=world)
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(64, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024), torch.nn.ReLU(),
    torch.nn.Linear(1024, 10)
).cuda()
wrapped = DistributedDataParallel(model, bucket_cap_mb=1)
optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(rank)).cuda()
losses = []

def step():
    optimizer.zero_grad()
    loss = wrapped(inputs).pow(2).mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())

for _ in range(12):  # after the first, buckets are made anew; in ten, DDP takes times of its own
    step()
torch.cuda.synchronize()

waited, synchronize = [], torch.cuda.Event.synchronize

def watched(event):
    waited.append(threading.current_thread().name)
    synchronize(event)

torch.cuda.Event.synchronize = watched
torch.cuda.set_sync_debug_mode("error")
for _ in range(5):
    step()
try:
    losses[-1].item()
    caught = ""
except RuntimeError as error:
    caught = str(error)
torch.cuda.set_sync_debug_mode("default")
torch.cuda.Event.synchronize = synchronize
facts = {"caught": caught, "waited": waited, "losses": [loss.item() for loss in losses]}
total = torch.stack([p.double().abs().sum() for p in model.parameters()]).sum()
facts["sum"] = total.item().hex()
dist.destroy_process_group()
print(json.dumps(facts))
"""

# A rank that dies in the middle of a backward pass, between buckets.
KILLED = """
import json, os, signal, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
rank, world, url = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.cuda.set_device(0)
dist.init_process_group("manyhands", init_method=url, rank=rank, world_size=world)
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(64, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024), torch.nn.ReLU(),
    torch.nn.Linear(1024, 10)
).cuda()
wrapped = DistributedDataParallel(model, bucket_cap_mb=1)
inputs = torch.randn(16, 64, device="cuda")

def die(_):
    torch.cuda.synchronize()  # its copies are under way
    os.kill(os.getpid(), signal.SIGKILL)

for step in range(100):
    if step == 3:  # else sums that it owes of the last step may die with it
        dist.send(torch.ones(1), 1) if rank == 0 else dist.recv(torch.ones(1), 0)
    if rank == 1 and step == 3:
        model[0].weight.register_hook(die)
    try:
        wrapped(inputs).pow(2).mean().backward()
    except RuntimeError as error:
        print(json.dumps({"text": str(error), "step": step}))
        break
"""


def run_two(program: str, folder) -> list[tuple[int, dict, str]]:
    """As two ranks, over a hub: how each has ended, the facts it printed, its errors."""
    (folder / "program.py").write_text(program)
    with Hub("127.0.0.1:0", insecure=True) as hub:
        url = f"hub://127.0.0.1:{hub.address.port}/cuda?insecure=1"
        ranks = [
            subprocess.Popen(
                [sys.executable, str(folder / "program.py"), str(rank), "2", url],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")},
            )
            for rank in range(2)
        ]
        try:
            said = [process.communicate(timeout=110) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    return [
        (process.returncode, json.loads((stdout.splitlines() or ["{}"])[-1]), stderr)
        for process, (stdout, stderr) in zip(ranks, said, strict=True)
    ]


def test_two_processes_on_one_gpu(tmp_path):
    ends = run_two(PROGRAM, tmp_path)
    for status, _, stderr in ends:
        assert status == 0, stderr
    facts = [fact for _, fact, _ in ends]
    print(facts)
    assert all(fact["off"] < 1e-12 for fact in facts), facts
    assert all(1e-12 < fact["off_bf16"] < 1e-2 for fact in facts), facts
    assert len({fact["sum_bf16"] for fact in facts}) == 1, facts


def test_a_device_that_fails_is_an_error_on_the_other_rank(tmp_path):
    """How a process with a broken device ends is CUDA's affair."""
    (status, fact, stderr), (_, broken, broken_stderr) = run_two(BROKEN, tmp_path)
    assert status == 0, stderr
    print(fact, broken)
    assert "assert" in broken["text"], broken_stderr
    assert "rank 1 (rank-1" in fact["text"]
    assert "gave up: `all_reduce` failed on rank 1: " in fact["text"]
    assert fact["took_s"] < 10.0


def test_a_step_of_ddp_waits_for_the_gpu_nowhere(tmp_path):
    ends = run_two(STEP, tmp_path)
    for status, _, stderr in ends:
        assert status == 0, stderr
    facts = [fact for _, fact, _ in ends]
    print(facts)
    for fact in facts:
        assert "synchroniz" in fact["caught"]  # the mode would have said so
        assert fact["waited"]
        assert all(name.startswith("complete ") for name in fact["waited"]), fact["waited"]
        assert fact["losses"][-1] < fact["losses"][0]
    assert facts[0]["sum"] == facts[1]["sum"]


def test_killed_in_a_backward_pass(tmp_path):
    (status, fact, stderr), (victim, _, _) = run_two(KILLED, tmp_path)
    assert victim == -signal.SIGKILL
    assert status == 0, stderr
    print(fact)
    assert fact["step"] == 3, fact
    assert "rank 1 (rank-1" in fact["text"]
    assert "`all_reduce float32[" in fact["text"]
