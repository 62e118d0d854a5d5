"""An agent's office over HTTP, when the coordinator behind it is not well."""

from __future__ import annotations

import contextlib
import http.server
import threading

import pytest

from manyhands.cluster.client import HttpOffice
from manyhands.cluster.code import Code
from manyhands.cluster.dial import Dialler
from manyhands.cluster.messages import Hello, Status
from manyhands.cluster.office import OfficeUnreachable
from manyhands.cluster.routes import Role

HELLO = Hello(version="1", host="h", agent="a", address="127.0.0.1", slots=(), pid=1)


class Scripted:
    """A server that answers each request as it is told to; with None, not at all."""

    def __init__(self, *answers: bytes | None) -> None:
        left = list(answers)
        self._over = over = threading.Event()

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                answer = left.pop(0)
                if answer is None:
                    over.wait()
                else:
                    self.wfile.write(answer)
                self.close_connection = not left

            def log_message(self, *_: object) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = False  # closing it waits for them

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def office(self) -> HttpOffice:
        port = self._server.server_address[1]
        return HttpOffice(
            Dialler(Code(role=Role.AGENT, host="127.0.0.1", port=port, token="t" * 32))
        )

    def close(self) -> None:
        self._over.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def reply(status: int, body: bytes, *, length: int | None = None) -> bytes:
    count = len(body) if length is None else length
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, count, body)


WELCOME = reply(200, b'{"lease_s": 0.4, "cluster": "c"}')


def test_a_status_on_a_dead_connection_leaves_time_for_another() -> None:
    server = Scripted(WELCOME, None)
    with contextlib.closing(server), server.office() as office:
        assert office.hello(HELLO).lease_s == 0.4
        with pytest.raises(OfficeUnreachable, match=r"0\.1 s \(request\)"):
            office.status("h", Status(agent="a"))


@pytest.mark.parametrize(
    "answer",
    [reply(502, b"<html>Bad Gateway</html>"), reply(200, b'{"lease', length=40)],
    ids=["proxy", "cut"],
)
def test_what_stands_in_for_a_coordinator_that_is_away_refuses_nobody(answer) -> None:
    server = Scripted(answer)
    with contextlib.closing(server), server.office() as office, pytest.raises(OfficeUnreachable):
        office.hello(HELLO)
