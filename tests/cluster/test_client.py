"""The client: what it says when it reaches nobody, jobs, logs across attempts."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from manyhands.cluster.client import Cluster, HttpOffice, WaitTimeout
from manyhands.cluster.code import Code, read_code
from manyhands.cluster.dial import (
    CoordinatorRefused,
    CoordinatorUnreachable,
    Dialler,
    OtherVersion,
)
from manyhands.cluster.errors import BadJob, NoSuchJob
from manyhands.cluster.follow import Follower
from manyhands.cluster.job import State
from manyhands.cluster.messages import Hello
from manyhands.cluster.office import OfficeRefused, OfficeUnreachable
from manyhands.cluster.routes import Role
from manyhands.cluster.server import Server
from manyhands.core.errors import UsageError
from tests.cluster.conftest import ANSWER_S
from tests.cluster.fake import FakeDesk

HELLO = Hello(version="1", host="h", agent="a", address="127.0.0.1", slots=(), pid=1)
PIN = "ab" * 32


# Errors


@contextmanager
def answering(data):
    """Somebody who says these bytes to whoever connects, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

        def serve():
            while True:
                try:
                    sock, _ = listening.accept()
                except OSError:
                    return
                with sock:
                    sock.settimeout(ANSWER_S)
                    sock.recv(65536)
                    sock.sendall(data)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_nobody_there():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        at = f"http://127.0.0.1:{sock.getsockname()[1]}"
    with (
        Cluster(at, token="t") as cluster,
        pytest.raises(CoordinatorUnreachable, match="manyhands up"),
    ):
        cluster.info()
    with (
        HttpOffice(Dialler(Code(role=Role.AGENT, host="127.0.0.1", port=1, token="t"))) as office,
        pytest.raises(OfficeUnreachable),
    ):
        office.hello(HELLO)


def test_a_name_that_nobody_has():
    with (
        Cluster("nowhere.invalid:1", token="t", fingerprint=PIN) as cluster,
        pytest.raises(CoordinatorUnreachable, match="nowhere"),
    ):
        cluster.info()


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n{\"name\": 1}",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b'HTTP/1.1 200 OK\r\nContent-Length: 28\r\n\r\n{"version":"9","protocol":9}',
    ],
)  # fmt: skip
def test_somebody_else_answers(data):
    with (
        answering(data) as at,
        Cluster(at, token="t") as cluster,
        pytest.raises(OtherVersion, match="same version"),
    ):
        cluster.info()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", "in the middle of an answer"),
        (b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 2\r\n\r\nhi", "is it up"),
    ],
)
def test_an_answer_that_is_cut_off_or_a_proxys_passes(data, why):
    """The coordinator was killed while it spoke, or is away."""
    with (
        answering(data) as at,
        Cluster(at, token="t") as cluster,
        pytest.raises(CoordinatorUnreachable, match=why),
    ):
        cluster.info()


def test_hung_up_without_a_word():
    with (
        answering(b"") as at,
        Cluster(at, token="t") as cluster,
        pytest.raises(CoordinatorUnreachable, match="MANYHANDS_FINGERPRINT"),
    ):
        cluster.info()


def test_an_answer_that_does_not_come_has_a_named_end(monkeypatch):
    monkeypatch.setattr("manyhands.cluster.dial.ANSWER_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        at = f"http://127.0.0.1:{sock.getsockname()[1]}"
        with (
            Cluster(at, token="t") as cluster,
            pytest.raises(CoordinatorUnreachable, match=r"within .* 0.05 s \(request\)"),
        ):
            cluster.info()


def test_the_wrong_token(served):
    with (
        Cluster(f"http://127.0.0.1:{served.server.port}", token="wrong-token") as cluster,
        pytest.raises(CoordinatorRefused, match="MANYHANDS_TOKEN") as caught,
    ):
        cluster.info()
    assert caught.value.code == "token"
    assert "wrong-token" not in str(caught.value)
    office = HttpOffice(Dialler(read_code(served.server.code(Role.USER))))
    with office, pytest.raises(OfficeRefused) as refused:
        office.hello(HELLO)
    assert refused.value.code == "role"


def test_no_such_job(served):
    cluster = served.cluster()
    asks = (cluster.job, cluster.history, cluster.cancel, cluster.wait)
    for ask in (*asks, lambda id: list(cluster.logs(id))):
        for id in (5, 0, -1, 2**70, "1/cancel", None, True):
            with pytest.raises((NoSuchJob, CoordinatorRefused)):
                ask(id)


def test_what_is_no_job(served):
    cluster = served.cluster()
    for bad in (
        {"command": ["x"], "gpus": "many"}, {"command": ["x"], "nope": 1}, {"command": []},
        {"command": ["x"], "gpus": 99}, {"command": ["\ud800"]}, {"command": [b"x"]},
    ):  # fmt: skip
        with pytest.raises(BadJob):
            cluster.submit(**bad)
    with pytest.raises(UsageError):
        cluster.submit(["x"], key="a b")
    assert cluster.jobs() == []


# Jobs


def test_a_submission_without_a_key_is_not_another_one(served):
    cluster = served.cluster()
    first, second = cluster.submit(["x"]), cluster.submit(["x"])
    assert (first.id, second.id) == (1, 2)
    assert cluster.submit(["x"], key="k").id == cluster.submit(["x"], key="k").id == 3
    with pytest.raises(CoordinatorRefused) as caught:
        cluster.submit(["y"], key="k")
    assert caught.value.code == "key-taken"
    assert [job.id for job in cluster.jobs()] == [3, 2, 1]
    cluster.cancel(2)
    assert [job.id for job in cluster.jobs(state=State.CANCELLED)] == [2]
    assert [job.id for job in cluster.jobs(limit=1)] == [3]
    assert [step.state for step in cluster.history(2)] == ["PENDING", "CANCELLED"]


def test_waiting_has_an_end(served):
    cluster = served.cluster()
    cluster.submit(["x"])
    with pytest.raises(WaitTimeout) as caught:
        cluster.wait(1, timeout_s=0.01)
    assert caught.value.job.state is State.PENDING


def test_50_clients_at_once(served):
    found, start = [], threading.Barrier(50)

    def use():
        with Cluster(served.server.code(Role.USER)) as cluster:
            start.wait()
            job = cluster.submit(["x"])
            served.desk.start(job.id)
            threading.Thread(target=served.desk.end, args=(job.id,)).start()
            found.append(cluster.wait(job.id, ANSWER_S))

    threads = [threading.Thread(target=use) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(job.id for job in found) == list(range(1, 51))
    assert {job.state for job in found} == {State.SUCCEEDED}


def test_connections_are_kept_and_opened_again(serve):
    """A coordinator that went and came back at the same address, between two requests."""
    served = serve()
    with Cluster(served.server.code(Role.USER)) as cluster:
        cluster.info()
        kept = next(iter(cluster._dialler._kept.values())).sock
        cluster.info()
        assert next(iter(cluster._dialler._kept.values())).sock is kept
        served.server.close()
        with pytest.raises(CoordinatorUnreachable):
            cluster.info()
        bind = f"127.0.0.1:{served.server.port}"
        given = (served.desk, served.logs, served.identity)
        with Server(*given, bind=bind, plain=True, on_shutdown=lambda: None):
            assert cluster.info()


def test_a_connection_lost_between_two_requests_is_not_noticed(serve):
    served = serve()
    cluster = served.cluster()
    cluster.submit(["x"], key="k")
    connection = next(iter(cluster._dialler._kept.values()))
    connection.sock.shutdown(socket.SHUT_RDWR)
    assert cluster.submit(["x"], key="k").id == 1
    assert len(cluster.jobs()) == 1


def test_threads_that_end_leave_no_connection(served):
    cluster = served.cluster()
    for _ in range(5):
        thread = threading.Thread(target=cluster.info)
        thread.start()
        thread.join()
    cluster.info()
    assert len(cluster._dialler._kept) == 1


# Logs


def test_logs_are_followed_through_all_attempts(served):
    cluster, office = served.cluster(), served.office()
    cluster.submit(["x"], gpus=2)
    desk: FakeDesk = served.desk
    pieces, got = [], threading.Event()

    def follow():
        for piece in cluster.logs(1, rank=1, follow=True):
            pieces.append(piece)
            got.set()

    def send(attempt, offset, data):
        got.clear()
        assert office.send_log("h", "a", 1, attempt, 1, offset, data) == offset + len(data)
        assert got.wait(ANSWER_S)

    thread = threading.Thread(target=follow)
    thread.start()
    desk.start(1)
    send(0, 0, b"first\n")
    send(0, 6, b"more\n")
    desk.move(1, State.NODE_FAIL, places=(), node_failures=1)
    desk.move(1, State.PENDING)
    desk.start(1, attempt=1)
    send(1, 0, b"second\n")
    desk.move(1, State.PREEMPTED, places=(), preemptions=1)
    desk.move(1, State.PENDING)
    desk.start(1, attempt=2)
    desk.move(1, State.NODE_FAIL, places=(), node_failures=2)  # before it wrote a word
    desk.move(1, State.PENDING)
    desk.start(1, attempt=3)
    send(3, 0, b"last\n")
    assert office.send_log("h", "a", 1, 3, 1, 5, b"end\n") == 9
    desk.end(1)
    thread.join()
    assert b"".join(pieces) == b"first\nmore\nsecond\nlast\nend\n"
    assert b"".join(cluster.logs(1, rank=1)) == b"last\nend\n"
    assert b"".join(cluster.logs(1, rank=1, attempt=0, follow=True)) == b"first\nmore\n"


def test_a_job_that_is_cancelled_while_it_waits_ends_its_followers(served):
    cluster = served.cluster()
    cluster.submit(["x"])
    found = []
    thread = threading.Thread(target=lambda: found.append(list(cluster.logs(1, follow=True))))
    thread.start()
    served.desk.cancel(1)
    thread.join()
    assert found == [[]]


def test_large_logs_come_whole(served):
    cluster = served.cluster()
    cluster.submit(["x"])
    served.desk.start(1)
    text = bytes(range(256)) * 5000
    served.logs.append((1, 0, 0), 0, text)
    assert b"".join(cluster.logs(1)) == text
    served.desk.end(1)
    assert b"".join(cluster.logs(1, follow=True)) == text
    for offset in (1, 1 << 20, len(text) - 1, len(text), len(text) + 5):
        assert b"".join(cluster.logs(1, offset=offset)) == text[offset:]
        assert b"".join(cluster.logs(1, offset=offset, follow=True)) == text[offset:]


# Offices


def test_an_office_says_how_much_of_a_log_is_there(served):
    office = served.office()
    served.cluster().submit(["x"])
    assert office.send_log("h", "a", 1, 0, 0, 0, b"abc") == 3
    assert office.send_log("h", "a", 1, 0, 0, 9, b"x") == 3
    assert office.send_log("h", "a", 1, 0, 0, 3, b"") == 3
    with pytest.raises(OfficeRefused) as caught:
        office.send_log("h", "a", 1, 0, 0, 0, b"ABC")
    assert caught.value.code == "other-bytes"
    served.logs._reserve_bytes = 1 << 62
    with pytest.raises(OfficeUnreachable, match="full"):
        office.send_log("h", "a", 1, 0, 0, 3, b"d")


def test_an_office_that_refuses_says_why(served):
    office = served.office()
    office.hello(HELLO)
    with pytest.raises(OfficeRefused) as caught:
        office.hello(Hello(version="1", host="h", agent="b", address="x", slots=(), pid=1))
    assert caught.value.code == "host-taken"
    with pytest.raises(OfficeRefused) as caught:
        office.wants("other", "a", -1, 0.0)
    assert caught.value.code == "not-a-host"
    for odd in ("../x", "a/b", "a?b", "", "\u00e9", "a\n"):
        with pytest.raises(OfficeRefused):
            office.wants(odd, "a", -1, 0.0)


def test_an_agent_that_is_killed_is_missed_at_once(served):
    """kill -9 of a process whose poll is open: the coordinator hears of it by the connection."""
    served.office().hello(HELLO)
    asked = served.desk.num_wants_asked
    program = f"""
from manyhands.cluster.client import HttpOffice
from manyhands.cluster.code import read_code
from manyhands.cluster.dial import Dialler
HttpOffice(Dialler(read_code({served.server.code(Role.AGENT)!r}))).wants("h", "a", 1, 60.0)
"""
    with subprocess.Popen([sys.executable, "-c", program]) as child:
        while served.desk.num_wants_asked == asked:
            assert child.poll() is None
            threading.Event().wait(0.01)
        child.kill()
    assert served.desk.lost_one.wait(ANSWER_S)
    assert served.desk.losses == [("h", "a")]


def test_a_job_that_was_to_begin_again_and_was_ended_before_it_did(served, monkeypatch):
    """Who follows it was told of an attempt that never came: that is the end, and no error."""
    cluster = served.cluster()
    cluster.submit(["x"])
    served.desk.start(1)
    before = cluster.job(1)
    served.desk.end(1)
    now = cluster.job(1)
    monkeypatch.setattr(cluster, "job", lambda id: before)
    assert list(cluster.logs(1, follow=True)) == []
    told = iter([before, before, now])
    monkeypatch.setattr(cluster, "job", lambda id: next(told))
    assert Follower(cluster, 1, rank=0, write=pytest.fail, say=print).run() == now
    with pytest.raises(CoordinatorRefused, match="has attempts 0 to 0, not 1"):
        list(cluster.logs(1, follow=True, attempt=1))
