"""The same run on a GPU: two processes on one device, against one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from manyhands.replica.cap import Cap, memory_of
from tests.replica.hands import TOLERANCE
from tests.replica.training import alone, shadow

pytestmark = [
    pytest.mark.usefixtures("hub"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]
ROOT = Path(__file__).parents[2]
PATIENCE_S = 120


@pytest.fixture(scope="module", autouse=True)
def _started():
    """Its driver opens files that stay, before the leak check of a test looks."""
    alone(1, device="cuda")


@pytest.mark.parametrize("number", [1, 2])
def test_the_same_run_on_a_gpu(hub, number):
    orders = {
        "url": f"{hub.address}?insecure=1",
        "run": f"cuda-{number}",
        "device": "cuda",
        "min_peers": number,
    }
    hands = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.replica.training", json.dumps(orders)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for _ in range(number)
    ]
    try:
        said = [hand.communicate(timeout=PATIENCE_S)[0].splitlines() for hand in hands]
    finally:
        for hand in hands:
            hand.kill()
            hand.wait()
    losses, model = alone(3, device="cuda")
    states = []
    for lines in said:
        facts = [json.loads(line) for line in lines]
        rounds = [fact for fact in facts if "round" in fact]
        assert [fact["loss"] for fact in rounds] == pytest.approx(losses, abs=TOLERANCE)
        assert facts[-1]["shadow"] == pytest.approx(shadow(model), abs=100 * TOLERANCE)
        states.append([fact["state"] for fact in rounds])
    assert all(state == states[0] for state in states)


@pytest.mark.parametrize("every", [1, 4])
def test_a_gpu_and_a_cpu_in_one_run(hub, every):
    """Their optimizers round differently; they are made equal, and nobody is blamed for it."""
    orders = {
        "url": f"{hub.address}?insecure=1",
        "run": f"mixed-{every}",
        "min_peers": 2,
        "grain": None,
        "epochs": 6,
        "resync_every": every,
        "show": True,
    }
    hands = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.replica.training"),
                json.dumps(orders | {"device": device, "name": device}),
            ],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for device in ("cuda", "cpu")
    ]
    try:
        said = [hand.communicate(timeout=PATIENCE_S)[0].splitlines() for hand in hands]
    finally:
        for hand in hands:
            hand.kill()
            hand.wait()
    losses, model = alone(6, None)
    gpu, cpu = ([json.loads(line) for line in lines] for lines in said)
    for facts in (gpu, cpu):
        rounds = [fact for fact in facts if "round" in fact]
        assert [fact["loss"] for fact in rounds] == pytest.approx(losses, abs=TOLERANCE)
        assert facts[-1]["shadow"] == pytest.approx(shadow(model), abs=100 * TOLERANCE)
        assert facts[-1]["deviated"] == []
    begun = [{f["begins"]: f["parameters"] for f in facts if "begins" in f} for facts in (gpu, cpu)]
    ended = [{f["ends"]: f["parameters"] for f in facts if "ends" in f} for facts in (gpu, cpu)]
    both = {f["counted"] for f in gpu if len(f.get("names", ())) == 2}
    assert len(both) > 12
    # An opening of two rounds comes before round 0.
    equal = {n for n in both if n - 1 in both and (n + 2) % every == 0}
    assert all(begun[0][n] == begun[1][n] for n in equal)
    assert any(ended[0].get(n) != ended[1].get(n) for n in both)  # so there was something to mend


def test_a_pass_grows_only_as_far_as_the_memory_goes():
    """A device of 2 GiB; the allocator itself refuses a pass that is too large for it."""
    device = torch.device("cuda", 0)
    total = torch.cuda.mem_get_info(device)[1]
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((2 << 30) / total, device)
    try:
        cap = Cap(memory_of(device))
        layers = torch.nn.Sequential(*(torch.nn.Tanh() for _ in range(3))).to(device)
        done = []
        for asked in (4, 1000, 1000, 1000):
            most = min(asked, cap.most(asked))
            cap.begin(most)
            x = torch.zeros(most, 1 << 20, device=device, requires_grad=True)
            layers(x).sum().backward()
            cap.survived(most)
            del x
            done.append(most)
        assert done[0] == 4
        assert 40 < done[-1] < 200
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)
