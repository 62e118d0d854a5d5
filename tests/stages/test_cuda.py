"""Plans on a GPU, against one process on the same GPU; two peers share it."""

import json
import os
import subprocess
import sys

import pytest
import torch

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: NOT TESTED")
PATIENCE_S = 100.0


def run(backend, world, hub_port, tmp_path):
    where = f"file://{tmp_path}/meet"
    if backend == "manyhands":
        where = f"hub://127.0.0.1:{hub_port}/{tmp_path.name}?insecure=1"
    (saved := tmp_path / "saved").mkdir()
    command = [sys.executable, "-m", "tests.stages.cuda_peer", backend, where, saved, str(world)]
    environ = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    peers = [
        subprocess.Popen(
            [*command, str(rank)], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for rank in range(world)
    ]
    try:
        said = [peer.communicate(timeout=PATIENCE_S) for peer in peers]
    finally:
        for peer in peers:
            peer.kill()
            peer.communicate()
    for peer, (_, errors) in zip(peers, said, strict=True):
        assert peer.returncode == 0, errors.decode()
    return [json.loads(out.decode().splitlines()[-1]) for out, _ in said]


@needs_gpu
@pytest.mark.parametrize(
    ("backend", "world"),
    [("gloo", 1), ("gloo", 2), ("manyhands", 1), ("manyhands", 2), ("nccl", 1)],
)
def test_peers_of_one_gpu_give_the_run_of_one_process(backend, world, hub_port, tmp_path):
    """NCCL takes one rank a GPU, and hangs if two say that they are of two hosts (docs/log.md); the
    groups it needs for several are in test_equality.py.
    """
    for answer in run(backend, world, hub_port, tmp_path):
        assert answer["cases"] == 12
