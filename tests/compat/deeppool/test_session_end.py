"""The first terminal of the seed's session, and Ctrl-C in it while a job runs."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from manyhands.cluster.client import Cluster
from manyhands.cluster.job import State
from tests.cluster.running import WAIT_S, World
from tests.compat.deeppool.session import HOSTFILE, READY

# Whoever runs the tests in the background may have SIGINT ignored.
MAIN = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("manyhands.compat.deeppool.cluster", run_name="__main__", alter_sys=True)
"""
# With a child of its own, as a loader of data has.
STAYS = "sleep 100000 & echo $$ $! > new-$RANK; mv new-$RANK pid-$RANK; wait"


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    made = World(tmp_path)
    yield made
    made.close()


def test_ctrl_c_leaves_nothing(world):
    (world.folder / "hostfile.txt").write_text(HOSTFILE)
    world.environ["XDG_STATE_HOME"] = str(world.folder / "state")
    typed = "--addrToBind 127.0.0.1:0 --be_batch_size=0 --cpp --logdir logs --hostfile hostfile.txt"
    with subprocess.Popen(
        [sys.executable, "-c", MAIN, *typed.split()],
        cwd=world.folder,
        env=world.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    ) as process:
        try:
            assert READY in iter(process.stdout.readline, "")
            with Cluster(state=world.folder / "state" / "manyhands" / "cluster") as cluster:
                spec = {"gpus": 4, "workdir": str(world.folder), "grace_s": 30.0}
                job = cluster.submit(["sh", "-c", STAYS], **spec)
                for rank in range(4):
                    world.until((world.folder / f"pid-{rank}").exists, "the ranks")
                world.until(lambda: cluster.job(job.id).state is State.RUNNING, "the job")
            assert len(world.processes()) > 8  # this terminal, an agent, a keeper, ranks, children
            process.send_signal(signal.SIGINT)
            assert process.wait(WAIT_S) == 0
            assert process.stdout.read().endswith("the cluster is down\n")
        finally:
            process.kill()
    assert world.processes() == []
