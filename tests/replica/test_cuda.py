"""The same run on a GPU: two processes on one device, against one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
