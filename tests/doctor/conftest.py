"""What the doctor's tests share: findings by name, and ports where the wrong thing listens."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest

from manyhands.doctor import limits, measure
from manyhands.doctor.limits import Budget
from manyhands.doctor.report import Status


class Found(dict):
    """Findings by check; each check reports once."""

    def __init__(self, findings):
        listed = list(findings)
        super().__init__((f.check, f) for f in listed)
        assert len(self) == len(listed), [f.check for f in listed]
        for finding in listed:
            if finding.status in (Status.PROBLEM, Status.WARNING):
                assert finding.remedy, finding

    @property
    def problems(self):
        return [f.check for f in self.values() if f.status is Status.PROBLEM]

    @property
    def skipped(self):
        return [f.check for f in self.values() if f.status is Status.SKIPPED]


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    """For what works, and takes longer than a user has to wait where others work too."""
    for name in ("RIGHTS_S", "LOOPBACK_S", "MEASURE_S"):
        monkeypatch.setattr(limits, name, 30.0)
    monkeypatch.setattr(measure, "_JOIN_S", 30.0)
    monkeypatch.setattr(measure, "_PING_S", 30.0)


@pytest.fixture
def budget():
    return Budget(60.0)


@pytest.fixture
def listen():
    """Starts a listener on loopback whose connections are handed to a function; gives the port."""
    with contextlib.ExitStack() as stack:

        def start(serve):
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            thread = threading.Thread(target=accept, args=(listener, serve))
            thread.start()
            stack.callback(thread.join)
            stack.callback(listener.shutdown, socket.SHUT_RDWR)
            return listener.getsockname()[1]

        def accept(listener, serve):
            with contextlib.ExitStack() as kept:
                while True:
                    try:
                        sock, _ = listener.accept()
                    except OSError:
                        return
                    kept.enter_context(sock)
                    with contextlib.suppress(OSError):
                        serve(sock)

        yield start


def say_nothing(sock):
    pass


def answer_http(sock):
    sock.settimeout(30.0)
    sock.recv(4096)
    sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    sock.close()


@pytest.fixture
def silent_port(listen):
    return listen(say_nothing)


@pytest.fixture
def http_port(listen):
    return listen(answer_http)


@pytest.fixture
def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
