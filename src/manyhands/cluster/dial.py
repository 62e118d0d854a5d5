"""Dialling a coordinator: one connection a thread, kept and re-opened, with pinned TLS.

Every request may be sent twice without harm (submissions carry a key, logs an offset), so one that
was lost with a connection that had been kept is sent again, once, on a new one.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
from collections.abc import Generator, Mapping
from typing import NamedTuple, TypeVar

import msgspec

from manyhands.cluster.code import Code
from manyhands.cluster.desk import Failed, Problem
from manyhands.cluster.errors import ClusterError
from manyhands.core.address import host_port
from manyhands.core.errors import Refused
from manyhands.links.tls import check_pin, wrap_client

T = TypeVar("T")
CONNECT_S = 10.0
ANSWER_S = 60.0
"""Beside what a request asks the coordinator to wait."""
_MAX_ERROR_BYTES = 1 << 20
_WITHOUT_A_WORD = (http.client.RemoteDisconnected, ssl.SSLEOFError, ssl.SSLZeroReturnError)
_HUNG_UP = (ConnectionError, http.client.BadStatusLine, *_WITHOUT_A_WORD)


class CoordinatorUnreachable(ClusterError):
    """No answer from the coordinator: nobody there, the network, or a named wait that ended."""


class CoordinatorRefused(ClusterError):
    """The coordinator says no; `code` says why in one word, `status` is HTTP's."""

    def __init__(self, status: int, problem: Problem) -> None:
        super().__init__(problem.message, hint=problem.hint)
        self.status = status
        self.code = problem.code
        self.offset = problem.offset


class OtherVersion(ClusterError):
    """The coordinator's answer cannot be understood: it is of another release, or none of ours."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"the answer is not one of a manyhands coordinator of this release: {what}",
            hint="install the same version on both sides; is MANYHANDS_COORDINATOR right?",
        )


class Reply(NamedTuple):
    """An answer that is not an error."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Dialler:
    """Asks one coordinator, from any number of threads. `close` ends all its connections."""

    def __init__(self, code: Code, *, connect_s: float = CONNECT_S) -> None:
        self._code = code
        self._connect_s = connect_s
        self._lock = threading.Lock()
        self._kept: dict[threading.Thread, _Connection] = {}

    def __str__(self) -> str:
        return str(self._code)

    def close(self) -> None:
        """Idempotent. A request after it opens a connection again."""
        with self._lock:
            kept = list(self._kept.values())
            self._kept.clear()
        for connection in kept:
            connection.close()

    def ask(
        self,
        method: str,
        path: str,
        *,
        body: bytes = b"",
        kind: str = "",
        wait_s: float = 0.0,
        answer_s: float | None = None,
    ) -> Reply:
        """One request and its answer, for which the coordinator may hold back `wait_s` and take
        `answer_s`. Raises CoordinatorUnreachable and CoordinatorRefused.
        """
        headers = {"Authorization": f"Bearer {self._code.token}"}
        if kind:
            headers["Content-Type"] = kind
        limit_s = wait_s + (ANSWER_S if answer_s is None else answer_s)
        connection, is_kept = self._connection()
        with self._named(limit_s):
            try:
                reply = connection.exchange(method, path, body, headers, limit_s)
            except _HUNG_UP:
                connection.close()
                if not is_kept:
                    raise
                connection, _ = self._connection()
                reply = connection.exchange(method, path, body, headers, limit_s)
        if reply.status >= 400:
            raise CoordinatorRefused(reply.status, _problem(reply))
        return reply

    def _connection(self) -> tuple[_Connection, bool]:
        """This thread's connection, and whether it is one that was used before."""
        own = threading.current_thread()
        with self._lock:
            found = self._kept.get(own)
            gone = [thread for thread in self._kept if not thread.is_alive()]
            left = [self._kept.pop(thread) for thread in gone if thread is not own]
            if found is None:
                found = self._kept[own] = _Connection(self._code, self._connect_s)
        for connection in left:
            connection.close()
        return found, found.sock is not None

    @contextlib.contextmanager
    def _named(self, limit_s: float) -> Generator[None]:
        """What can happen to a connection, in our words; whatever it is, it is not used again."""
        where = host_port(self._code.host, self._code.port)
        try:
            yield
        except BaseException as error:
            self._drop()
            if isinstance(error, Refused):
                problem = Problem(
                    code=error.code,
                    message=f"{where} shows another certificate than the one that is pinned",
                    hint="use the code that `manyhands up` prints now; if its certificate should "
                    "not have changed, somebody may be in between",
                )
                raise CoordinatorRefused(0, problem) from None
            if isinstance(error, _WITHOUT_A_WORD):
                raise CoordinatorUnreachable(
                    f"{where} hung up without an answer",
                    hint="coordinators speak TLS, unless they are --plain: set "
                    "MANYHANDS_FINGERPRINT, or use a code"
                    if not self._code.fingerprint
                    else "is it going down?",
                ) from None
            if isinstance(error, ssl.SSLError):
                raise CoordinatorUnreachable(
                    f"{where} does not speak TLS as a coordinator does: {error.reason}",
                    hint="is that its address? one with --plain has no fingerprint: http://...",
                ) from None
            if isinstance(error, TimeoutError):
                raise CoordinatorUnreachable(
                    f"no answer from the coordinator at {where} within "
                    f"{self._connect_s:g} s (connection) or {limit_s:g} s (request)",
                    hint="is it up, and can this machine reach it?",
                ) from None
            if isinstance(error, http.client.HTTPException):
                raise OtherVersion(type(error).__name__) from None
            if isinstance(error, OSError):
                raise CoordinatorUnreachable(
                    f"the coordinator at {where} cannot be reached: {error.strerror or error}",
                    hint="is it up? `manyhands up` starts one; MANYHANDS_COORDINATOR says where",
                ) from None
            raise

    def _drop(self) -> None:
        with self._lock:
            connection = self._kept.pop(threading.current_thread(), None)
        if connection is not None:
            connection.close()


class _Connection(http.client.HTTPConnection):
    """One that checks the pin before it says a word."""

    def __init__(self, code: Code, connect_s: float) -> None:
        super().__init__(code.host, code.port, timeout=connect_s)
        self._fingerprint = code.fingerprint

    def connect(self) -> None:
        super().connect()
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._fingerprint:
            self.sock = wrap_client(self.sock)
            check_pin(self.sock, self._fingerprint)

    def exchange(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str], limit_s: float
    ) -> Reply:
        """A request and its answer, on this connection."""
        if self.sock is None:
            self.timeout = min(self.timeout or limit_s, limit_s)
            self.connect()
        assert self.sock is not None
        self.sock.settimeout(limit_s)
        # Whoever refuses a body by its length has answered, and does not read it.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.request(method, path, body=body or None, headers=headers)
        response = self.getresponse()
        most = -1 if response.status < 400 else _MAX_ERROR_BYTES
        try:
            data = response.read(most) if most > 0 else response.read()
        except http.client.IncompleteRead:
            raise ConnectionResetError("it died in the middle of an answer") from None
        if response.will_close or not response.isclosed():
            self.close()
        return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, data)


def decoded(reply: Reply, kind: type[T]) -> T:
    """The value in a reply. Raises OtherVersion."""
    try:
        return msgspec.json.decode(reply.body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise OtherVersion(str(error)) from None


def _problem(reply: Reply) -> Problem:
    try:
        return msgspec.json.decode(reply.body, type=Failed).error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        if reply.status >= 500:  # a proxy says so while the coordinator is away: that passes
            raise CoordinatorUnreachable(
                f"HTTP {reply.status} from somebody who is not the coordinator",
                hint="is it up? something before it answers in its place",
            ) from None
        raise OtherVersion(f"HTTP {reply.status}, without an error of ours") from None
