"""What a step frees is there for the next one, without the kernel."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import manyhands as mh
from manyhands.replica import session
from manyhands.replica.heap import keep_freed, kept_bytes

STEPS = 20
CPU = torch.device("cpu")
# As of a training: tensors of a megabyte that all live at once, and are all freed.
PROGRAM = f"""
import ctypes, resource
import torch
from manyhands.replica.heap import keep_freed

def step():
    gradients = [torch.zeros(1 << 18) for _ in range(16)]
    return sum(float(g[0]) for g in gradients)

def faults():
    for _ in range(5):  # until the heap is as it stays
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range({STEPS}):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

PR_SET_THP_DISABLE = 41
assert ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0  # a fault is one page
torch.set_num_threads(1)
usual = faults()
assert keep_freed(16 << 20, torch.device("cpu"), {{}})
print(usual, faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_steps_take_no_pages_from_the_kernel():
    # As glibc begins: later it goes by what it has seen, and that may be little or much.
    environ = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    out = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environ, capture_output=True, timeout=60, check=True
    ).stdout
    usual, kept = map(int, out.split())
    pages = STEPS * (16 << 20) // resource.getpagesize()  # of all steps
    assert usual > pages // 2  # else there is nothing to keep
    assert kept < pages // 100


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_what_a_user_has_set_stays(name):
    assert not keep_freed(1, CPU, {name: "1"})


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "meta"])
def test_gradients_that_are_elsewhere_need_no_heap(device):
    assert not keep_freed(1, torch.device(device), {})


@pytest.mark.parametrize(
    ("num_bytes", "memory_bytes", "kept"),
    [
        (8 << 20, 64 << 30, (16 << 20) + (256 << 20)),
        (8 << 20, 2 << 30, 128 << 20),  # a small machine
        (512 << 20, 16 << 30, 1 << 30),
        (1 << 40, 1 << 40, (1 << 31) - 1),  # mallopt takes an int
    ],
)
def test_as_much_as_a_step_needs_and_a_machine_has_to_spare(num_bytes, memory_bytes, kept):
    assert kept_bytes(num_bytes, memory_bytes) == kept


def test_a_run_says_what_its_gradients_need_and_where_they_are(monkeypatch):
    asked = []
    monkeypatch.setattr(session, "keep_freed", lambda *given: asked.append(given) or True)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = DataLoader(TensorDataset(torch.rand(8, 3)), 4)
    with mh.join(None) as run:
        run.wrap(model, optimizer, data, epochs=1)
    assert asked == [(4 * 8, CPU, os.environ)]
