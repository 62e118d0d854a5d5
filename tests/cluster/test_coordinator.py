"""The coordinator: many at once, one truth on disk, nothing said before it is stored."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from manyhands.cluster.coordinator import Coordinator
from manyhands.cluster.errors import (
    CoordinatorClosed,
    Fenced,
    HostTaken,
    KeyTaken,
    NoSuchJob,
    NotAHost,
    StillThere,
    StoreFull,
    Unplaceable,
)
from manyhands.cluster.job import Failure, Spec, State
from manyhands.cluster.messages import Holding, Phase, RankEnd, Status
from manyhands.cluster.store import Store
from manyhands.core.errors import UsageError
from tests.cluster.model import first_come, hello

SPEC = Spec(command=("run",))
LONG_S = 60.0  # nobody waits so long unless something is wrong


@contextmanager
def coordinator(path, **arguments):
    arguments = {"lease_s": 300.0, "decide": first_come, **arguments}
    with Store.open(path) as store, Coordinator(store, **arguments) as made:
        made.store = store
        yield made


@pytest.fixture
def path(tmp_path):
    return tmp_path / "jobs.db"


class Hands(threading.Thread):
    """An agent of one host: every rank runs until `end` says how it ends."""

    def __init__(self, office, host="a", slots=2, agent="agent-1"):
        super().__init__(name=f"agent of {host}")
        self.office, self.host, self.agent = office, host, agent
        self.held: dict[tuple[int, int], Holding] = {}
        self.lock = threading.Lock()
        self.leaves = False
        self.error = None
        office.hello(hello(host, slots=slots, agent=agent))
        self.say()
        self.start()

    def run(self):
        seen = -1
        try:
            while not self.leaves:
                wants = self.office.wants(self.host, self.agent, seen, LONG_S)
                seen = wants.version
                with self.lock:
                    for want in wants.wants:
                        self.act(want)
                    wanted = {(want.job, want.attempt) for want in wants.wants}
                    self.held = {key: held for key, held in self.held.items() if key in wanted}
                self.say()
                self.leaves = wants.leave
        except (CoordinatorClosed, NotAHost, Fenced) as error:
            self.error = error

    def act(self, want):
        key = (want.job, want.attempt)
        ranks = [rank for rank, _ in want.task.ranks]
        held = self.held.get(key)
        if want.stop:
            if held is None or held.phase is not Phase.ENDED:
                self.put(key, Phase.ENDED, [(rank, 143) for rank in ranks])
        elif held is None or held.phase is Phase.READY:
            self.put(key, Phase.RUNNING if want.task.master_port else Phase.READY)

    def put(self, key, phase, ends=(), failure=None):
        self.held[key] = Holding(
            job=key[0],
            attempt=key[1],
            phase=phase,
            port=5000,
            ended=tuple(RankEnd(rank=rank, exit_code=code, at_s=1.0) for rank, code in ends),
            failure=failure,
        )

    def say(self):
        with self.lock:
            status = Status(agent=self.agent, holdings=tuple(self.held.values()))
        self.office.status(self.host, status)

    def end(self, job, ranks, code=0):
        with self.lock:
            [key] = [key for key in self.held if key[0] == job]
            failure = Failure(rank=ranks[0], host=self.host, exit_code=code) if code else None
            self.put(key, Phase.ENDED, [(rank, code) for rank in ranks], failure)
        self.say()


def until(office, what):
    """Wait until something holds; looks again after every change."""
    changed = threading.Event()
    stop = office.listen(lambda topics: changed.set())
    try:
        while not what():
            assert changed.wait(LONG_S), "nothing happens any more"
            changed.clear()
    finally:
        stop()


def poll(office, host):
    """Ask for what is newer than the newest, so that the answer is held back."""
    seen = office.wants(host, "agent-1", -1, 0.0).version
    office.wants(host, "agent-1", seen, 0.0)


def rest(office):
    """Until its ticker has nothing to do; it does not say so to anybody."""
    while office._book.is_stale:
        threading.Event().wait(0.005)


def state_is(office, id, *states):
    return lambda: office.job(id).state in states


def test_jobs_run_on_agents(path):
    with coordinator(path, hub=lambda job, attempt: ("code", f"job-{job}-{attempt}")) as office:
        a, b = Hands(office, "a", 2), Hands(office, "b", 1)
        job, new = office.submit(Spec(command=("run",), gpus=3))
        assert new
        until(office, state_is(office, job.id, State.RUNNING))
        waiting, _ = office.submit(SPEC)
        until(office, lambda: office.job(waiting.id).reason == "waits for 1 slots")
        assert [one.reason for one in office.jobs(states=[State.PENDING])] == ["waits for 1 slots"]
        assert office.nodes()[0].busy == {"0": 1, "1": 1}
        assert office.wait(1, 0.0).state is State.RUNNING
        a.end(1, [0, 1])
        b.end(1, [2])
        assert office.wait(1, LONG_S).state is State.SUCCEEDED
        until(office, state_is(office, 2, State.RUNNING))
        a.end(2, [0], code=7)
        assert office.wait(2, LONG_S).exit_code == 7
        steps = [step.state for step in office.history(1)]
        assert steps == ["PENDING", "STARTING", "RUNNING", "SUCCEEDED"]
        assert [one.id for one in office.jobs()] == [2, 1]
        assert [one.id for one in office.jobs(limit=1)] == [2]
        assert office.cancel(1) == office.job(1), "what is over stays as it is"
    a.join()
    b.join()
    assert isinstance(a.error, CoordinatorClosed)


def test_errors_of_users_and_agents(path):
    def check(spec):
        if spec.command == ("nothing-of-this-name",):
            raise UsageError("not found")

    with coordinator(path, check=check) as office:
        for ask in (office.job, office.history, office.cancel, lambda id: office.wait(id, 0)):
            with pytest.raises(NoSuchJob):
                ask(5)
        with pytest.raises(NotAHost):
            office.status("a", Status(agent="x"))
        with pytest.raises(NotAHost):
            office.wants("a", "x", 0, 0.0)
        welcome = office.hello(hello("a"))
        assert (welcome.lease_s, welcome.cluster) == (300.0, office.store.cluster)
        with pytest.raises(Unplaceable):
            office.submit(Spec(command=("run",), gpus=3))
        poll(office, "a")
        with pytest.raises(HostTaken):
            office.hello(hello("a", agent="agent-2"))
        office.lost("a", "agent-1")
        office.hello(hello("a", agent="agent-2"))
        with pytest.raises(UsageError, match="not found"):
            office.submit(Spec(command=("nothing-of-this-name",)))
        assert not office.jobs()
    with pytest.raises(CoordinatorClosed):
        office.submit(SPEC)


def test_one_key_many_times_at_once_is_one_job(path):
    with coordinator(path) as office, ThreadPoolExecutor(20) as pool:
        office.hello(hello("a"))
        answers = list(pool.map(lambda _: office.submit(SPEC, "key"), range(60)))
        assert {job.id for job, _ in answers} == {1}
        assert sum(new for _, new in answers) == 1
        with pytest.raises(KeyTaken):
            office.submit(Spec(command=("other",)), "key")
        office.cancel(1)
        assert office.submit(SPEC, "key") == (office.job(1), False)
    with coordinator(path) as office:
        assert office.submit(SPEC, "key") == (office.job(1), False)


def test_fifty_clients_at_once(path):
    """Every submission is there once, whoever got its answer; many share one transaction."""
    barrier = threading.Barrier(50)
    with coordinator(path) as office, ThreadPoolExecutor(50) as pool:
        office.hello(hello("a"))
        writes, write = [], office.store.write

        def write_together(changes):
            # The first waits until all others have asked for something.
            while not writes and len(changes.jobs) + len(office._queue) < 50:
                threading.Event().wait(0.001)
            writes.append(len(changes.jobs))
            write(changes)

        office.store.write = write_together

        def client(number):
            barrier.wait()
            ids = [office.submit(SPEC, f"{number}-{i}")[0].id for i in range(4)]
            assert office.job(ids[0]).key == f"{number}-0"
            office.cancel(ids[1])
            return ids

        ids = [id for mine in pool.map(client, range(50)) for id in mine]
        assert sorted(ids) == list(range(1, 201))
        assert len(office.jobs(states=[State.CANCELLED])) == 50
        assert sum(writes) >= 250
        assert len(writes) < 250, "those who come at once share a transaction"
    with Store.open(path) as store:
        assert len(store.jobs()) == 200
        assert len(store.load().jobs) == 150


def test_one_that_cannot_be_stored_fails_alone(path):
    """Many in one transaction, of which one does not fit: the others are stored."""
    with coordinator(path) as office, ThreadPoolExecutor(8) as pool:
        office.hello(hello("a"))
        write, gate = office.store.write, threading.Event()

        def picky(changes):
            gate.wait(LONG_S)
            if any(job.spec.name == "large" for job in changes.jobs):
                raise StoreFull("disk")
            write(changes)

        office.store.write = picky
        names = ["a", "b", "large", "c", "large", "d"]
        asked = [
            pool.submit(office.submit, Spec(command=("x",), name=name), f"{i}")
            for i, name in enumerate(names)
        ]
        gate.set()
        failed = [isinstance(one.exception(LONG_S), StoreFull) for one in asked]
        assert failed == [name == "large" for name in names]
        office.store.write = write
        assert sorted(job.spec.name for job in office.jobs()) == ["a", "b", "c", "d"]
        assert sorted(job.id for job in office.jobs()) == [1, 2, 3, 4], "no number is lost"
        assert office.submit(Spec(command=("x",), name="large"), "2")[1]


def test_nothing_is_said_that_is_not_stored(path):
    """While a placement is being written, neither users nor agents hear of it; if it cannot be,
    it has not happened, and is made when there is room again.
    """
    with coordinator(path) as office:
        office.hello(hello("a"))
        write, tries = office.store.write, []
        has_room = threading.Event()
        refused = threading.Event()

        def full(changes):
            if any(job.state is State.STARTING for job in changes.jobs) and not has_room.is_set():
                tries.append(changes)
                refused.set()
                raise StoreFull("disk")
            write(changes)

        office.store.write = full
        office.status("a", Status(agent="agent-1"))
        office.submit(SPEC)
        assert refused.wait(LONG_S)
        assert office.job(1).state is State.PENDING
        assert office.wants("a", "agent-1", -1, 0.0).wants == ()
        has_room.set()
        until(office, state_is(office, 1, State.STARTING))
        assert [want.job for want in office.wants("a", "agent-1", -1, 0.0).wants] == [1]
        assert len(office.history(1)) == 2


def test_a_coordinator_that_was_fenced_does_nothing_any_more(path):
    with coordinator(path) as old:
        old.hello(hello("a"))
        hands = Hands(old, "b")
        job, _ = old.submit(SPEC)
        heard = []
        old.listen(heard.append)
        path.with_name("jobs.db.lock").unlink()
        with coordinator(path) as new:
            assert new.job(job.id)
            with pytest.raises(Fenced):
                old.submit(SPEC)
            with pytest.raises(Fenced):
                old.wait(job.id, LONG_S)
            with pytest.raises(Fenced):
                old.wants("a", "agent-1", -1, 0.0)
            assert isinstance(old.failure, Fenced)
            assert heard[-1] is None
            new.submit(SPEC)
            assert len(new.jobs()) == 2
    hands.join()
    assert isinstance(hands.error, Fenced)


def test_a_coordinator_that_comes_back_finds_its_jobs_running(path):
    with coordinator(path) as office:
        hands = Hands(office, "a")
        office.submit(SPEC)
        until(office, state_is(office, 1, State.RUNNING))
        last = office.wants("a", "agent-1", -1, 0.0).version
    hands.join()
    with coordinator(path) as office:
        assert office.job(1).state is State.RUNNING
        assert office.nodes()[0].state == "expected"
        office.hello(hello("a"))
        wants = office.wants("a", "agent-1", last, LONG_S)
        assert wants.version > last, "an agent that waits for more than it has seen must get it"
        assert [want.stop for want in wants.wants] == [False]
        held = Holding(
            job=1,
            attempt=0,
            phase=Phase.ENDED,
            ended=(RankEnd(rank=0, exit_code=0, at_s=1.0),),
        )
        office.status("a", Status(agent="agent-1", holdings=(held,)))
        assert office.wait(1, LONG_S).state is State.SUCCEEDED


def test_silence_is_noticed_without_anybody_asking(path):
    with coordinator(path, lease_s=0.2, margin_s=0.1) as office:
        office.hello(hello("a"))
        office.submit(Spec(command=("run",), max_restarts=0))
        # Heard until it is told of the job, however slow this machine is, and then never again.
        while not office.wants("a", "agent-1", -1, 0.0).wants:
            office.status("a", Status(agent="agent-1"))
            office.wait(1, 0.05)
        job = office.wait(1, LONG_S)
        assert (job.state, job.node_failures) == (State.FAILED, 1)
        assert "host a has not been heard" in job.reason


def test_the_time_limit_is_kept_without_anybody_asking(path):
    with coordinator(path) as office:
        hands = Hands(office)
        office.submit(Spec(command=("run",), time_s=0.2))
        assert office.wait(1, LONG_S).state is State.TIMEOUT
    hands.join()


def test_going_down(path):
    with coordinator(path) as office:
        all_hands = [Hands(office, name, 1) for name in "ab"]
        office.submit(Spec(command=("run",), gpus=2))
        office.submit(SPEC)
        until(office, state_is(office, 1, State.RUNNING))
        office.shut_down(LONG_S)
        assert [job.state for job in office.jobs()] == [State.PENDING, State.PENDING]
        for hands in all_hands:
            hands.join()
            assert hands.leaves
        assert len(office.nodes()) == 2
        office.forget_hosts()
    with coordinator(path) as office:
        assert not office.nodes(), "who comes next is the cluster"
        assert office.history(1)[-1].reason == "to run again: the cluster was taken down"


def test_who_does_not_leave_is_named(path):
    with coordinator(path) as office:
        office.hello(hello("deaf"))
        poll(office, "deaf")
        with pytest.raises(StillThere, match=r"not ended within 0\.05 s: host deaf"):
            office.shut_down(0.05)


def test_a_schedule_with_a_bug_stops_everything_and_says_so(path, monkeypatch):
    seen = []
    monkeypatch.setattr(threading, "excepthook", seen.append)

    def broken(now_s, hosts, entries):
        raise ZeroDivisionError("a bug")

    with coordinator(path, decide=broken) as office:
        until(office, lambda: office.failure is not None)
        with pytest.raises(ZeroDivisionError):
            office.submit(SPEC)
        office._ticker.join()
    assert [one.exc_type for one in seen] == [ZeroDivisionError]


CLIENTS = """
import sys
from concurrent.futures import ThreadPoolExecutor
from manyhands.cluster.coordinator import Coordinator
from manyhands.cluster.job import Spec
from manyhands.cluster.store import Store
from tests.cluster.model import first_come, hello

with Store.open(sys.argv[1]) as store, Coordinator(store, lease_s=60, decide=first_come) as office:
    office.hello(hello("a", agent=f"agent-{store.generation}", slots=1))

    def submit(key):
        job, new = office.submit(Spec(command=("run",)), key)
        sys.stdout.write(f"{key} {job.id} {new}\\n")
        sys.stdout.flush()

    with ThreadPoolExecutor(4) as pool:
        for _ in pool.map(submit, sys.argv[2:]):
            pass
"""


def test_what_is_stored_with_the_end_of_a_job_already_knows_of_it(path):
    """Two cancel one job and a third submits it again, all in one transaction."""
    with coordinator(path) as desk, ThreadPoolExecutor(3) as pool:
        desk.hello(hello("a", slots=1))
        job, _ = desk.submit(SPEC, "key")
        with desk._lock:
            asked = [pool.submit(desk.cancel, job.id) for _ in range(2)]
            queued(desk, 2)
            asked.append(pool.submit(lambda: desk.submit(SPEC, "key")[0]))
            queued(desk, 3)
        told = [one.result(LONG_S) for one in asked]
        assert [(one.id, one.state) for one in told] == [(job.id, State.CANCELLED)] * 3
        assert [step.state for step in desk.history(job.id)] == [State.PENDING, State.CANCELLED]


def queued(desk, number):
    end_s = time.monotonic() + LONG_S
    while len(desk._queue) < number:
        assert time.monotonic() < end_s
        time.sleep(0.001)


def test_killed_while_many_submit_no_job_is_lost_and_none_is_there_twice(path):
    """Clients that got no answer ask again with their key, of whoever is there then."""
    keys = [f"key-{i}" for i in range(200)]
    answers = {}
    for kill_after in (1, 17, 40, None):
        todo = [key for key in keys if key not in answers]
        with subprocess.Popen(
            [sys.executable, "-c", CLIENTS, str(path), *todo], stdout=subprocess.PIPE, text=True
        ) as process:
            lines = []
            if kill_after is not None:
                lines += [process.stdout.readline() for _ in range(kill_after)]
                process.kill()
            lines += process.stdout.read().splitlines(keepends=True)
        for line in lines:
            if line.endswith("\n"):
                key, id, _ = line.split()
                assert answers.setdefault(key, int(id)) == int(id)
    assert sorted(answers) == sorted(keys)
    with Store.open(path) as store:
        assert {job.key: job.id for job in store.jobs()} == answers
        assert sorted(answers.values()) == list(range(1, 201))


def test_only_the_agent_that_holds_a_host_sends_for_it(path):
    with coordinator(path) as office:
        office.hello(hello("a"))
        office.check_sender("a", "agent-1")
        for host, agent in (("a", "agent-2"), ("b", "agent-1")):
            with pytest.raises(NotAHost):
                office.check_sender(host, agent)
