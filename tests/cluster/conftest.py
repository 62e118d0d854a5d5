from __future__ import annotations

import inspect
import json
import socket
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from manyhands.cluster.client import Cluster, HttpOffice
from manyhands.cluster.code import read_code
from manyhands.cluster.dial import Dialler
from manyhands.cluster.identity import open_identity
from manyhands.cluster.logs import Logs
from manyhands.cluster.routes import Role
from manyhands.cluster.server import Server
from tests.cluster.fake import FakeDesk
from tests.cluster.running import World

ANSWER_S = 60.0  # far more than any answer takes; a test that waits for it has failed


@pytest.fixture(autouse=True)
def _no_gpus(monkeypatch):
    """Hosts have shares of the CPUs, on machines with GPUs too: as many as a test asks for."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def world(tmp_path):
    """A cluster of real processes, not up yet."""
    made = World(tmp_path)
    yield made
    made.close()


@dataclass
class Served:
    """A server, what is behind it, and ways to speak to it."""

    desk: FakeDesk
    logs: Logs
    server: Server
    identity: object
    state: object
    stack: ExitStack

    @property
    def user(self):
        return self.identity.tokens[Role.USER]

    @property
    def agent(self):
        return self.identity.tokens[Role.AGENT]

    def cluster(self):
        return self.stack.enter_context(Cluster(self.server.code(Role.USER), state=self.state))

    def office(self):
        office = HttpOffice(Dialler(read_code(self.server.code(Role.AGENT))))
        self.stack.callback(office.close)
        return office

    def dial(self):
        sock = socket.create_connection(("127.0.0.1", self.server.port), ANSWER_S)
        return self.stack.enter_context(sock)

    def say(self, data):
        """Sends bytes on a connection of their own; all that comes back until it ends."""
        with socket.create_connection(("127.0.0.1", self.server.port), ANSWER_S) as sock:
            sock.sendall(data)
            return hear(sock)

    def request(self, method, path, *, token="", headers=(), body=b"", host=None, length=None):
        """One request as we like it; the status, headers and body of the answer."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: {host or f'127.0.0.1:{self.server.port}'}"]
        if token:
            lines.append(f"Authorization: Bearer {token}")
        lines += [*headers, "Connection: close"]
        if body or length is not None:
            lines.append(f"Content-Length: {len(body) if length is None else length}")
        return parse(self.say("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body))


def hear(sock):
    pieces = []
    try:
        while piece := sock.recv(65536):
            pieces.append(piece)
    except ConnectionResetError:
        pass
    return b"".join(pieces)


def parse(data):
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
    return int(first.split(" ")[1]), headers, body


def each(name, values):
    """As pytest's parametrize, with one server for all cases: it takes longer to start than a
    case does. What fails says with which value.
    """

    def decorate(test):
        signature = inspect.signature(test)

        def run(**fixtures):
            for value in values:
                try:
                    test(**fixtures, **{name: value})
                except BaseException as error:
                    error.add_note(f"with {name} = {value!r:.200}")
                    raise

        kept = [one for one in signature.parameters.values() if one.name != name]
        run.__name__, run.__doc__ = test.__name__, test.__doc__
        run.__signature__ = signature.replace(parameters=kept)
        return run

    return decorate


def problem(body):
    """The code of an answer that is an error."""
    error = json.loads(body)["error"]
    assert set(error) <= {"code", "message", "hint", "offset"}
    return error["code"]


@pytest.fixture
def serve(tmp_path):
    """`serve(**arguments of Server)`: a server over a fake coordinator."""
    with ExitStack() as stack:

        def start(**arguments):
            state = tmp_path / f"state-{len(list(tmp_path.iterdir()))}"
            identity = open_identity(state)
            desk = FakeDesk()
            logs = Logs(state / "logs", reserve_bytes=0)
            bind = arguments.pop("bind", "127.0.0.1:0")
            # Most tests speak by sockets of their own.
            plain = arguments.pop("plain", bind == "127.0.0.1:0")
            arguments.setdefault("on_shutdown", desk.went_down.set)
            server = stack.enter_context(
                Server(desk, logs, identity, bind=bind, plain=plain, **arguments)
            )
            return Served(desk, logs, server, identity, state, stack.enter_context(ExitStack()))

        yield start


@pytest.fixture
def served(serve):
    return serve()
