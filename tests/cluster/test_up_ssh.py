"""A host that ssh leads to, when `manyhands up` is killed: against a real sshd."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import manyhands
from manyhands.cluster.job import State
from manyhands.testing.processes import is_gone
from tests.cluster.programs import HOLDS
from tests.cluster.running import MARK, WAIT_S, World
from tests.cluster.sshd import Sshd


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    yield made
    made.close()


def test_killed_and_up_again(world, tmp_path):
    """The agent over there, which no `up` minds any more, and its job go on; and both are ended by
    the next one, which has never started them.
    """
    source = str(Path(manyhands.__file__).parent.parent)
    given = {"PYTHONPATH": source, MARK: world.mark, "TMPDIR": os.environ["TMPDIR"]}
    given["XDG_STATE_HOME"] = str(world.folder / "remote")
    with Sshd(tmp_path / "sshd", given) as sshd:
        hostfile = world.folder / "hosts.txt"
        hostfile.write_text(f"{sshd.address} slots=1\n")
        options = ("--hostfile", str(hostfile), "--ssh", " ".join(sshd.command()))
        up = world.up(*options, "--lease", "60s")
        job = world.cluster.submit([*HOLDS, "1e9"], workdir=str(world.folder), grace_s=10.0)
        process = world.pid_in(f"pid-{job.id}-0-0")
        world.until_state(job, State.RUNNING)
        up.process.kill()
        up.process.wait(WAIT_S)
        again = world.up(*options, "--lease", "60s")
        assert not is_gone(process)
        assert world.cluster.job(job.id).state is State.RUNNING
        other = world.cluster.submit(["sh", "-c", 'test -n "$SSH_CONNECTION"'])
        (world.folder / "go").touch()
        over = world.cluster.wait(job.id, WAIT_S)
        assert (over.state, over.attempt) == (State.SUCCEEDED, 0)
        assert (world.folder / f"starts-{job.id}-0").read_text() == "0\n"
        assert not (world.folder / "overlaps").exists()
        assert world.cluster.wait(other.id, WAIT_S).exit_code == 0
        assert again.end() == 0
        world.until(lambda: world.processes() == [], "the agent over there, and both of ssh")
