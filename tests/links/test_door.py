"""The hub's side door: who finds it, who does not, and whom it is shown to."""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
from contextlib import ExitStack, suppress
from dataclasses import replace

import psutil
import pytest

from manyhands.core.errors import Refused
from manyhands.links import dial, door
from manyhands.links.base import LinkSettings, open_link
from manyhands.links.door import Porter, knock, open_doors
from manyhands.links.hub import Hub
from manyhands.links.journal import Journal
from manyhands.testing.contract import PATIENCE_S, STEADY
from manyhands.testing.proxy import Proxy

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="doors are Linux's")


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A hub answers at its door when it gets the processor; who comes by the front was too late."""
    monkeypatch.setattr(dial, "DOOR_S", PATIENCE_S)


@pytest.fixture
def hub():
    with Hub("127.0.0.1:0") as made:
        yield made


def join(address, name="a"):
    settings = LinkSettings(terms=STEADY, connect_s=PATIENCE_S)
    return open_link(address.code(), run="run", name=name, settings=settings)


def tcp_connections(port: int) -> int:
    """Of this process, those that lead to `port`."""
    mine = psutil.Process().net_connections("tcp")
    return sum(bool(c.raddr) and c.raddr.port == port for c in mine)


def test_a_peer_of_the_hubs_machine_comes_by_the_door(hub):
    with join(hub.address), join(replace(hub.address, host="localhost"), "b"):
        assert tcp_connections(hub.address.port) == 0


def test_a_hub_may_have_none(hub):
    with Hub("127.0.0.1:0", door=False) as closed, join(closed.address):
        assert tcp_connections(closed.address.port) == 1
    assert knock(closed.address, PATIENCE_S) is None


def test_an_advertised_address_leads_to_the_door_too():
    """Where the way round by a public name may not even exist."""
    with (
        Hub("127.0.0.1:0", advertise="hub.invalid:443") as hub,
        join(hub.address),
        join(hub.near, "b") as link,
    ):
        assert {peer.name for peer in hub.room("run").view.peers()} == {"a", "b"}
        assert link.me.name == "b"


def test_who_means_another_hub_finds_no_door(hub):
    with Proxy("127.0.0.1", hub.address.port) as proxy:
        for other in (
            {"fingerprint": "ab" * 32},
            {"port": proxy.port},
            {"host": "127.0.0.2"},
        ):
            assert knock(replace(hub.address, **other), PATIENCE_S) is None, other
        with join(replace(hub.address, port=proxy.port)):
            assert tcp_connections(proxy.port) == 1


def test_another_certificate_is_refused_by_its_name(hub):
    """As ever: whoever has an old code hears what has changed, and not of a wrong token."""
    with pytest.raises(Refused, match="shows certificate"):
        join(replace(hub.address, fingerprint="ab" * 32))


def test_a_token_is_asked_for_at_the_door(hub):
    with pytest.raises(Refused, match="the token is wrong"):
        join(replace(hub.address, token="wrong"))


def test_an_insecure_hub_has_none():
    """It has no certificate by which it could show that it is the one that is meant."""
    with Hub("127.0.0.1:0", insecure=True) as hub:
        doors = open_doors([hub.address])
        assert len(doors) == 1  # the name was free ...
        doors[0].close()
        assert knock(hub.address, PATIENCE_S) is None  # ... and nobody asks there


def test_a_name_that_is_taken_costs_the_door_only(tmp_path, caplog):
    with Hub("127.0.0.1:0", state=tmp_path) as first:
        assert open_doors([first.address]) == []
    (taken,) = open_doors([first.address])  # closed with its hub
    bind = f"127.0.0.1:{first.address.port}"
    caplog.clear()
    with taken, Hub(bind, state=tmp_path) as hub:
        assert "another process has the name of this hub's door" in caplog.text
        taken.shutdown(socket.SHUT_RDWR)  # it would be ours: nobody answers there
        with join(hub.address):
            assert tcp_connections(hub.address.port) == 1


@pytest.fixture
def squatter():
    """Takes the name of a hub's door, answers as it is told, and remembers what it heard."""
    with ExitStack() as stack:

        def take(address, answer):
            (door,) = open_doors([address])
            stack.enter_context(door)
            heard = []

            def serve():
                sock, _ = door.accept()
                with sock:
                    heard.append(sock.recv(1 << 16))
                    sock.sendall(answer(heard[0]))
                    while more := sock.recv(1 << 16):
                        heard.append(more)

            thread = threading.Thread(target=serve)
            thread.start()
            stack.callback(thread.join)
            return heard

        yield take


def answer_of(porter, nonce, *, at):
    """What a hub says at the door `at`."""
    (door,) = open_doors([at])
    with door, socket.socket(socket.AF_UNIX) as near:
        near.connect(door.getsockname())
        far, _ = door.accept()
        with far:
            near.sendall(nonce)
            porter.answer(far)
        return near.recv(1 << 16)


@pytest.mark.parametrize("what", ["nothing", "noise", "lengths", "another hub", "another door"])
def test_who_takes_a_name_and_has_no_key_is_told_nothing(squatter, tmp_path, what):
    """Peers go round by the front; all that a squatter hears are bytes of chance."""
    with Hub("127.0.0.1:0", state=tmp_path / "a", door=False) as hub:
        mine = Journal(tmp_path / "b")
        theirs = Porter(mine.key_pem, mine.certificate_pem)
        mine.close()
        its_own = hub._porter  # as if it had passed the question on to a door of the same hub

        def answer(nonce):
            match what:
                case "nothing":
                    return b""
                case "noise":
                    return b"\0\x20" * 2 + os.urandom(64)
                case "lengths":
                    return b"\xff" * 4
                case "another hub":
                    return answer_of(theirs, nonce, at=replace(hub.address, port=1))
            return answer_of(its_own, nonce, at=replace(hub.address, port=1))

        heard = squatter(hub.address, answer)
        settings = LinkSettings(terms=STEADY, connect_s=4.0 if what == "nothing" else PATIENCE_S)
        with open_link(hub.address.code(), run="run", name="a", settings=settings):
            assert tcp_connections(hub.address.port) == 1
    assert [len(words) for words in heard] == [32]


def test_who_takes_a_name_and_says_nothing_costs_a_dial_little(squatter, tmp_path, monkeypatch):
    """Every dial anew, and nothing of the time that the front has."""
    asked, timers, now_s = [], [], [0.0]

    def ask(address, timeout_s):
        asked.append(timeout_s)
        now_s[0] += timeout_s
        return knock(address, timeout_s)

    class Timer(threading.Timer):
        def __init__(self, interval, function):
            timers.append(interval)
            super().__init__(PATIENCE_S, function)

    monkeypatch.setattr(dial, "knock", ask)
    monkeypatch.setattr(dial, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(dial, "DOOR_S", door_s := 0.5)
    monkeypatch.setattr(dial, "Timer", Timer)
    with Hub("127.0.0.1:0", state=tmp_path, door=False) as hub:
        heard = squatter(hub.address, lambda nonce: b"")
        with join(hub.address):
            assert tcp_connections(hub.address.port) == 1
    assert [len(words) for words in heard] == [32]
    assert asked == [door_s]
    assert timers == [PATIENCE_S]


def test_the_key_is_what_opens(hub):
    """The same answer, at the door that it is for, is taken: what fails above is the squatter."""
    far = replace(hub.address, port=1)
    (door,) = open_doors([far])
    with door:
        thread = threading.Thread(target=lambda: serve_one(door, hub._porter))
        thread.start()
        sock = knock(far, PATIENCE_S)
        thread.join()
    assert sock is not None
    sock.close()


def serve_one(door, porter):
    sock, _ = door.accept()
    with sock:
        porter.answer(sock)


def test_a_door_that_is_full_keeps_nobody_waiting(hub):
    """The front is asked at once."""
    name = replace(hub.address, port=1)
    (door,) = open_doors([name])
    with ExitStack() as stack:
        stack.enter_context(door)
        while True:
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.setblocking(False)
            try:
                sock.connect(door.getsockname())
            except BlockingIOError:
                break
        assert knock(name, 3600.0) is None


def test_where_a_sandbox_forbids_unix_sockets_all_come_by_the_front(monkeypatch):
    """As systemd's RestrictAddressFamilies does; a process without a descriptor left is like it."""

    class Sandboxed(socket.socket):
        def __init__(self, family=-1, *options, **more):
            if family == socket.AF_UNIX:
                raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
            super().__init__(family, *options, **more)

    monkeypatch.setattr(socket, "socket", Sandboxed)
    with Hub("127.0.0.1:0") as hub, join(hub.address):
        assert tcp_connections(hub.address.port) == 1


def test_who_hangs_up_at_the_door_is_named_by_its_process(hub, caplog):
    with caplog.at_level("WARNING"):
        sock = knock(hub.address, PATIENCE_S)
        sock.sendall(b"garbage that is no frame" * 10)
        while sock.recv(1 << 16):
            pass  # it is told what was wrong, and the hub hangs up
        sock.close()
        hub.close()
    assert f"process:{os.getpid()}: connection ended" in caplog.text


def test_who_answers_byte_by_byte_does_not_hold_a_peer(tmp_path):
    address = replace(_address_of_none(tmp_path), port=1)
    (listener,) = open_doors([address])
    done = threading.Event()

    def drip():
        sock, _ = listener.accept()
        with sock:
            sock.recv(64)
            sock.sendall(door._LENGTHS.pack(4096, 4096))
            with suppress(OSError):
                while not done.wait(0.05):  # seven minutes until it has said all
                    sock.sendall(b"x")

    dripping = threading.Thread(target=drip, daemon=True)
    with listener:
        dripping.start()
        assert knock(address, 0.3) is None
        done.set()
        dripping.join(PATIENCE_S)


def _address_of_none(tmp_path):
    with Hub("127.0.0.1:0", state=tmp_path) as hub:
        return hub.address


def test_an_answer_that_is_passed_on_from_elsewhere_opens_nothing(hub, monkeypatch):
    """Of a hub on another machine, by somebody who is on both: the name is free on this one."""
    there = door._name(hub.address)
    monkeypatch.setattr(door, "_here", lambda: "another machine", raising=False)
    (listener,) = open_doors([hub.address])

    def pass_on():
        sock, _ = listener.accept()
        with sock, socket.socket(socket.AF_UNIX) as onward:
            onward.connect(there)
            onward.sendall(sock.recv(64))
            sock.sendall(onward.recv(8192))

    passing = threading.Thread(target=pass_on, daemon=True)
    with listener:
        passing.start()
        assert knock(hub.address, PATIENCE_S) is None
        passing.join(PATIENCE_S)


def test_without_proc_there_is_no_door(hub, monkeypatch):
    def fail():
        raise FileNotFoundError(errno.ENOENT, "no /proc")

    monkeypatch.setattr(door, "_here", fail)
    assert open_doors([hub.address]) == []
    assert knock(hub.address, PATIENCE_S) is None
