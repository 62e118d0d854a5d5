"""The server against callers that stall, hang up, and come in numbers."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from manyhands.cluster.client import HttpOffice
from manyhands.cluster.code import Code
from manyhands.cluster.dial import CoordinatorUnreachable, Dialler
from manyhands.cluster.identity import open_identity, write_address
from manyhands.cluster.job import Spec, State
from manyhands.cluster.limits import HttpLimits
from manyhands.cluster.messages import Hello
from manyhands.cluster.office import OfficeUnreachable
from manyhands.cluster.routes import Role
from manyhands.cluster.server import Server, listen
from manyhands.core.errors import SettingsError
from manyhands.testing.broker import free_ports
from tests.cluster.conftest import ANSWER_S, hear, problem

HELLO = Hello(version="1", host="h", agent="a", address="127.0.0.1", slots=(), pid=1)


def until(what):
    """Waits for something that another thread is doing; the test's own time-out is the end."""
    while not what():
        time.sleep(0.005)


# Slow ones


def test_half_a_request_has_an_end(serve):
    served = serve(limits=HttpLimits(headers_s=0.2, idle_s=1))
    for start in (b"", b"G", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "):
        with served.dial() as sock:
            with contextlib.suppress(ConnectionError):  # this may come too late already
                sock.sendall(start)
            assert hear(sock) == b""


def test_half_a_body_has_an_answer(serve):
    served = serve(limits=HttpLimits(pause_s=0.2))
    status, _, body = served.request(
        "PUT", "/v1/agents/h/logs/1/0/0?agent=a&offset=0", token=served.agent, body=b"x", length=5
    )
    assert (status, problem(body)) == (408, "slow")


def test_half_a_second_request_has_an_end(serve):
    served = serve(limits=HttpLimits(headers_s=0.2))
    request = f"GET /v1/info HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {served.user}\r\n"
    answers = b""
    while not answers:  # a machine that is busy may be late with the first one, too
        with served.dial() as sock:
            with contextlib.suppress(ConnectionError):
                sock.sendall(request.encode() + b"\r\n" + request.encode())
            answers = hear(sock)
    assert answers.count(b"HTTP/1.1 200") == 1


def send_for_ever(sock, data):
    while True:
        sock.sendall(data)


def test_a_caller_who_does_not_read_is_dropped(serve):
    served = serve(limits=HttpLimits(write_s=0.2))
    served.cluster().submit(["x"])
    served.logs.append((1, 0, 0), 0, b"x" * (1 << 20))
    request = (
        f"GET /v1/jobs/1/logs?limit={1 << 20} HTTP/1.1\r\nHost: localhost\r\n"
        f"Authorization: Bearer {served.user}\r\n\r\n"
    ).encode()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(ANSWER_S)
        sock.connect(("127.0.0.1", served.server.port))
        with pytest.raises(ConnectionError):
            send_for_ever(sock, request)


def test_strangers_cannot_take_all_connections(serve):
    served = serve(limits=HttpLimits(strangers=3))
    with served.cluster() as known:
        known.info()
        held = [served.dial() for _ in range(3)]
        until(lambda: served.say(b"") == b"")
        # One who is known already is not touched by it.
        assert known.info()
        for sock in held:
            sock.close()
        until(lambda: served.say(b"nonsense\r\n\r\n") != b"")


def test_who_has_shown_a_token_is_no_stranger_while_he_waits_for_his_first_answer(serve):
    served = serve(limits=HttpLimits(strangers=3))
    served.desk.submit(Spec(command=("x",)))
    ends = []

    def wait():
        with served.cluster() as cluster:
            try:
                ends.append(cluster.wait(1, 60).state)
            except (CoordinatorUnreachable, ConnectionError) as error:
                ends.append(error)

    threads = [threading.Thread(target=wait) for _ in range(5)]
    for number, thread in enumerate(threads, 1):
        thread.start()
        # One after the other: who is on his way in is a stranger.
        until(lambda number=number: served.desk.num_jobs_asked >= number or ends)
    served.desk.cancel(1)
    for thread in threads:
        thread.join()
    assert ends == [State.CANCELLED] * 5


def test_a_stranger_is_not_kept_after_his_answer(serve):
    served = serve(limits=HttpLimits(strangers=1, idle_s=60))
    with served.dial() as sock:
        sock.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert hear(sock).startswith(b"HTTP/1.1 401")
    assert served.cluster().info()


def test_that_callers_are_turned_away_is_told_once_in_a_while(serve, caplog):
    served = serve(limits=HttpLimits(strangers=2))
    held = [served.dial() for _ in range(2)]
    for _ in range(3):
        until(lambda: served.say(b"") == b"")
    assert caplog.text.count("turns callers away: 2 connections that have shown no token") == 1
    for sock in held:
        sock.close()


def test_a_process_may_have_as_many_descriptors_as_it_needs():
    code = """
import resource
from manyhands.cluster.limits import HttpLimits, raise_descriptors
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
before = HttpLimits().most_connections()
raise_descriptors(300)
print(before, HttpLimits().most_connections(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
raise_descriptors(200)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert said.stdout.split() == ["32", "150", "300", "300"]


# Hanging up


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_who_hangs_up_leaves_nothing_behind(served):
    served.cluster().submit(["x"])
    served.office().hello(HELLO)
    paths = [
        ("/v1/jobs/1/wait?timeout_s=60", served.user),
        ("/v1/jobs/1/logs?wait_s=60", served.user),
        ("/v1/agents/h/wants?agent=a&seen=1&wait_s=60", served.agent),
    ]
    served.cluster().info()
    before = descriptors()
    for number in range(20):
        asked = served.desk.num_wants_asked
        socks = []
        for path, token in paths:
            sock = served.dial()
            socks.append(sock)
            line = (
                f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n"
            )
            sock.sendall(line.encode())
        until(lambda asked=asked: served.desk.num_wants_asked > asked)
        for sock in socks:
            sock.close()
        # A loss that is noticed when the agent already asks again would be none.
        until(lambda number=number: len(served.desk.losses) == number + 1)
    until(lambda: descriptors() <= before)
    assert set(served.desk.losses) == {("h", "a")}
    # Threads are those of the pool, and no more of them than it may have.
    workers = [t for t in threading.enumerate() if t.name.startswith("cluster-http-worker")]
    assert len(workers) <= HttpLimits().threads


def ask_for_wants(served, seen=1):
    """A poll that is held back, and its socket."""
    asked = served.desk.num_wants_asked
    sock = served.dial()
    path = f"/v1/agents/h/wants?agent=a&seen={seen}&wait_s=60"
    head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {served.agent}\r\n\r\n"
    sock.sendall(head.encode())
    until(lambda: served.desk.num_wants_asked > asked)
    return sock


def test_a_line_that_ends_when_the_agent_has_another_is_not_a_loss(served):
    served.office().hello(HELLO)
    with ask_for_wants(served) as first:
        with ask_for_wants(served):
            first.close()
            with ask_for_wants(served):
                pass
            until(lambda: served.desk.losses)
        assert served.desk.losses == [("h", "a")], "the last one, and that alone"


def test_a_poll_is_its_agents_word_once(served):
    """When it is looked at again nobody knows whether the agent is still there."""
    served.office().hello(HELLO)
    with ask_for_wants(served) as sock:
        for _ in range(3):
            asked = served.desk.num_wants_asked
            served.desk._tell({"h"})
            until(lambda asked=asked: served.desk.num_wants_asked > asked)
        served.desk.want("h")
        heard = b""
        while b'"version":2' not in heard:
            heard += sock.recv(65536)
    words = served.desk.words
    assert words[0] == ("h", "a", False)
    assert len(words) > 3
    assert set(words[1:]) == {("h", "a", True)}


def test_an_answered_poll_is_not_a_loss(served):
    office = served.office()
    office.hello(HELLO)
    assert office.wants("h", "a", -1, 60.0).version == 1
    assert office.wants("h", "a", 1, 0.05).version == 1
    office.close()
    served.server.close()
    assert served.desk.losses == []


def test_polls_of_many_hold_no_thread_each(serve):
    """60 users and 60 agents wait at once, with four threads; all hear, and others get through."""
    served = serve(limits=HttpLimits(threads=4))
    cluster = served.cluster()
    cluster.submit(["x"])
    results = []

    def agent(number):
        office = served.office()
        office.hello(Hello(version="1", host=f"h{number}", agent="a", address="x", slots=(), pid=1))
        results.append(office.wants(f"h{number}", "a", 1, 60.0).version)

    def user():
        results.append(cluster.wait(1, 60).state)

    threads = [threading.Thread(target=agent, args=(n,)) for n in range(60)]
    threads += [threading.Thread(target=user) for _ in range(60)]
    for thread in threads:
        thread.start()
    until(lambda: served.desk.num_wants_asked >= 60)
    assert cluster.info()
    for number in range(60):
        served.desk.want(f"h{number}")
    served.desk.cancel(1)
    for thread in threads:
        thread.join()
    assert sorted(map(str, results)) == ["2"] * 60 + ["CANCELLED"] * 60
    assert served.desk.losses == []


def test_closing_ends_the_waits_of_all(served):
    cluster, found = served.cluster(), []
    cluster.submit(["x"])
    office = served.office()
    office.hello(HELLO)

    def wait():
        with pytest.raises((CoordinatorUnreachable, ConnectionError)):
            cluster.wait(1)
        found.append(True)

    thread = threading.Thread(target=wait)
    poll = threading.Thread(target=lambda: found.append(office.wants("h", "a", 1, 60.0)))
    thread.start()
    poll.start()
    until(lambda: served.desk.num_wants_asked)
    served.server.close()
    thread.join()
    poll.join()
    assert len(found) == 2
    assert served.desk.num_listeners == 0
    served.server.close()


# Coming and going


def test_a_port_that_is_taken(served):
    with pytest.raises(SettingsError, match="--bind"):
        Server(served.desk, served.logs, served.identity,
               bind=f"127.0.0.1:{served.server.port}",
               on_shutdown=lambda: None).__enter__()  # fmt: skip


def test_small_answers_do_not_wait_for_acknowledgements():
    """asyncio turns Nagle's algorithm off by the number of the protocol, which accept() copies."""
    with listen("127.0.0.1:0") as listening:
        assert listening.proto == socket.IPPROTO_TCP


def test_an_identity_is_made_once_and_private(tmp_path):
    state = tmp_path / "a" / "state"
    first, second = open_identity(state), open_identity(state)
    assert first == second
    assert first.tokens[Role.USER] != first.tokens[Role.AGENT]
    for secret in (*first.tokens.values(), first.key_pem.decode()):
        assert secret not in repr(first)
    assert state.stat().st_mode & 0o777 == 0o700
    for name in ("token", "agent-token", "key.pem", "cert.pem"):
        assert (state / name).stat().st_mode & 0o777 == 0o600
    (state / "token").write_text("short")
    with pytest.raises(SettingsError, match="token"):
        open_identity(state)
    with pytest.raises(SettingsError, match="--state"):
        open_identity(state / "token" / "x")


def test_a_folder_that_was_there_stays_as_open_as_it_was(tmp_path):
    """It may be /tmp, or a project's; what is put there is private by itself."""
    tmp_path.chmod(0o755)
    open_identity(tmp_path)
    write_address(tmp_path, "https://box:1", "a code")
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    for name in ("token", "agent-token", "key.pem", "cert.pem", "code"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600


def test_secrets_stay_out_of_the_log(served, caplog, capfd):
    with caplog.at_level(0):
        served.cluster().submit(["x"])
        served.request("GET", f"/v1/info?token={served.user}", token=served.user)
        served.request("GET", "/v1/info", token=served.user, host="evil")
        served.say(f"NONSENSE {served.user}\r\n\r\n".encode())
    said = caplog.text + "".join(capfd.readouterr())
    assert served.user not in said
    assert served.agent not in said


def test_a_bug_of_ours_is_an_error_as_json(served, caplog):
    """What no input causes: the coordinator itself fails."""
    served.desk.nodes = lambda: 1 / 0
    status, _, body = served.request("GET", "/v1/nodes", token=served.user)
    assert (status, problem(body)) == (500, "internal")
    assert "ZeroDivisionError" in caplog.text
    assert "ZeroDivisionError" not in body.decode()
    assert served.cluster().info()


def test_shutdown_is_asked_once(serve):
    asked = []
    served = serve(on_shutdown=lambda: asked.append(1))
    cluster = served.cluster()
    cluster.shut_down()
    cluster.shut_down()
    assert asked == [1]


def test_shutdown_is_for_whoever_runs_it(served):
    served.cluster().shut_down()
    served.desk.went_down.wait()


# kill -9

COORDINATOR = """
import sys
from pathlib import Path
from manyhands.cluster.coordinator import Coordinator
from manyhands.cluster.identity import open_identity
from manyhands.cluster.job import Spec
from manyhands.cluster.logs import Logs
from manyhands.cluster.messages import Hello, Kind, Slot
from manyhands.cluster.server import Server
from manyhands.cluster.store import Store
folder, bind = Path(sys.argv[1]), sys.argv[2]
logs, identity = Logs(folder / "logs", reserve_bytes=0), open_identity(folder)
slots = (Slot(0, Kind.CPU, "0"),)
with (
    Store.open(folder / "jobs.db") as store,
    Coordinator(store) as desk,
    Server(desk, logs, identity, bind=bind, on_shutdown=lambda: None) as server,
):
    desk.hello(Hello(version="1", host="h", agent="a", address="x", slots=slots, pid=1))
    desk.submit(Spec(command=("x",)), "k")
    print(server.port, flush=True)
    sys.stdin.read()
"""


def test_a_coordinator_killed_in_the_middle_of_a_log(tmp_path):
    """The agent goes on from where the file ends, at whatever byte that is."""
    # Below those that outgoing connections are given: it has to be free for every one of them.
    port, up, over = free_ports().amqp, threading.Event(), threading.Event()
    text = bytes(range(256)) * 20_000
    have = 0

    def start():
        command = [sys.executable, "-c", COORDINATOR, str(tmp_path), f"127.0.0.1:{port}"]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert child.stdout.readline() == f"{port}\n".encode()
        up.set()
        return child

    def send():
        nonlocal have
        identity = open_identity(tmp_path)
        code = Code(
            role=Role.AGENT,
            host="127.0.0.1",
            port=port,
            token=identity.tokens[Role.AGENT],
            fingerprint=identity.fingerprint,
        )
        with HttpOffice(Dialler(code)) as office:
            while have < len(text) and not over.is_set():
                try:
                    have = office.send_log("h", "a", 1, 0, 0, have, text[have : have + 50_021])
                except OfficeUnreachable:
                    assert up.wait(ANSWER_S)

    child = start()
    with ThreadPoolExecutor(1) as pool:
        sender = pool.submit(send)
        log = tmp_path / "logs" / "job-1" / "attempt-0" / "rank-0.log"
        try:
            for part in (0, 1, 2):
                until(lambda part=part: have > part * len(text) // 4 or sender.done())
                up.clear()
                child.kill()
                child.communicate()
                assert log.read_bytes() == text[: log.stat().st_size]
                child = start()
            sender.result(ANSWER_S)
        finally:
            over.set()
            up.set()
            child.communicate(b"")
    assert child.returncode == 0
    assert log.read_bytes() == text
