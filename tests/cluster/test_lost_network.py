"""A network that is lost between an agent and its coordinator: real processes, TLS, and a proxy."""

from __future__ import annotations

import time

import pytest

from manyhands.cluster.job import State
from manyhands.testing.processes import is_gone
from manyhands.testing.proxy import Proxy
from tests.cluster.programs import HOLDS
from tests.cluster.running import WAIT_S, World

FOR_EVER = "1e9"


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    yield made
    made.close()


@pytest.fixture
def joined(world):
    """`joined(lease)`: a cluster and the proxy by which its one host reaches it."""
    proxies = []

    def start(lease):
        world.up("--slots", "0", "--lease", lease)
        proxies.append(Proxy("127.0.0.1", world.port))
        world.join("far", proxies[0].port)
        until_here(world, "far")
        return proxies[0]

    yield start
    for proxy in proxies:
        proxy.close()


def until_here(world, *names):
    def all_here():
        return {n.name for n in world.cluster.nodes() if n.state == "here"} == set(names)

    world.until(all_here, f"hosts {names}")


def submit(world):
    """A job that holds its lock, and its process when it runs."""
    job = world.cluster.submit([*HOLDS, FOR_EVER], workdir=str(world.folder), grace_s=10.0)
    process = world.pid_in(f"pid-{job.id}-0-0")
    world.until_state(job, State.RUNNING)
    return job, process


def over(world, job):
    """The job when it has been let go: how it ended, and that it never ran twice at once."""
    (world.folder / "go").touch()
    job = world.cluster.wait(job.id, WAIT_S)
    assert not (world.folder / "overlaps").exists()
    begun = (world.folder / f"starts-{job.id}-0").read_text().split()
    assert begun == [str(attempt) for attempt in range(job.attempt + 1)]
    return job.state, job.attempt, job.node_failures


def test_connections_that_are_dead_without_a_word_cost_no_lease(world, joined):
    """All that were there lose every byte. The agent finds out, dials anew, and is heard for longer
    than its lease would have lasted: the same process runs on.
    """
    lease_s = 20.0
    proxy = joined(f"{lease_s:g}s")
    job, process = submit(world)
    proxy.forget()
    forgotten_s = time.time()
    world.until(
        lambda: world.cluster.nodes()[0].heard_s > forgotten_s + 1.5 * lease_s,
        "a word from the host, after its lease would have been over",
    )
    assert not is_gone(process)
    assert over(world, job) == (State.SUCCEEDED, 0, 0)


def test_a_network_that_is_away_for_longer_than_a_lease(world, joined):
    """No end hears anything: the rank ends by itself, and before the job begins elsewhere."""
    proxy = joined("10s")
    job, process = submit(world)
    world.join("near")
    until_here(world, "far", "near")
    proxy.stall()
    second = world.pid_in(f"pid-{job.id}-1-0")
    assert is_gone(process)
    proxy.go()
    until_here(world, "far", "near")  # it comes back, with nothing of what it had
    assert not is_gone(second)
    state, attempt, failures = over(world, job)
    # Where much else runs, one that was not cut off may be late, too.
    assert state is State.SUCCEEDED
    assert attempt == failures >= 1
    # What it reported of the lost attempt has not counted for the other.
    steps = [step.state for step in world.cluster.history(job.id)]
    assert steps.count(State.NODE_FAIL) == failures


def test_a_network_that_is_away_for_less_than_a_lease(world, joined):
    proxy = joined("60s")
    job, process = submit(world)
    proxy.refuse()
    proxy.cut()
    said = world.folder / "far.err"
    world.until(lambda: "cannot be reached, trying again" in said.read_text(), "the agent to see")
    connections = proxy.num_connections
    proxy.accept()
    world.until(lambda: proxy.num_connections > connections, "the agent to be back")
    assert not is_gone(process)
    assert over(world, job) == (State.SUCCEEDED, 0, 0)
    steps = [step.state for step in world.cluster.history(job.id)]
    assert steps == [State.PENDING, State.STARTING, State.RUNNING, State.SUCCEEDED]
