"""`up` is killed, and the next one is asked for something else: what is left does not decide."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from manyhands.cluster.job import State
from manyhands.testing.processes import is_gone
from tests.cluster import running
from tests.cluster.folders import open_to_all
from tests.cluster.running import MAIN, WAIT_S, command_of

STAY = "echo $$ > pid.new; mv pid.new pid-$MANYHANDS_RESTART_COUNT; "
STAY += "while ! test -e go; do sleep 0.02; done; id -un"
LEASE = ("--lease", "1h")  # nothing here may be owed to the end of a lease


def agents(world):
    return [one for one in world.processes() if "agent" in command_of(one)]


def kill(up):
    up.process.kill()
    up.process.wait(WAIT_S)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run jobs as another user")
@pytest.mark.parametrize("users", [("", "nobody"), ("nobody", "")])
def test_no_job_runs_as_the_user_of_an_earlier_up(world, monkeypatch, users):
    """Neither the one that runs meanwhile, which begins again, nor the next."""
    open_to_all(world.folder)
    (world.folder / "open").mkdir()
    (world.folder / "open").chmod(0o777)
    elsewhere = "from pathlib import Path\nfrom manyhands.cluster import identity\n"
    elsewhere += f"identity._OF_ROOT = Path({str(world.folder / 'lib')!r})\n"
    monkeypatch.setattr(running, "MAIN", elsewhere + MAIN)
    before, now = (("--user", user) if user else () for user in users)
    up = world.up("--slots", "1", *LEASE, *before)
    workdir = str(world.folder / "open")
    job = world.submit(STAY, workdir=workdir)
    rank = world.pid_in("open/pid-0")
    kill(up)
    left = agents(world)
    assert len(left) == 1
    up = world.up("--slots", "1", *LEASE, *now)
    assert is_gone(rank), "as the user of the earlier one"
    world.until_gone(*left)
    Path(workdir, "go").touch()
    over = world.cluster.wait(job.id, WAIT_S)
    assert (over.state, over.attempt, over.node_failures) == (State.SUCCEEDED, 1, 0), over.reason
    assert world.text(job, 0, attempt=1).strip() == (users[1] or "root")
    other = world.submit("id -un", workdir="/tmp")
    assert world.cluster.wait(other.id, WAIT_S).exit_code == 0
    assert world.text(other, 0).strip() == (users[1] or "root")
    assert "an earlier `up` started its agent, with other options" in up.said()
    assert up.end() == 0
    assert world.processes() == []


def test_slots_are_those_that_are_asked_for_now(world):
    """The agent that has others leaves, and the job that it ran begins again, without a loss."""
    up = world.up("--slots", "2", *LEASE)
    job = world.submit(STAY)
    rank = world.pid_in("pid-0")
    kill(up)
    left = agents(world)
    world.up("--slots", "1", *LEASE)
    # It may still have to settle what the job's first attempt left: "clearing" until then.
    (node,) = world.until(
        lambda: [n for n in world.cluster.nodes() if n.state == "here"], "the host is here"
    )
    assert len(node.slots) == 1
    assert is_gone(rank)
    world.until_gone(*left)  # it has let go of its folder, and may still be on its way out
    world.pid_in("pid-1")
    (world.folder / "go").touch()
    over = world.cluster.wait(job.id, WAIT_S)
    assert (over.state, over.preemptions, over.node_failures) == (State.SUCCEEDED, 1, 0)
    [out] = [one for one in world.cluster.history(job.id) if one.state is State.PREEMPTED]
    assert "`up` was started with other options" in out.reason


def test_a_job_gets_its_grace_and_up_waits_for_it(world, monkeypatch):
    up = world.up("--slots", "2", *LEASE)
    job = world.submit("trap 'echo asked > asked' TERM; " + STAY, grace_s=3600.0)
    world.pid_in("pid-0")
    kill(up)
    hasty = "from manyhands.cluster.up import Up\nUp.until_ready.__defaults__ = (0.1,)\n"
    monkeypatch.setattr(running, "MAIN", hasty + MAIN)
    up = world.up("--slots", "1", *LEASE, ready=False)
    world.until((world.folder / "asked").exists, "SIGTERM")
    (world.folder / "go").touch()
    assert list(up.ready()["hosts"].values()) == [1]
    assert world.cluster.wait(job.id, WAIT_S).state is State.SUCCEEDED


def test_up_waits_for_those_that_come_after_agents_that_leave(world, monkeypatch):
    """They are started again after a while, and that is no part of the time for everybody."""
    kill(world.up("--slots", "2", *LEASE))
    hasty = "from manyhands.cluster.up import Up\nUp.until_ready.__defaults__ = (0.0,)\n"
    monkeypatch.setattr(running, "MAIN", hasty + MAIN)
    up = world.up("--slots", "1", *LEASE, ready=False)
    assert list(up.ready()["hosts"].values()) == [1]


def test_a_host_that_is_not_asked_for_any_more_leaves(world):
    hostfile = world.folder / "hosts.txt"
    hostfile.write_text("127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
    up = world.up("--hostfile", str(hostfile), *LEASE)
    job = world.submit(STAY)
    rank = world.pid_in("pid-0")
    kill(up)
    left = [one for one in agents(world) if "127.0.0.2" in command_of(one)]
    assert len(left) == 1
    hostfile.write_text("127.0.0.1 slots=1\n")
    world.up("--hostfile", str(hostfile), *LEASE)
    world.until_gone(*left)
    world.until(lambda: [n.name for n in world.cluster.nodes()] == ["127.0.0.1"], "only one host")
    # What is as it was goes on.
    assert [place.host for place in world.cluster.job(job.id).places] == ["127.0.0.1"]
    assert not is_gone(rank)
    (world.folder / "go").touch()
    over = world.cluster.wait(job.id, WAIT_S)
    assert (over.state, over.attempt) == (State.SUCCEEDED, 0)
