"""Plans on a GPU, against one process on the same GPU; two peers share it."""

import json
import os
import subprocess
import sys

import pytest
import torch

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: NOT TESTED")


@pytest.fixture(params=["gloo", "hub"])
def where(request, hub_port, tmp_path):
    if request.param == "gloo":
        return f"file://{tmp_path}/meet"
    return f"hub://127.0.0.1:{hub_port}/{tmp_path.name}?insecure=1"


def run(world, where, tmp_path, *arguments):
    command = [sys.executable, "-m", "tests.stages.cuda_peer", where, str(world), *arguments]
    environ = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    peers = [
        subprocess.Popen(
            [*command, str(rank)], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for rank in range(world)
    ]
    said = [peer.communicate(timeout=100) for peer in peers]
    for peer, (_, errors) in zip(peers, said, strict=True):
        assert peer.returncode == 0, errors.decode()
    return [json.loads(out.decode().splitlines()[-1]) for out, _ in said]


@needs_gpu
@pytest.mark.parametrize("world", [1, 2])
def test_peers_of_one_gpu_give_the_run_of_one_process(where, world, tmp_path):
    for answer in run(world, where, tmp_path):
        assert answer["cases"] == 12
