"""The coordinator when it is fenced, its disk fails, its clock is set, or it has to wait."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from msgspec import structs

from manyhands.cluster.errors import Fenced, NotAHost, StoreBusy, StoreError, StoreFull
from manyhands.cluster.job import Spec, State
from manyhands.cluster.messages import Holding, Origin, Phase, RankEnd, Status
from manyhands.cluster.store import Store
from tests.cluster.model import hello
from tests.cluster.test_coordinator import (
    LONG_S,
    SPEC,
    Hands,
    coordinator,
    poll,
    rest,
    state_is,
    until,
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "jobs.db"


WORDS = {
    "hello": lambda office: office.hello(hello("a")),
    "status": lambda office: office.status("a", Status(agent="agent-1")),
    "wants": lambda office: office.wants("a", "agent-1", -1, 0.0),
    "again": lambda office: office.wants("a", "agent-1", -1, 0.0, again=True),
}


@pytest.mark.parametrize("word", WORDS.values(), ids=WORDS)
def test_a_coordinator_that_was_fenced_renews_no_lease(path, word):
    """The words of a calm cluster change nothing; who answers them must be its coordinator."""
    with coordinator(path) as old:
        old.hello(hello("a"))
        old.status("a", Status(agent="agent-1"))
        rest(old)
        path.with_name("jobs.db.lock").unlink()
        with coordinator(path), pytest.raises(Fenced):
            word(old)
        assert isinstance(old.failure, Fenced)


def test_a_poll_that_is_looked_at_again_is_no_word_of_its_agent(path):
    now_s = [1000.0]
    with coordinator(path, clock=lambda: now_s[0]) as office:
        office.hello(hello("a"))
        for at_s, again, heard_s in [(1001.0, False, 1001.0), (1002.0, True, 1001.0)]:
            now_s[0] = at_s
            office.wants("a", "agent-1", -1, 0.0, again=again)
            assert office.nodes()[0].heard_s == heard_s
        with pytest.raises(NotAHost):
            office.wants("a", "agent-2", -1, 0.0, again=True)


def test_a_host_that_polls_after_a_silence_falls_silent_again(path):
    with coordinator(path, lease_s=0.1, margin_s=0.1) as office:
        office.hello(hello("a"))

        def silent():
            return office.nodes()[0].state == "silent"

        for _ in range(2):
            while not silent():
                threading.Event().wait(0.01)
            while silent():  # a machine that is busy may take a lease to look
                office.wants("a", "agent-1", -1, 0.0)
        while not silent():
            threading.Event().wait(0.01)


def test_a_long_list_keeps_nobody_waiting(path):
    with coordinator(path) as office, ThreadPoolExecutor(1) as pool:
        office.hello(hello("a"))
        office.submit(SPEC, "key")
        office.cancel(1)
        with office.store._list_lock:  # as if another list were being read
            listed = pool.submit(office.jobs)
            office.status("a", Status(agent="agent-1"))
            assert office.job(1) == office.submit(SPEC, "key")[0]
            assert not listed.done()
        assert [job.id for job in listed.result(LONG_S)] == [1]


def test_a_look_at_a_job_that_is_over_keeps_nobody_waiting(path):
    with coordinator(path) as office, ThreadPoolExecutor(2) as pool:
        office.hello(hello("a"))
        office.submit(SPEC)
        office.cancel(1)
        with office.store._read_lock:
            looks = [pool.submit(office.job, 1), pool.submit(office.wait, 1, LONG_S)]
            office.status("a", Status(agent="agent-1"))
            assert not any(look.done() for look in looks)
        assert [look.result(LONG_S).state for look in looks] == [State.CANCELLED] * 2


def together(office, pool, *changes):
    """Have several changes made in one batch."""
    with office._lock:
        asked = [pool.submit(change) for change in changes]
        while len(office._queue) < len(changes):
            threading.Event().wait(0.001)
    return asked


def test_what_is_stored_is_not_done_again_when_something_fails_afterwards(path):
    """Submissions without a key would be there twice."""
    with coordinator(path) as office, ThreadPoolExecutor(2) as pool:
        office.hello(hello("a"))

        def broken(topics):
            raise ZeroDivisionError("a bug")

        rest(office)
        stop = office.listen(broken)
        asked = together(office, pool, *[lambda: office.submit(SPEC)] * 2)
        assert sorted(one.result(LONG_S)[0].id for one in asked) == [1, 2]
        assert isinstance(office.failure, ZeroDivisionError)
        assert len(office.store.jobs()) == 2
        stop()


def test_a_file_that_is_locked_costs_everybody_one_wait(path):
    with coordinator(path) as office, ThreadPoolExecutor(4) as pool:
        office.hello(hello("a"))
        rest(office)
        tries, write = [], office.store.write

        def busy(changes):
            tries.append(changes)
            raise StoreBusy("file")

        office.store.write = busy
        asked = together(office, pool, *[lambda: office.submit(SPEC)] * 4)
        assert all(isinstance(one.exception(LONG_S), StoreBusy) for one in asked)
        assert len(tries) == 1
        office.store.write = write
        assert office.submit(SPEC)[0].id == 1


def test_a_disk_that_is_full_is_said_once(path, caplog, monkeypatch):
    monkeypatch.setattr("manyhands.cluster.coordinator.RETRY_S", 0.01)
    with coordinator(path) as office:
        office.hello(hello("a"))
        tries, enough, write = [], threading.Event(), office.store.write

        def full(changes):
            if any(job.state is State.STARTING for job in changes.jobs) and not enough.is_set():
                tries.append(changes)
                if len(tries) == 3:
                    enough.set()
                raise StoreFull("disk")
            write(changes)

        office.store.write = full
        office.status("a", Status(agent="agent-1"))
        office.submit(SPEC)
        until(office, state_is(office, 1, State.STARTING))
        assert len(tries) == 3
        said = [one.getMessage() for one in caplog.records if "neither start nor end" in one.msg]
        assert len(said) == 1
        assert office.failure is None


def test_a_disk_that_fails_ends_it(path, caplog):
    with coordinator(path) as office:
        office.hello(hello("a"))

        def torn(changes):
            raise StoreError("disk I/O error")

        office.store.write = torn
        with pytest.raises(StoreError, match="I/O"):
            office.submit(SPEC)
        assert str(office.failure) == "disk I/O error"
        assert "cannot go on: disk I/O error" in caplog.text


def test_a_users_agent_that_went_between_two_questions_is_not_waited_for(path):
    """It was answered, and never asked again: nothing of its end is ever heard."""
    with coordinator(path) as office:
        office.hello(hello("a"))
        office.wants("a", "agent-1", -1, 0.0)
        office.shut_down(100 * LONG_S)


def test_a_host_without_jobs_that_falls_silent_is_not_waited_for(path):
    with coordinator(path, lease_s=0.1, margin_s=0.1) as office:
        office.hello(hello("a"))
        poll(office, "a")
        office.shut_down(100 * LONG_S)  # nobody wakes it but the one that finds the silence


def test_setting_the_time_ends_no_limit(path, monkeypatch):
    """Not even that of an attempt which goes on while the coordinator is restarted."""
    with coordinator(path) as office:
        hands = Hands(office)
        office.submit(Spec(command=("run",), time_s=LONG_S))
        until(office, state_is(office, 1, State.RUNNING))
    hands.join()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 1e6)
    with coordinator(path) as office:
        office.hello(hello("a"))
        held = tuple(hands.held.values())
        office.status("a", Status(agent="agent-1", holdings=held))
        rest(office)
        assert office.job(1).ending is None
        assert office.submit(SPEC)[0].submitted_s - office.job(1).submitted_s < LONG_S


@pytest.mark.parametrize("code", [0, 143])
def test_no_agent_leaves_before_it_is_stored_what_its_jobs_become(path, monkeypatch, code):
    """It would end them, and they would have ended by themselves: well, or by the host's doing."""
    monkeypatch.setattr("manyhands.cluster.coordinator.RETRY_S", 0.01)
    of_up = structs.replace(hello("a"), origin=Origin.UP, terms="old")
    running = Holding(job=1, attempt=0, phase=Phase.RUNNING, port=5000)
    with coordinator(path) as office:
        office.hello(of_up)
        office.status("a", Status(agent="agent-1"))
        office.submit(SPEC)
        until(office, state_is(office, 1, State.STARTING))
        office.status("a", Status(agent="agent-1", holdings=(running,)))
    tries, has_room = threading.Semaphore(0), threading.Event()
    write = Store.write

    def full(store, changes):
        if not has_room.is_set():
            tries.release()
            raise StoreFull("disk")
        write(store, changes)

    monkeypatch.setattr(Store, "write", full)
    with coordinator(path, terms={"a": "new"}) as office:
        assert tries.acquire(timeout=LONG_S)
        office.status("a", Status(agent="agent-1", holdings=(running,)))
        before = office.wants("a", "agent-1", -1, 0.0)
        assert not before.leave
        assert not before.wants[0].stop
        has_room.set()
        told = office.wants("a", "agent-1", before.version, LONG_S)
        assert told.leave
        assert told.wants[0].stop
        ends = (RankEnd(rank=0, exit_code=code, at_s=1.0),)
        ended = structs.replace(running, phase=Phase.ENDED, ended=ends)
        office.status("a", Status(agent="agent-1", holdings=(ended,), rests=True))
        job = office.job(1)
        assert (job.state, job.preemptions, job.node_failures) == (State.PENDING, 1, 0)


def test_a_cluster_that_could_not_store_that_it_goes_down_tells_nobody_to_leave(path, monkeypatch):
    """Who asked for it hears of the disk; whoever else writes next is heard by agents, too."""
    monkeypatch.setattr("manyhands.cluster.coordinator.RETRY_S", LONG_S)
    with coordinator(path) as office:
        hands = Hands(office, slots=1)
        office.submit(SPEC)
        until(office, state_is(office, 1, State.RUNNING))
        rest(office)
        write = office.store.write

        def full(changes):
            if any(job.ending is not None for job in changes.jobs):
                raise StoreFull("disk")
            write(changes)

        office.store.write = full
        with pytest.raises(StoreFull):
            office.shut_down()
        office.submit(SPEC)  # fits
        assert not office.wants("a", "agent-1", -1, 0.0).leave
        office.store.write = write
        office.shut_down()
        hands.join(LONG_S)
        assert hands.leaves
        assert office.job(1).preemptions == 1
