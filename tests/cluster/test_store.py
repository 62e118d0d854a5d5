"""The store: what it has taken it has for ever, whoever is killed, and nobody else writes to it."""

from __future__ import annotations

import errno
import os
import random
import shutil
import sqlite3
import subprocess
import sys

import msgspec
import pytest

from manyhands.cluster import store as store_module
from manyhands.cluster.errors import Fenced, StoreBusy, StoreError, StoreFull, StoreHeld
from manyhands.cluster.job import Job, Spec, State, Step, moved
from manyhands.cluster.jobs import Changes, HostRow
from manyhands.cluster.store import Store
from tests.cluster.model import hello


@pytest.fixture
def path(tmp_path):
    return tmp_path / "jobs.db"


@pytest.fixture
def store(path):
    with Store.open(path) as made:
        yield made


def job(id=1, **changes):
    return Job(id=id, spec=Spec(command=("x",)), submitted_s=float(id), reason="new", **changes)


def changes(*jobs, **more):
    steps = tuple(
        Step(job=one.id, seq=one.seq, state=one.state, reason=one.reason, at_s=1.5) for one in jobs
    )
    return Changes(jobs=jobs, steps=steps, **more)


def asked(one, at_s):
    return {"job": one.id, "seq": one.seq, "state": one.state, "reason": "", "at_s": at_s}


def cancelled(one):
    return moved(one, State.CANCELLED, "no", exit_code=143)


def test_what_is_written_is_read(store, path):
    first, second = job(1, key="k"), job(2)
    row = HostRow(hello=hello("a"), inherited=((1, 0), (2, 3)))
    store.write(changes(first, second, hosts=(row, HostRow(hello=hello("b")))))
    over = cancelled(second)
    store.write(changes(over, gone=("b",)))
    store.close()
    with Store.open(path) as again:
        assert again.load() == ([first], [row], 3)
        assert [again.job(id) for id in (0, 1, 2, 3, -1, 2**70)] == [
            *(None, first, over, None),
            *(None, None),
        ]
        assert (again.by_key("k"), again.by_key("other")) == (first, None)
        assert [step.seq for step in again.history(2)] == [0, 1]
        assert again.history(2)[1] == Step(
            job=2, seq=1, state=State.CANCELLED, reason="no", at_s=1.5
        )
        assert again.history(99) == again.history(2**80) == []
        assert again.jobs() == [over, first]
        assert again.jobs(limit=1) == [over]
        assert again.jobs([State.PENDING]) == [first]
        assert again.jobs([State.PENDING, State.CANCELLED], 5) == [over, first]
        assert again.cluster == store.cluster
        assert again.generation == store.generation + 1


def test_a_new_store_is_for_its_owner_only(store, path):
    store.write(changes(job()))
    for file in path.parent.iterdir():
        assert file.stat().st_mode & 0o077 == 0, file


def test_what_is_over_cannot_be_written_again(store):
    store.write(changes(job(1)))
    over = cancelled(job(1))
    store.write(changes(over))
    again = msgspec.structs.replace(over, seq=2, state=State.PENDING)
    with pytest.raises(StoreError, match="a job that is over cannot change"):
        store.write(changes(job(2), again))
    assert (store.job(1), store.job(2)) == (over, None), "all of it or nothing"


def test_one_step_of_a_history_is_written_once(store):
    store.write(changes(job(1)))
    with pytest.raises(StoreError, match="UNIQUE"):
        store.write(changes(job(1)))
    with pytest.raises(StoreError, match=r"jobs\.key"):
        store.write(changes(job(2, key="k"), job(3, key="k")))
    store.write(changes(job(2, key="k")))


def test_one_coordinator_at_a_time(store, path):
    with pytest.raises(StoreHeld, match=f"held by pid {os.getpid()}") as caught:
        Store.open(path)
    assert caught.value.pid == os.getpid()
    store.write(changes(job()))
    store.close()
    store.close()
    with pytest.raises(StoreError, match="has been closed"):
        store.write(changes(job(2)))
    with pytest.raises(StoreError, match="has been closed"):
        store.jobs()
    with Store.open(path) as other:
        assert other.job(1)


def test_where_locks_do_not_work_the_older_one_is_fenced(store, path):
    path.with_name("jobs.db.lock").unlink()
    with Store.open(path) as newer:
        with pytest.raises(Fenced) as caught:
            store.write(changes(job()))
        assert (caught.value.own, caught.value.found) == (1, 2)
        assert newer.load().jobs == []
        newer.write(changes(job()))


def test_two_that_open_it_at_once_are_not_the_same(path, monkeypatch):
    """The number is read in the transaction that counts it up: here another comes right after."""
    monkeypatch.setattr(store_module, "_lock", lambda path: os.open(path.parent, os.O_RDONLY))
    real, numbers = Store.__init__, []

    def init(self, *arguments):
        monkeypatch.setattr(Store, "__init__", real)
        with Store.open(path) as other:
            numbers.append(other.generation)
        real(self, *arguments)

    monkeypatch.setattr(Store, "__init__", init)
    with Store.open(path) as made:
        assert [made.generation, *numbers] == [1, 2]
        with pytest.raises(Fenced):
            made.write(changes(job()))


def test_who_is_fenced_is_told_without_writing(store, path):
    store.check()
    path.with_name("jobs.db.lock").unlink()
    with Store.open(path) as newer:
        newer.check()
        with pytest.raises(Fenced):
            store.check()


def test_what_is_written_is_on_the_disk_before_it_is_acknowledged(store):
    """A kill does not show it: the kernel keeps what was written. A power cut does."""
    assert store._writer.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
    assert store._writer.execute("PRAGMA journal_mode").fetchone() == ("wal",)


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ((), [8, 7, 6]),
        ([State.PENDING], [8, 7, 5]),
        ([State.PENDING, State.CANCELLED], [8, 7, 6]),
    ],
)
def test_a_short_list_does_not_visit_every_job(store, states, expected):
    store.write(changes(*(job(id) for id in range(1, 9))))
    store.write(changes(*(cancelled(job(id)) for id in (2, 4, 6))))
    asked = []
    store._lister.set_trace_callback(asked.append)
    assert [one.id for one in store.jobs(states, 3)] == expected
    store._lister.set_trace_callback(None)
    [sql] = asked
    plan = [row[3] for row in store._lister.execute(f"EXPLAIN QUERY PLAN {sql}")]
    looks = [line for line in plan if " jobs" in line]
    if states:
        assert len(looks) == len(states)
        assert all("(state=?)" in line for line in looks), plan
    else:
        assert plan == ["SCAN jobs"], "by number, backwards, until there are enough"
    # What is sorted are at most the few that each state gives, together.
    assert sum("TEMP B-TREE" in line for line in plan) <= len(states), plan


def test_somebody_else_who_locks_the_file_is_said(store, path):
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    store._writer.execute("PRAGMA busy_timeout = 1")
    with pytest.raises(StoreBusy, match="locked by another program"):
        store.write(changes(job()))
    other.execute("ROLLBACK")
    other.close()
    store.write(changes(job()))


def test_a_lock_that_is_held_is_waited_for_less_than_a_lease(store):
    assert store._writer.execute("PRAGMA busy_timeout").fetchone() == (2000,)


def test_time_is_the_same_for_all_coordinators_of_one_boot(store, path):
    assert store.offset_s("boot-1", 1000.0, now_s=5.0) == 1000.0
    assert store.offset_s("boot-1", 9.0, now_s=6.0) == 1000.0, "somebody has set the time"
    store.close()
    with Store.open(path) as again:
        assert again.offset_s("boot-1", 5e6, now_s=7.0) == 1000.0
        assert again.offset_s("boot-2", 2000.0, now_s=1.0) == 2000.0
        over = cancelled(job(2))
        again.write(changes(job(1), job(2)))
        again.write(Changes(jobs=(over,), steps=(Step(**asked(over, at_s=9e9)),)))
        assert again.offset_s("boot-3", 0.0, now_s=0.5) == 1.0, "not before what has happened"
        assert again.offset_s("", 3000.0, now_s=0.5) == 3000.0
        assert again.offset_s("", 4000.0, now_s=0.5) == 4000.0, "where nobody knows, every time"


def test_who_holds_it_is_a_courtesy(path, monkeypatch):
    """A disk that is full does not keep a coordinator from starting, and leaves no lock behind."""

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with Store.open(path):
        monkeypatch.undo()
        with pytest.raises(StoreHeld, match="held by another coordinator"):
            Store.open(path)
    with Store.open(path):
        pass


@pytest.mark.parametrize(
    "content", [b"not a database at all" * 100, b"SQLite format 3\0" + b"x" * 5000]
)
def test_a_file_that_is_no_database(path, content):
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"damaged or not a store|cannot be used"):
        Store.open(path)
    assert path.read_bytes() == content


def test_a_database_that_is_not_ours(path):
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE recipes (name)")
    other.close()
    with pytest.raises(StoreError, match="but not a store of jobs"):
        Store.open(path)


def test_a_store_of_another_version(store, path):
    store.close()
    with sqlite3.connect(path) as raw:
        raw.execute("PRAGMA user_version = 99")
    raw.close()
    with pytest.raises(StoreError, match="its schema is 99"):
        Store.open(path)


def test_damage_is_found_when_it_is_opened(store, path):
    for id in range(1, 300):
        store.write(changes(job(id)))
    store.close()
    data = bytearray(path.read_bytes())
    rng = random.Random(1)
    for page in range(4, len(data) // 4096):
        data[page * 4096 : page * 4096 + 64] = rng.randbytes(64)
    path.write_bytes(data)
    with pytest.raises(StoreError, match="damaged") as caught:
        Store.open(path)
    assert "move it away" in caught.value.hint


def test_a_row_that_is_not_a_job(store, path):
    store.write(changes(job()))
    store.close()
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE jobs SET value = '{}'")
    raw.close()
    with Store.open(path) as again, pytest.raises(StoreError, match="damaged"):
        again.load()


def test_places_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path, tmp_path / "file" / "jobs.db"):
        with pytest.raises(StoreError, match="cannot be used"):
            Store.open(place)


def test_a_store_that_is_full_and_then_is_not(store):
    store.write(changes(job(1)))
    [pages] = store._writer.execute("PRAGMA page_count").fetchone()
    store._writer.execute(f"PRAGMA max_page_count = {pages}")
    large = Job(id=2, spec=Spec(command=("x" * 100_000,)), submitted_s=1.0)
    with pytest.raises(StoreFull, match="no room"):
        store.write(changes(cancelled(job(1)), large))
    assert store.load().jobs == [job(1)]
    store._writer.execute("PRAGMA max_page_count = 1000000")
    store.write(changes(cancelled(job(1)), large))
    assert store.load().jobs == [large]


FULL_DISK = """
import os, resource, signal
from pathlib import Path
from manyhands.cluster.errors import StoreFull
from manyhands.cluster.store import Store
from tests.cluster.test_store import changes, job

disk, kind = Path(os.environ["DISK"]), os.environ["KIND"]
ballast = disk / "ballast"

def fill():
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass

_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

def limit(most):
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
kinds = {
    "disk": (fill, ballast.unlink),
    "limit": (lambda: limit(200_000), lambda: limit(hard)),
}
fill_up, make_room = kinds[kind]
with Store.open(disk / "jobs.db") as store:
    store.write(changes(job(1)))
    fill_up()
    stored, id = [1], 2
    try:
        while True:
            store.write(changes(job(id)))
            stored.append(id)
            id += 1
    except StoreFull as error:
        print(error.message.partition(" for")[0])
    assert [one.id for one in store.load().jobs] == stored
    try:
        store.write(changes(job(id)))
    except StoreFull:
        print("still")
    make_room()
    store.write(changes(job(id)))
    stored.append(id)
with Store.open(disk / "jobs.db") as store:
    assert [one.id for one in store.load().jobs] == stored
print("went on")
"""


def on_a_full_disk(folder, kind, *around):
    env = os.environ | {"DISK": str(folder), "KIND": kind}
    command = [*around, sys.executable, "-c", FULL_DISK]
    ran = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return ran.stdout.splitlines()


def test_files_that_may_not_grow_any_more(tmp_path):
    said = on_a_full_disk(tmp_path, "limit")
    assert said[1:] == ["still", "went on"]
    assert "jobs.db cannot be written (disk I/O error)" in said[0]


def test_a_disk_that_is_full(tmp_path):
    """A small one, where we may mount one."""
    mount = ["sh", "-c", 'mount -t tmpfs -o size=1m none "$DISK" && exec "$@"', "sh"]
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    small = ["unshare", *user, "--mount", *mount]
    env = os.environ | {"DISK": str(tmp_path)}
    if not shutil.which("unshare") or subprocess.run([*small, "true"], env=env).returncode:
        pytest.skip("no small disk can be mounted here: NOT TESTED")
    assert on_a_full_disk(tmp_path, "disk", *small) == ["no room", "still", "went on"]


WRITER = """
import sys
from manyhands.cluster.store import Store
from tests.cluster.test_store import changes, cancelled, job

with Store.open(sys.argv[1]) as store:
    id = store.load().next_id
    while True:
        store.write(changes(job(id, key=f"key-{id}")))
        print(id, flush=True)
        if id % 3 == 0:
            store.write(changes(cancelled(job(id, key=f"key-{id}"))))
            print(-id, flush=True)
        id += 1
"""


def test_killed_at_any_point_it_has_all_that_was_acknowledged(path):
    rng, said = random.Random(7), []
    for _ in range(6):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
        ) as writer:
            said += [int(writer.stdout.readline()) for _ in range(rng.randint(1, 40))]
            writer.kill()
            said += [int(line) for line in writer.stdout.read().split("\n")[:-1]]
    with Store.open(path) as store:
        there = [one.id for one in reversed(store.jobs())]
        assert there == list(range(1, len(there) + 1))
        # What was written and not said before the kill may be there: one a life.
        assert 0 <= len(there) - max(said) <= 1
        for number in said:
            steps = store.history(abs(number))
            assert [step.seq for step in steps] == list(range(len(steps)))
            assert store.job(abs(number)).key == f"key-{abs(number)}"
            assert number > 0 or store.job(-number).state is State.CANCELLED
        assert store.generation == 7


def test_many_jobs_that_are_over_are_not_loaded(store):
    fresh = [job(id) for id in range(1, 10_001)]
    store.write(changes(*fresh))
    store.write(changes(*(cancelled(one) for one in fresh[:-10])))
    assert [one.id for one in store.load().jobs] == list(range(9991, 10_001))
    assert store.load().next_id == 10_001
