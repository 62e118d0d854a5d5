"""Jobs that have to make room, and jobs whose host is lost: real processes of a real `up`."""

from __future__ import annotations

from itertools import groupby

from manyhands.cluster.environment import HOST
from manyhands.cluster.job import State
from manyhands.testing.processes import end_all, is_gone
from tests.cluster.running import WAIT_S, command_of, environ_of

JOB = "MANYHANDS_JOB"
ONCE = [State.PENDING, State.STARTING, State.RUNNING]


def way_of(world, job):
    """From state to state: notes on the way (why it waits, that it is to end) left out."""
    return [state for state, _ in groupby(world.states(job))]


def stays(name):
    """Says who it is, then waits until the test lets it go."""
    return (
        f"echo $$ > {name}.new; mv {name}.new {name}-$MANYHANDS_RESTART_COUNT; "
        f"while ! test -e go-{name}; do sleep 0.02; done"
    )


def let_go(world, job, name):
    (world.folder / f"go-{name}").touch()
    over = world.cluster.wait(job.id, WAIT_S)
    assert over.state is State.SUCCEEDED, over.reason
    return over


def starts(world, script, **spec):
    """A best-effort job that has the only slot, and its process."""
    low = world.submit(script, priority="best-effort", **spec)
    rank = world.pid_in("low-0")
    world.until_state(low, State.RUNNING)
    return low, rank


# -- preemption -------------------------------------------------------------------------------


def test_a_higher_job_has_the_slot_and_the_lower_one_after_it(world):
    world.up("--slots", "1")
    saves = "trap 'echo saved >> saved; exit 0' TERM; "
    low, rank = starts(world, saves + stays("low"), grace_s=3600.0)
    high = world.submit(stays("high"), priority="high")
    world.pid_in("high-0")
    assert is_gone(rank)
    assert (world.folder / "saved").read_text() == "saved\n"
    waits = world.cluster.job(low.id)
    assert (waits.state, waits.preemptions) == (State.PENDING, 1)
    assert let_go(world, high, "high").attempt == 0
    world.pid_in("low-1")
    over = let_go(world, low, "low")
    assert (over.attempt, over.preemptions, over.node_failures) == (1, 1, 0)
    assert way_of(world, low) == [*ONCE, State.PREEMPTED, *ONCE, State.SUCCEEDED]
    reasons = {step.state: step.reason for step in world.cluster.history(low.id)}
    assert reasons[State.PREEMPTED] == f"makes room for job {high.id}"
    assert (world.folder / "saved").read_text() == "saved\n"


def test_a_job_that_does_not_listen_is_killed_after_its_grace(world):
    world.up("--slots", "1")
    low, rank = starts(world, "trap '' TERM; " + stays("low"), grace_s=1.0)
    high = world.submit(stays("high"), priority="high")
    world.pid_in("high-0")
    assert is_gone(rank)
    [out] = [step for step in world.cluster.history(low.id) if step.state is State.PREEMPTED]
    assert out.at_s - high.submitted_s >= 1.0  # not before
    let_go(world, high, "high")
    assert let_go(world, low, "low").attempt == 1


# -- a host that is lost ----------------------------------------------------------------------

# Every rank has a lock while it lives, and looks first whether one of the attempt before lives. It
# is deaf, so that whoever outlives its host takes its time to go.
GANG = """
trap '' TERM
attempt=$MANYHANDS_RESTART_COUNT
if test $attempt -gt 0; then
    for rank in 0 1; do
        flock --shared --nonblock lock-$((attempt - 1))-$rank true || echo $rank >> overlaps
    done
fi
exec 9> lock-$attempt-$RANK
flock 9
echo $$ > pid-$RANK.new
mv pid-$RANK.new pid-$attempt-$RANK
while ! test -e go; do sleep 0.02 9>&-; done
"""


def agent_of(world, name):
    (agent,) = [one for one in world.processes() if {"agent", name} <= set(command_of(one))]
    return agent


def kill_host(world, name):
    """kill -9 of its agent, and then of all that it has started."""
    agent = agent_of(world, name)
    others = [one for one in world.processes() if environ_of(one).get(HOST) == name]
    assert others
    end_all([agent, *others])


def start_gang(world, **spec):
    """A job of two ranks, one on each of two hosts; the job and its processes."""
    job = world.submit(GANG, **{"gpus": 2, "grace_s": 1.0, **spec})
    ranks = [world.pid_in(f"pid-0-{rank}") for rank in range(2)]
    world.until_state(job, State.RUNNING)
    assert len(world.cluster.job(job.id).places) == 2
    return job, ranks


def up_with_two_hosts(world):
    """Both started by `up`, which starts their agents again."""
    hostfile = world.folder / "hosts.txt"
    hostfile.write_text("127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
    return world.up("--hostfile", str(hostfile), "--lease", "60s")


def test_a_host_is_killed_and_the_job_begins_again_when_all_of_it_is_gone(world):
    up_with_two_hosts(world)
    job, ranks = start_gang(world)
    kill_host(world, "127.0.0.2")
    for rank in range(2):
        world.pid_in(f"pid-1-{rank}")
    assert all(map(is_gone, ranks))
    (world.folder / "go").touch()
    over = world.cluster.wait(job.id, WAIT_S)
    assert (over.state, over.attempt, over.node_failures) == (State.SUCCEEDED, 1, 1), over.reason
    assert way_of(world, job) == [*ONCE, State.NODE_FAIL, *ONCE, State.SUCCEEDED]
    assert not (world.folder / "overlaps").exists()


def test_a_host_is_killed_and_the_job_may_not_begin_again(world):
    up = up_with_two_hosts(world)
    job, ranks = start_gang(world, max_restarts=0)
    kill_host(world, "127.0.0.2")
    over = world.cluster.wait(job.id, WAIT_S)
    assert all(map(is_gone, ranks))
    assert (over.state, over.attempt, over.node_failures) == (State.FAILED, 0, 1)
    assert "host 127.0.0.2" in over.reason
    assert "it may not begin again: --max-restarts 0" in over.reason
    assert way_of(world, job) == [*ONCE, State.NODE_FAIL, State.FAILED]
    assert not list(world.folder.glob("pid-1-*"))
    assert up.end() == 0
    assert world.processes() == []


def test_a_host_is_killed_before_its_part_of_a_job_begins(world):
    """Its agent hangs, and so does the job's start, until it is killed and started again."""
    up_with_two_hosts(world)
    agent = agent_of(world, "127.0.0.2")
    agent.suspend()
    job = world.submit(GANG, gpus=2, grace_s=1.0)
    world.until_state(job, State.STARTING)
    first = world.pid_in("pid-0-0")  # rank 0 waits for nobody
    end_all([agent])
    for rank in range(2):
        world.pid_in(f"pid-1-{rank}")
    assert is_gone(first)
    (world.folder / "go").touch()
    over = world.cluster.wait(job.id, WAIT_S)
    assert over.state is State.SUCCEEDED, over.reason
    # Whether that counts as a restart depends on whether its agent had heard of the job.
    assert over.attempt == over.node_failures + over.preemptions == 1
    begun = sorted(file.name for file in world.folder.glob("pid-*"))
    assert begun == ["pid-0-0", "pid-1-0", "pid-1-1"]
    assert not (world.folder / "overlaps").exists()


def test_a_rank_is_killed_while_the_rest_of_its_job_has_not_begun(world):
    """The other half of the gang begins late, if at all: it ends, and the job has failed."""
    up_with_two_hosts(world)
    agent = agent_of(world, "127.0.0.2")
    agent.suspend()
    job = world.submit(GANG, gpus=2, grace_s=1.0)
    first = world.pid_in("pid-0-0")
    assert world.cluster.job(job.id).state is State.STARTING
    end_all([first])
    world.until(lambda: world.cluster.job(job.id).ending is not None, "the failure to be told")
    agent.resume()
    over = world.cluster.wait(job.id, WAIT_S)
    assert (over.state, over.exit_code, over.attempt) == (State.FAILED, 137, 0), over.reason
    assert over.failure.rank == 0
    assert not [one for one in world.processes() if environ_of(one).get(JOB) == str(job.id)]
    assert not list(world.folder.glob("pid-1-*"))


def test_hosts_are_killed_while_their_job_ends(world):
    """It was cancelled, and has an hour to go: it is over when nothing of it is left, and only
    then; and it stays cancelled.
    """
    up_with_two_hosts(world)
    job, ranks = start_gang(world, grace_s=3600.0)
    world.cluster.cancel(job.id)
    kill_host(world, "127.0.0.2")
    world.until(lambda: is_gone(ranks[1]), "the rank of the killed host to be gone")
    assert not is_gone(ranks[0])
    assert not world.cluster.job(job.id).is_over
    kill_host(world, "127.0.0.1")
    over = world.cluster.wait(job.id, WAIT_S)
    assert (over.state, over.exit_code, over.attempt) == (State.CANCELLED, 143, 0), over.reason
    assert all(map(is_gone, ranks))
    assert not list(world.folder.glob("pid-1-*"))


def test_a_host_that_does_not_come_back_is_lost_with_its_lease(world):
    """Nobody says that it is gone: its agent is not of `up`, which knows by the silence alone."""
    world.up("--slots", "1", "--lease", "15s")
    world.join("second")
    hosts_are_here(world, 2)
    job, ranks = start_gang(world)
    kill_host(world, "second")
    world.until(lambda: State.NODE_FAIL in world.states(job), "the end of the lease")
    assert all(map(is_gone, ranks))
    assert world.cluster.job(job.id).state is State.PENDING
    (world.folder / "go").touch()
    third = world.join("third")
    over = world.cluster.wait(job.id, WAIT_S)
    assert over.state is State.SUCCEEDED, over.reason
    assert {place.host for place in over.places} >= {"third"}
    assert over.node_failures >= 1  # a machine that is very busy may miss a lease
    assert not (world.folder / "overlaps").exists()
    third.terminate()
    third.communicate(timeout=WAIT_S)


def hosts_are_here(world, number):
    world.until(
        lambda: sum(node.state == "here" for node in world.cluster.nodes()) == number,
        f"{number} hosts",
    )
