"""Many clients at once, by HTTP, of a coordinator with its real store."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from manyhands.cluster.client import Cluster
from manyhands.cluster.coordinator import Coordinator
from manyhands.cluster.identity import open_identity
from manyhands.cluster.job import State
from manyhands.cluster.logs import Logs
from manyhands.cluster.routes import Role
from manyhands.cluster.server import Server
from manyhands.cluster.store import Store
from tests.cluster.conftest import ANSWER_S
from tests.cluster.model import hello

CLIENTS, EACH = 50, 4
TWINS = (7, 31)  # the numbers of two clients who have one key, for one thing


def key_of(number):
    return f"key-{TWINS[0] if number in TWINS else number}"


def test_fifty_at_once_and_one_key_twice_among_them(tmp_path):
    """Each submission is one job, the twins' too; and what a client was told is what is stored."""
    start = threading.Barrier(CLIENTS)

    def use(code, number):
        with Cluster(code) as cluster:
            start.wait(ANSWER_S)
            mine = [
                cluster.submit(["x"], key=f"{key_of(number)}-{i}", name=f"job-{i}")
                for i in range(EACH)
            ]
            assert cluster.cancel(mine[0].id).state is State.CANCELLED
            assert cluster.wait(mine[0].id, ANSWER_S).exit_code == 143
            assert cluster.submit(["x"], key=mine[1].key, name="job-1").id == mine[1].id
            return {job.key: job.id for job in mine}

    path = tmp_path / "jobs.db"
    with (
        Store.open(path) as store,
        Coordinator(store, lease_s=3600.0) as desk,
        Server(
            desk,
            Logs(tmp_path / "logs", reserve_bytes=0),
            open_identity(tmp_path),
            bind="127.0.0.1:0",
            on_shutdown=lambda: None,
        ) as server,
        ThreadPoolExecutor(CLIENTS) as pool,
    ):
        # It never says what it holds, and so is given nothing: all jobs wait.
        desk.hello(hello("a", slots=1))
        told = list(pool.map(lambda number: use(server.code(Role.USER), number), range(CLIENTS)))
    ids = {key: id for mine in told for key, id in mine.items()}
    assert told[TWINS[0]] == told[TWINS[1]]
    count = (CLIENTS - 1) * EACH
    assert sorted(ids.values()) == list(range(1, count + 1))
    with Store.open(path) as store:
        assert {job.key: job.id for job in store.jobs()} == ids
        states = Counter(job.state for job in store.jobs())
        assert states[State.CANCELLED] == CLIENTS - 1
        assert sum(states.values()) == count
        for id in ids.values():
            steps = store.history(id)
            assert [step.seq for step in steps] == list(range(len(steps)))
