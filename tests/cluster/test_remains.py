"""Agents that an `up` which was killed has left: those of its cluster, and nobody else's."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager

import pytest

from manyhands.cluster.holder import LOCK
from manyhands.cluster.remains import AGENTS, Remains
from tests.cluster import running
from tests.cluster.folders import open_to_all
from tests.cluster.running import MAIN, WAIT_S

HOLDS = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(fd, fcntl.LOCK_EX)
os.pwrite(fd, b"%d" % os.getpid(), 0)
print("held", flush=True)
sys.stdin.read()
"""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it is told by /proc")


@contextmanager
def agent(folder, *words):
    """Who holds the lock of this folder, and was started with these words."""
    folder.mkdir(parents=True)
    command = [sys.executable, "-c", HOLDS, str(folder / LOCK), *words]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout.readline() == b"held\n"
        try:
            yield process
        finally:
            process.stdin.close()
            process.wait(WAIT_S)


def test_only_agents_of_ups_that_work_in_this_folder(tmp_path):
    folder, link = tmp_path / "state" / AGENTS / "h", tmp_path / "link"
    link.symlink_to(tmp_path / "state")
    ours = ("--origin", "up", "--state")
    for words, count in (
        ((*ours, str(folder)), 1),
        ((*ours, str(link / AGENTS / "h")), 1),
        ((*ours, str(tmp_path / "other")), 0),
        (("--origin", "up"), 0),
        (("--origin", "user", "--state", str(folder)), 0),
    ):
        with agent(folder, *words), Remains(tmp_path / "state") as remains:
            assert len(remains) == count, words
        (folder / LOCK).unlink()
        folder.rmdir()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run jobs as another user")
def test_a_cluster_is_taken_down_when_another_has_come_to_its_address(tmp_path, monkeypatch):
    """With --user, where all agents of root's are in one place: it is its own that end."""
    open_to_all(tmp_path)
    elsewhere = "from pathlib import Path\nfrom manyhands.cluster import identity\n"
    elsewhere += f"identity._OF_ROOT = Path({str(tmp_path / 'lib')!r})\n"
    monkeypatch.setattr(running, "MAIN", elsewhere + MAIN)
    world = running.World(tmp_path)
    options = ("--slots", "1", "--user", "nobody", "--lease", "1h")

    def agents():
        found = {process.pid: running.command_of(process) for process in world.processes()}
        return {pid for pid, words in found.items() if "agent" in words}

    try:
        first = world.up(*options)
        first.process.kill()
        first.process.wait(WAIT_S)
        left, state = agents(), world.state
        assert len(left) == 1
        world.state, world.logs = tmp_path / "state of the other", tmp_path / "logs of the other"
        world.up(*options)
        stay = agents() - left
        assert len(stay) == 1
        down = world.command("down", "--state", str(state))
        assert (down.returncode, down.stdout) == (0, "the cluster is down\n"), down.stderr
        assert "another certificate" in down.stderr
        assert "1 agent of it" in down.stderr
        assert agents() == stay
        assert [node.state for node in world.cluster.nodes()] == ["here"]
    finally:
        world.close()
