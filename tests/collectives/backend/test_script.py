"""mh.group: one program, alone, with `manyhands run`, with torchrun's environment."""

import os
import re
import subprocess
import sys

import pytest
import torch.distributed as dist

import manyhands as mh
from manyhands.collectives.backend.script import arguments_of
from manyhands.core.errors import UsageError
from manyhands.testing.processes import end_tree

PROGRAM = """
import torch, torch.distributed as dist
import manyhands as mh

with mh.group() as peers:
    total = torch.tensor([float(peers.rank)])
    if peers.size > 1:
        dist.all_reduce(total)
    with mh.group(size=peers.size) as inner:  # the same one, which stays
        assert inner == peers
    assert dist.is_initialized() == (peers.size > 1)
    backend = dist.get_backend() if peers.size > 1 else "none"
    print(f"rank {peers.rank} of {peers.size}: {total.item()} over {backend}", flush=True)
assert not dist.is_initialized()
"""
MEETING = {"MANYHANDS_URL": "hub://127.0.0.1:1/r?insecure=1"}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
OF_LAUNCHERS = ("MANYHANDS_", "RANK", "WORLD_SIZE", "MASTER_", "LOCAL_")


@pytest.fixture
def run(tmp_path):
    """What the program prints, a line a peer."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environ = {k: v for k, v in os.environ.items() if not k.startswith(OF_LAUNCHERS)}

    def start(*words, **more):
        command = [sys.executable, *words, str(program)]
        process = subprocess.Popen(
            command,
            env=environ | more | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            said, errors = process.communicate(timeout=100)
        finally:
            end_tree(process, patience_s=10)
        assert process.returncode == 0, errors
        # Two that write at once may share a line.
        return sorted(re.findall(r"rank \d of \d: [\d.]+ over (?:gloo|manyhands|none)", said))

    return start


def test_alone(run):
    assert run() == ["rank 0 of 1: 0.0 over none"]


def test_with_manyhands_run(run):
    assert run("-m", "manyhands", "run", "-n", "2") == [
        "rank 0 of 2: 1.0 over manyhands",
        "rank 1 of 2: 1.0 over manyhands",
    ]


def test_with_torchrun(run, tmp_path):
    logs = ("--log-dir", str(tmp_path / "logs"))  # else it leaves them elsewhere
    said = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *logs)
    assert said == ["rank 0 of 2: 1.0 over gloo", "rank 1 of 2: 1.0 over gloo"]


@pytest.mark.parametrize(
    ("environ", "size", "wanted"),
    [
        ({}, None, None),
        ({}, 1, None),
        ({**MEETING, "MANYHANDS_WORLD_SIZE": "3"}, None, 3),
        ({**MEETING, "MANYHANDS_WORLD_SIZE": "3"}, 2, 2),  # whoever writes it knows best
        ({**MEETING, "WORLD_SIZE": "4"}, None, 4),
        ({"RANK": "0", "WORLD_SIZE": "2"}, None, None),  # not all that torchrun sets
    ],
)
def test_what_a_launcher_means(environ, size, wanted):
    found = arguments_of(environ, size, "gloo")
    if wanted is None:
        assert found is None
    else:
        url = MEETING["MANYHANDS_URL"]
        assert found == {"backend": "manyhands", "init_method": url, "world_size": wanted}


def test_torchrun_means_the_backend_that_is_named():
    assert arguments_of(TORCHRUN, None, "nccl") == {"backend": "nccl"}
    assert arguments_of(TORCHRUN, 2, "gloo") == {"backend": "gloo"}


@pytest.mark.parametrize(
    ("environ", "size", "said"),
    [
        ({}, 0, "a group of 0 peers"),
        # `manyhands run --hub` without --min-peers: there may be any number.
        ({**MEETING, "MANYHANDS_MIN_PEERS": "1"}, None, "how many peers the group has"),
        ({**MEETING, "MANYHANDS_WORLD_SIZE": "two"}, None, "MANYHANDS_WORLD_SIZE is 'two'"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, None, "WORLD_SIZE is '0'"),
        (TORCHRUN, 3, "a group of 3 peers is asked for, there are 2"),
    ],
)
def test_what_cannot_be_meant(environ, size, said):
    with pytest.raises(UsageError, match=said) as caught:
        arguments_of(environ, size, "gloo")
    assert caught.value.hint


def test_more_than_are_here(monkeypatch):
    for name in os.environ:
        if name.startswith(OF_LAUNCHERS):
            monkeypatch.delenv(name)
    said = "a group of 2 peers is asked for, there is 1"
    with pytest.raises(UsageError, match=said), mh.group(size=2):
        raise AssertionError("it begins")
    with mh.group(size=1) as peers:
        assert peers == (0, 1)
        assert not dist.is_initialized()
