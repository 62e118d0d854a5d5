"""kill -9 of a real `manyhands up` at every transaction of its life, and of its jobs' lives.

    the wrapped store of the process:  n-th transaction ─► before COMMIT, or right after it: SIGKILL
    the test:  whatever it asked for it asks for again, of the next `up` with the same folder

Between two transactions nothing that lasts happens but what was stored: so these are all the points
at which a death can differ from another.
"""

from __future__ import annotations

import signal

import pytest

from manyhands.cluster.dial import CoordinatorUnreachable
from manyhands.cluster.job import TERMINAL, State
from manyhands.testing.processes import is_gone
from tests.cluster import running
from tests.cluster.running import MAIN, WAIT_S, World

MOST = 40  # transactions of one life here; there are about ten
POINTS = [(number, side) for number in range(1, MOST) for side in ("within", "after")]

# The file says how many, counted from when it is there, and on which side of the COMMIT.
DYING = """
import contextlib, os, pathlib, signal
from manyhands.cluster import store

order, whole, counts = pathlib.Path(os.environ["DIES"]), store._transaction, {}

def dies(side):
    with contextlib.suppress(FileNotFoundError):
        number, at = order.read_text().split()
        counts[at] = counts.get(at, 0) + (side == at)
        if side == at and counts[at] == int(number):
            order.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

@contextlib.contextmanager
def transaction(connection):
    with whole(connection) as same:
        yield same
        dies("within")
    dies("after")

store._transaction = transaction
"""

QUICK = "echo $MANYHANDS_RESTART_COUNT >> ends-$NAME"
STAYS = "echo $$ > pid.new; mv pid.new pid-$NAME; while :; do sleep 0.05; done"
WAITS = "echo $$ > pid.new; mv pid.new pid-$MANYHANDS_RESTART_COUNT; "
WAITS += "while ! test -e go; do sleep 0.02; done; echo done >> ends"


class Mortal:
    """A cluster whose `up` is told when to die, and started again when it has."""

    def __init__(self, world):
        self.world = world
        self.order = world.folder / "dies"
        world.environ["DIES"] = str(self.order)
        self.start()

    def start(self):
        """Until one is ready; who dies before is followed by another."""
        while not self.is_born():
            pass

    def is_born(self):
        """Starts one; whether it lives until it is ready."""
        self.up = self.world.up("--slots", "2", "--lease", "1h", ready=False)
        if line := self.up.process.stdout.readline():
            assert b"url" in line
            return True
        self.mourn()
        return False

    def mourn(self):
        assert self.up.process.wait(WAIT_S) == -signal.SIGKILL, self.up.said()
        self.up.close()

    def dies(self, number, side):
        """From now on: before or after so many COMMITs."""
        draft = self.order.with_suffix(".new")
        draft.write_text(f"{number} {side}")
        draft.replace(self.order)

    def end(self):
        """It is taken down, and nothing is left."""
        self.order.unlink(missing_ok=True)
        self.insist(lambda cluster: cluster.info())  # it may have died of its order a moment ago
        assert self.up.end() == 0
        assert self.world.processes() == []

    @property
    def has_died(self):
        return not self.order.exists()

    def insist(self, ask):
        """What a user gets who asks until he is answered, if need be by the next one."""
        while True:
            try:
                with running.Cluster(state=self.world.state) as cluster:
                    return ask(cluster)
            except CoordinatorUnreachable:
                if self.up.process.poll() is not None:  # and was not merely late
                    self.mourn()
                    self.start()

    def submit(self, script, name):
        spec = {"workdir": str(self.world.folder), "grace_s": 10.0, "env": {"NAME": name}}
        return self.insist(lambda c: c.submit(["sh", "-c", script], key=name, **spec))

    def wait(self, job):
        return self.insist(lambda cluster: cluster.wait(job.id, WAIT_S))

    def until_running(self, job):
        """Its attempt, when that runs and is not about to end."""
        found = job

        def runs():
            nonlocal found
            found = self.insist(lambda cluster: cluster.job(job.id))
            return found.state is State.RUNNING and found.ending is None

        self.world.until(runs, f"job {job.id} to run")
        return found.attempt


@pytest.fixture
def mortal(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "MAIN", DYING + MAIN)
    world = World(tmp_path)
    try:
        yield Mortal(world)
    finally:
        world.close()


@pytest.mark.timeout(900)  # some forty jobs, and twenty times `up`
def test_at_every_transaction_of_two_jobs(mortal):
    """One that succeeds, one that is cancelled: each ends as it should, once, by one process."""
    world, jobs = mortal.world, 0
    for number, side in POINTS:
        name = f"{number}-{side}"
        mortal.dies(number, side)
        quick = mortal.submit(QUICK, f"quick-{name}")
        done = mortal.wait(quick)
        assert (done.state, done.attempt, done.exit_code) == (State.SUCCEEDED, 0, 0)
        assert (world.folder / f"ends-quick-{name}").read_text() == "0\n"
        stays = mortal.submit(STAYS, f"stays-{name}")
        assert mortal.until_running(stays) == 0
        process = world.pid_in(f"pid-stays-{name}")
        mortal.insist(lambda cluster, id=stays.id: cluster.cancel(id))
        done = mortal.wait(stays)
        assert (done.state, done.attempt, done.exit_code) == (State.CANCELLED, 0, 143)
        assert is_gone(process)
        for job in (quick, stays):
            steps = mortal.insist(lambda cluster, id=job.id: cluster.history(id))
            assert [step.seq for step in steps] == list(range(len(steps)))
            assert sum(step.state in TERMINAL for step in steps) == 1
        jobs += 2
        assert len(mortal.insist(lambda cluster: cluster.jobs())) == jobs
        if not mortal.has_died:
            break
    assert number > 8, "both were submitted, placed, seen to run and to end"
    mortal.end()


def test_at_every_transaction_of_its_start(mortal):
    """A job runs meanwhile, and goes on; its agent, too."""
    world = mortal.world
    job = mortal.submit(WAITS, "waits")
    process = world.pid_in("pid-0")
    mortal.up.process.kill()
    mortal.mourn()
    for number, side in POINTS:
        mortal.dies(number, side)
        if mortal.is_born():
            break
        assert mortal.has_died
        assert not is_gone(process)
    assert number > 2, "the store was opened, and its clock set"
    assert not mortal.insist(lambda cluster: cluster.job(job.id)).is_over
    (world.folder / "go").touch()
    done = mortal.wait(job)
    assert (done.state, done.attempt) == (State.SUCCEEDED, 0)
    assert (world.folder / "ends").read_text() == "done\n"
    mortal.end()


def test_at_every_transaction_of_its_end(mortal):
    """It is taken down while a job runs: the next one has the job, in the same process or in
    another, when that one has ended.
    """
    world = mortal.world
    job = mortal.submit(WAITS, "waits")
    before = -1, None
    for number, side in POINTS:
        attempt = mortal.until_running(job)
        process = world.pid_in(f"pid-{attempt}")
        if attempt == before[0]:
            assert process == before[1]
        else:
            assert attempt > before[0]
            assert before[1] is None or is_gone(before[1])
        before = attempt, process
        mortal.dies(number, side)
        mortal.up.signal(signal.SIGTERM)
        if mortal.up.process.wait(WAIT_S) == 0:
            break
        mortal.mourn()
        mortal.start()
    assert number > 2, "it was noted that it goes down, and that its jobs have ended"
    assert world.processes() == []
    mortal.order.unlink()
    mortal.start()
    (world.folder / "go").touch()
    done = mortal.wait(job)
    assert (done.state, done.node_failures) == (State.SUCCEEDED, 0)
    assert (world.folder / "ends").read_text() == "done\n"
    mortal.end()
