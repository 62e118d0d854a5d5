"""Programs of users as jobs of a real `up`: they meet, train, and go on where they were."""

from __future__ import annotations

import os
import re
import shutil

import pytest

from manyhands.cluster.job import State
from tests.cluster import running
from tests.cluster.running import WAIT_S
from tests.test_readme import TEXT, python_in

LOADER = """
import os
from manyhands.data.loader import Loader
cores = len(os.sched_getaffinity(0))
print(sum(len(batch) for batch in Loader(range(9), 3, collate=list, workers=cores)))
"""

LOOP = """
import os
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import manyhands as mh

options = {"checkpoints": sys.argv[1], "resume": "auto"} if sys.argv[1:] else {}
epochs = int(Path("epochs").read_text())
torch.manual_seed(0)
x = torch.randn(64, 4)
data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
with mh.join() as run:
    model, optimizer, data, _ = run.wrap(model, optimizer, data, epochs=epochs, **options)
    first = run.round
    for _ in range(epochs):
        for inputs, targets in data:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            Path("trains").touch()
rank, attempt = os.environ["RANK"], os.environ["MANYHANDS_RESTART_COUNT"]
Path(f"rounds-{attempt}-{rank}").write_text(f"{first} {run.round}")
"""
ROUNDS = 8  # of an epoch

LASTING = """
import os
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import manyhands as mh

torch.manual_seed(0)
x = torch.randn(64, 4)
data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
rank = os.environ["RANK"]
with mh.join() as run:
    model, optimizer, data, _ = run.wrap(model, optimizer, data)
    while not Path("go").exists():
        for inputs, targets in data:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            Path(f"new-{rank}").write_text(str(run.round))
            Path(f"new-{rank}").replace(f"round-{rank}")
"""

GLOO = """
import os

import torch
import torch.distributed as dist

assert dist.is_torchelastic_launched()  # by which torch and Lightning know torchrun's ranks
assert os.environ["GROUP_WORLD_SIZE"] == "2"
dist.init_process_group("gloo")  # by env://, as any script for torchrun
total = torch.tensor([10.0 ** dist.get_rank()])
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {total.item():g}")
dist.destroy_process_group()
"""


def rounds(world, attempt):
    """With which round an attempt began, and how far it came. Who leaves last saves what it has."""
    texts = [(world.folder / f"rounds-{attempt}-{rank}").read_text() for rank in range(2)]
    began, came = zip(*(map(int, text.split()) for text in texts), strict=True)
    return min(began), max(came)


@pytest.mark.parametrize("checkpoints", [True, False])
def test_a_loop_begins_again_from_its_checkpoint_or_from_the_start(world, checkpoints):
    epochs = world.folder / "epochs"
    epochs.write_text("10000")  # it does not come to that
    up = world.up("--slots", "2")
    arguments = ["saved"] if checkpoints else []
    job = world.submit_python(LOOP, arguments=arguments, gpus=2, grace_s=WAIT_S)
    world.until((world.folder / "trains").exists, "a round")
    assert up.end() == 0
    began, reached = rounds(world, 0)
    assert (began, reached > 0) == (0, True)
    more = reached // ROUNDS + 2
    epochs.write_text(str(more))
    world.up("--slots", "2")
    over = world.cluster.wait(job.id, WAIT_S)
    assert (over.state, over.attempt, over.node_failures) == (State.SUCCEEDED, 1, 0), over.failure
    assert rounds(world, 1) == (reached if checkpoints else 0, more * ROUNDS)


def reached(world):
    """The rounds of both ranks, once they train."""
    files = [world.folder / f"round-{rank}" for rank in range(2)]
    world.until(lambda: all(file.exists() for file in files), "a round of both")
    return [int(file.read_text()) for file in files]


def test_a_training_lives_on_when_up_is_killed_and_comes_back_within_the_lease(world):
    up = world.up("--slots", "2", "--lease", "10m")
    job = world.submit_python(LASTING, gpus=2)
    reached(world)
    up.process.kill()
    up.process.wait(WAIT_S)
    before = max(reached(world))
    world.up("--slots", "2", "--lease", "10m")
    world.until(lambda: min(reached(world)) > before + ROUNDS, "rounds at the hub that came back")
    (world.folder / "go").touch()
    over = world.cluster.wait(job.id, WAIT_S)
    assert (over.state, over.attempt) == (State.SUCCEEDED, 0), over.failure


def test_ranks_look_for_the_hub_for_as_long_as_their_environment_says(world):
    """That of the agent is longer than its lease: `test_agent_parts`."""
    up = world.up("--slots", "2", "--lease", "10m")
    env = {"MANYHANDS_OUTAGE": "0.5", "TORCHINDUCTOR_CACHE_DIR": str(world.folder / "inductor")}
    job = world.submit_python(LASTING, gpus=2, env=env)
    reached(world)
    ranks = [p for p in world.processes() if running.environ_of(p).get("RANK")]
    up.process.kill()
    up.process.wait(WAIT_S)
    world.until_gone(*ranks)
    world.up("--slots", "2", "--lease", "10m")
    over = world.cluster.wait(job.id, WAIT_S)
    assert over.state is State.FAILED
    assert "the hub was not found again within 0.5 s" in over.failure.words


def test_a_cluster_that_begins_anew_does_not_take_up_the_runs_of_the_one_before(world):
    """Its first job has the number of another one, which the hub remembers as over."""
    (world.folder / "epochs").write_text("2")
    for _ in range(2):
        up = world.up("--slots", "2")
        job = world.submit_python(LOOP, gpus=2)
        over = world.cluster.wait(job.id, WAIT_S)
        assert (over.id, over.state) == (1, State.SUCCEEDED), over.failure
        assert rounds(world, 0) == (0, 2 * ROUNDS)
        assert up.end() == 0
        for path in (*world.state.glob("jobs.db*"), *world.folder.glob("rounds-*")):
            path.unlink()
        shutil.rmtree(world.logs)


def test_the_first_two_programs_of_the_readme_are_jobs(world):
    loop, plan, *_ = python_in(TEXT)
    world.up("--slots", "2")
    for program, says in ((loop, r"loss \S+ after 60 rounds\n"), (plan, r"loss \S+\n")):
        (world.folder / "train.py").write_text(program)
        done = world.command(
            *("submit", "--state", str(world.state), "--gpus", "2", "--wait"),
            *("--env", f"TORCHINDUCTOR_CACHE_DIR={world.folder / 'inductor'}"),
            *("--", "python", "train.py"),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        newest = world.cluster.jobs(limit=1)[0]
        first, second = (world.text(newest, rank) for rank in range(2))
        assert re.fullmatch(says, first)
        assert second == first  # both took part in all of it
        assert first in done.stdout


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a rank for each of two cores")
def test_a_loader_in_a_slot_counts_the_cores_of_the_slot(world):
    """Each rank is pinned to its own: as many workers as it has cores is nothing to warn of."""
    world.up("--slots", "2")
    job = world.submit_python(LOADER, gpus=2)
    assert world.cluster.wait(job.id, WAIT_S).state is State.SUCCEEDED
    assert [world.text(job, rank) for rank in range(2)] == ["9\n"] * 2


def test_a_script_for_torchrun_over_two_hosts(world):
    hostfile = world.folder / "hosts.txt"
    hostfile.write_text("127.0.0.1 slots=2\n127.0.0.2 slots=1\n")
    world.up("--hostfile", str(hostfile))
    job = world.submit_python(GLOO, gpus=3)
    over = world.cluster.wait(job.id, WAIT_S)
    assert over.state is State.SUCCEEDED, over.failure
    said = [world.text(job, rank) for rank in range(3)]
    assert said == [f"rank {rank} of 3: 111\n" for rank in range(3)]
