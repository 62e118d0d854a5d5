"""The API: every route over real sockets, its document, and what a fuzzer finds."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading

import msgspec
import pytest

from manyhands.cluster import errors
from manyhands.cluster.api import Api, is_written
from manyhands.cluster.bell import Bell, Gone
from manyhands.cluster.coordinator import Coordinator
from manyhands.cluster.desk import HttpError
from manyhands.cluster.gate import MADE_KNOWN, Gate
from manyhands.cluster.identity import open_identity
from manyhands.cluster.job import Job, Spec, State
from manyhands.cluster.limits import HttpLimits
from manyhands.cluster.logs import Logs
from manyhands.cluster.messages import Hello, Kind, Slot, Status, Wants
from manyhands.cluster.openapi import document
from manyhands.cluster.routes import ROUTES, Role
from manyhands.cluster.server import Server
from manyhands.cluster.store import Store
from tests.cluster.conftest import problem

HELLO = Hello(version="1", host="h", agent="a", address="127.0.0.1", slots=(), pid=1)
JSON = ["Content-Type: application/json"]


def submission(key="", **spec):
    return json.dumps({"spec": {"command": ["x"], **spec}, "key": key}).encode()


def post(served, body):
    return served.request("POST", "/v1/jobs", token=served.user, headers=JSON, body=body)


# The document


def test_the_document_has_every_route_and_no_other():
    paths = document()["paths"]
    described = {(path, method.upper()) for path, methods in paths.items() for method in methods}
    assert described == {(route.path, route.method) for route in ROUTES}
    for route in ROUTES:
        operation = paths[route.path][route.method.lower()]
        roles = Role if route.role is None else [route.role]
        assert operation["security"] == [{role.value: []} for role in roles]
        assert "401" in operation["responses"]
        named = {part["name"] for part in operation["parameters"] if part["in"] == "path"}
        assert named == set(re.findall(r"{(\w+)}", route.path))
        asked = {part["name"] for part in operation["parameters"] if part["in"] == "query"}
        assert asked == {field.name for field in msgspec.structs.fields(route.query)}
        assert callable(getattr(Api, route.does))


def test_every_reference_of_the_document_leads_somewhere():
    made = document()
    text = json.dumps(made)
    names = set(re.findall(r'"#/components/schemas/(\w+)"', text))
    assert names
    assert names <= set(made["components"]["schemas"])


def test_the_document_is_for_those_with_a_token_and_has_no_secret(served):
    assert served.request("GET", "/openapi.json")[0] == 401
    assert served.request("GET", "/openapi.json", token=served.agent)[0] == 200
    status, headers, body = served.request("GET", "/openapi.json", token=served.user)
    assert status == 200
    assert headers["content-type"] == "application/json"
    assert json.loads(body) == json.loads(msgspec.json.encode(document()))
    assert served.user not in body.decode()
    assert served.agent not in body.decode()


def test_a_fuzzer_finds_no_server_error_and_nothing_that_the_document_has_not():
    done = subprocess.run(
        [sys.executable, "-m", "tests.cluster.fuzz", "--examples", "8"],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    statuses = json.loads(done.stdout)
    # It got past the gate, was refused there and behind it, and every operation was done.
    assert {"200", "201", "202", "204", "400", "404", "422"} <= set(statuses)
    assert sum(statuses.values()) > 250


# Jobs


def test_a_key_is_taken_once(served):
    status, _, body = post(served, submission("k"))
    assert status == 201
    again, _, same = post(served, submission("k"))
    assert (again, same) == (200, body)
    status, _, body = post(served, submission("k", gpus=2))
    assert (status, problem(body)) == (409, "key-taken")
    assert len(served.desk.jobs()) == 1


def test_one_key_at_once_is_one_job(served):
    found = []

    def submit():
        found.append(post(served, submission("k")))

    threads = [threading.Thread(target=submit) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(status for status, _, _ in found) == [200] * 19 + [201]
    assert {json.loads(body)["id"] for _, _, body in found} == {1}


def test_what_cannot_be_placed_is_said_at_once(served):
    status, _, body = post(served, submission(gpus=9))
    assert (status, problem(body)) == (422, "unplaceable")
    assert json.loads(body)["error"]["hint"]
    assert post(served, submission(gpus=0))[0] == 422


def test_errors_of_the_coordinator_have_their_own_status(served):
    def fail(error):
        def ask(*_, **__):
            raise error

        return ask

    for error, status, code in (
        (errors.CoordinatorClosed("closed"), 503, "closed"),
        (errors.StoreFull("x"), 503, "store-full"),
        (errors.Fenced("x", own=1, found=2), 503, "fenced"),
        (errors.HostTaken("h"), 409, "host-taken"),
        (errors.ClusterError("?"), 503, "unavailable"),
    ):
        served.desk.nodes = fail(error)
        found, _, body = served.request("GET", "/v1/nodes", token=served.user)
        assert (found, problem(body)) == (status, code)


def test_wait_is_answered_when_the_job_is_over(served):
    cluster = served.cluster()
    cluster.submit(["x"])
    found = []
    thread = threading.Thread(target=lambda: found.append(cluster.wait(1)))
    thread.start()
    served.desk.start(1)
    served.desk.end(1)
    thread.join()
    assert found == [served.desk.job(1)]


def test_wait_is_answered_when_the_time_is_up(served):
    served.cluster().submit(["x"])
    for wait in ("0", "0.01"):
        path = f"/v1/jobs/1/wait?timeout_s={wait}"
        status, _, body = served.request("GET", path, token=served.user)
        assert status == 200
        assert json.loads(body)["state"] == "PENDING"


# Logs


def read(served, query):
    status, headers, body = served.request("GET", f"/v1/jobs/1/logs?{query}", token=served.user)
    if status != 200:
        return status, problem(body)
    assert headers["content-type"] == "application/octet-stream"
    return body, int(headers["x-attempt"]), int(headers["x-next-offset"]), headers["x-ended"]


def append(served, offset, data, *, place="1/0/0"):
    path = f"/v1/agents/h/logs/{place}?agent=a&offset={offset}"
    return served.request("PUT", path, token=served.agent, body=data)


def test_logs_are_read_in_pieces_until_they_have_ended(served):
    served.cluster().submit(["x"], gpus=2)
    assert read(served, "") == (b"", 0, 0, "false")
    served.desk.start(1)
    assert append(served, 0, b"one\n")[0] == 200
    assert append(served, 4, b"two\n")[0] == 200
    assert read(served, "limit=6") == (b"one\ntw", 0, 6, "false")
    assert read(served, "offset=6") == (b"o\n", 0, 8, "false")
    assert read(served, "rank=1") == (b"", 0, 0, "false")
    served.desk.end(1)
    assert read(served, "offset=6&wait_s=60") == (b"o\n", 0, 8, "true")
    assert read(served, "limit=8") == (b"one\ntwo\n", 0, 8, "false")
    assert read(served, "offset=8&wait_s=60") == (b"", 0, 8, "true")
    assert read(served, "offset=99") == (b"", 0, 99, "true")
    assert read(served, "rank=2") == (404, "no-such-rank")
    assert read(served, "attempt=2") == (404, "no-such-attempt")


def test_the_next_attempt_can_be_asked_for_while_there_may_be_one(served):
    served.cluster().submit(["x"])
    served.desk.start(1)
    assert read(served, "attempt=1") == (b"", 1, 0, "false")
    served.desk.end(1)
    assert read(served, "attempt=1") == (404, "no-such-attempt")
    assert read(served, "attempt=1&wait_s=60") == (404, "no-such-attempt")


def test_an_agent_sends_the_logs_of_its_own_ranks_only(served):
    served.cluster().submit(["x"])
    served.desk.start(1)
    (place,) = served.desk.job(1).places
    other = served.request(
        "PUT", "/v1/agents/other/logs/1/0/0?agent=a&offset=0", token=served.agent, body=b"x"
    )
    assert (other[0], problem(other[2])) == (403, "not-here")
    hello = msgspec.structs.replace(HELLO, host=place.host, agent="b")
    served.desk.hello(hello)
    path = f"/v1/agents/{place.host}/logs/1/0/0?offset=0&agent="
    status, _, body = served.request("PUT", path + "a", token=served.agent, body=b"x")
    assert (status, problem(body)) == (404, "not-a-host")
    assert served.request("PUT", path + "b", token=served.agent, body=b"x")[0] == 200
    assert read(served, "") == (b"x", 0, 1, "false")


def test_a_reader_waits_for_growth(served):
    served.cluster().submit(["x"])
    served.desk.start(1)
    found = []
    thread = threading.Thread(target=lambda: found.append(read(served, "wait_s=60")))
    thread.start()
    served.logs.append((1, 0, 0), 0, b"x")
    thread.join()
    assert found == [(b"x", 0, 1, "false")]


def test_pieces_are_put_where_they_belong(served):
    served.cluster().submit(["x"])
    status, _, body = append(served, 0, b"abc")
    assert (status, json.loads(body)) == (200, {"offset": 3})
    assert append(served, 0, b"abc")[0] == 200
    assert json.loads(append(served, 3, b"")[2]) == {"offset": 3}
    status, _, body = append(served, 5, b"x")
    assert (status, problem(body), json.loads(body)["error"]["offset"]) == (409, "offset", 3)
    status, _, body = append(served, 1, b"XX")
    assert (status, problem(body)) == (409, "other-bytes")
    for place, code in (
        ("2/0/0", "no-such-job"), ("1/1/0", "no-such-attempt"), ("1/0/1", "no-such-rank"),
    ):  # fmt: skip
        status, _, body = append(served, 0, b"x", place=place)
        assert (status, problem(body)) == (404, code)


def test_a_full_disk_is_507(served):
    served.cluster().submit(["x"])
    served.logs._reserve_bytes = 1 << 62
    status, _, body = append(served, 0, b"x")
    assert (status, problem(body)) == (507, "disk-full")
    assert json.loads(body)["error"]["offset"] == 0


def test_when_a_log_is_written_to_its_end():
    job = Job(id=1, spec=Spec(command=("x",)), submitted_s=0.0)
    replace = msgspec.structs.replace
    assert not is_written(job, 0)
    assert not is_written(replace(job, state=State.RUNNING, started_s=1.0), 0)
    assert is_written(replace(job, state=State.NODE_FAIL, started_s=1.0), 0)
    again = replace(job, started_s=1.0, node_failures=1)
    assert is_written(again, 0)
    assert is_written(replace(again, started_s=None), 0)
    assert not is_written(again, 1)
    second = replace(again, state=State.RUNNING, attempt=1)
    assert is_written(second, 0)
    assert not is_written(second, 1)
    assert is_written(replace(job, state=State.CANCELLED), 0)


# Agents


def test_an_agent_comes_reports_and_is_told(served):
    office = served.office()
    assert office.hello(HELLO).cluster == "fake"
    status = Status(agent="a")
    office.status("h", status)
    assert served.desk.statuses == {"h": status}
    assert office.wants("h", "a", -1, 60.0) == Wants(version=1)
    found = []
    thread = threading.Thread(target=lambda: found.append(office.wants("h", "a", 1, 60.0)))
    thread.start()
    served.desk.want("h", leave=True)
    thread.join()
    assert found == [Wants(version=2, leave=True)]
    assert served.cluster().nodes()[0].name == "h"


# The parts by themselves


def test_the_bell_wakes_only_those_it_concerns():
    async def scenario():
        bell, looks = Bell(), []

        async def receive():
            await asyncio.Event().wait()

        async def wait(topic):
            state = {"seen": 0}

            async def look():
                state["seen"] += 1
                looks.append(topic)
                return state["seen"]

            return await bell.hold(
                look, enough=lambda seen: seen > 1, topics=(topic,), wait_s=60.0, receive=receive
            )

        one, two = asyncio.create_task(wait(1)), asyncio.create_task(wait("host"))
        while len(looks) < 2:
            await asyncio.sleep(0)
        await asyncio.to_thread(bell.ring, {"host", 99})
        assert await two == 2
        assert looks.count(1) == 1
        await asyncio.to_thread(bell.ring, None)
        assert await one == 2
        assert bell._waiters == {}
        bell.close()
        # Nobody waits any more.
        assert await bell.hold(
            lambda: asyncio.sleep(0, 7), enough=lambda _: False, topics=(1,), wait_s=60.0,
            receive=receive,
        ) == 7  # fmt: skip

    asyncio.run(scenario())


def test_a_change_while_one_looks_is_not_missed():
    async def scenario():
        bell, looks = Bell(), []

        async def receive():
            await asyncio.Event().wait()

        async def look():
            looks.append(1)
            if len(looks) == 1:
                await asyncio.to_thread(bell.ring, {1})
                await asyncio.sleep(0.01)
            return len(looks)

        seen = await bell.hold(
            look, enough=lambda seen: seen > 1, topics=(1,), wait_s=60.0, receive=receive
        )
        assert seen == 2

    asyncio.run(scenario())


def test_who_hangs_up_is_not_waited_for():
    async def scenario():
        bell = Bell()

        async def receive():
            return {"type": "http.disconnect"}

        with pytest.raises(Gone):
            await bell.hold(
                lambda: asyncio.sleep(0), enough=lambda _: False, topics=(1,), wait_s=60.0,
                receive=receive,
            )  # fmt: skip
        assert bell._waiters == {}

    asyncio.run(scenario())


def test_requests_have_a_rate_by_role_and_address():
    now, known = [0.0], []
    gate = Gate(
        None,
        tokens={Role.USER: "u", Role.AGENT: "a"},
        names=(),
        loopback=True,
        limits=HttpLimits(requests_per_s=2),
        clock=lambda: now[0],
    )

    def admit(token, address):
        scope = {
            "type": "http", "method": "GET", "scheme": "http", "path": "/v1/info",
            "raw_path": b"/v1/info", "query_string": b"", "client": (address, 1),
            "headers": [(b"host", b"localhost"), (b"authorization", b"Bearer " + token)],
            "state": {MADE_KNOWN: lambda: known.append(address)},
        }  # fmt: skip
        gate._admit(scope)

    for _ in range(4):
        admit(b"u", "1.2.3.4")
    with pytest.raises(HttpError) as caught:
        admit(b"u", "1.2.3.4")
    assert (caught.value.status, caught.value.retry_after_s) == (429, 0.5)
    assert known == ["1.2.3.4"] * 4
    admit(b"a", "1.2.3.4")
    admit(b"u", "1.2.3.5")
    now[0] = 0.5
    admit(b"u", "1.2.3.4")


# With the coordinator itself


def test_a_job_goes_through_the_real_coordinator(tmp_path, serve):
    identity = open_identity(tmp_path / "state")
    logs = Logs(tmp_path / "logs", reserve_bytes=0)
    with (
        Store.open(tmp_path / "jobs.db") as store,
        Coordinator(store) as desk,
        Server(
            desk, logs, identity, bind="127.0.0.1:0", plain=True, on_shutdown=lambda: None
        ) as server,
    ):
        made = serve()
        made.server, made.identity = server, identity
        cluster, office = made.cluster(), made.office()
        slots = (Slot(0, Kind.CPU, "0"),)
        office.hello(msgspec.structs.replace(HELLO, slots=slots))
        office.status("h", Status(agent="a"))
        wants = office.wants("h", "a", -1, 60.0)
        job = cluster.submit(["true"])
        while not wants.wants:
            wants = office.wants("h", "a", wants.version, 60.0)
        assert wants.wants[0].job == job.id
        assert cluster.nodes()[0].busy == {"0": job.id}
        with pytest.raises(errors.BadJob):
            cluster.submit(["true"], gpus=2)
        cluster.cancel(job.id)
        while not wants.wants[0].stop:
            wants = office.wants("h", "a", wants.version, 60.0)
        assert [step.state for step in cluster.history(job.id)][:2] == ["PENDING", "STARTING"]
