"""An office in memory that does as a test scripts it, and a way to it for agents in processes."""

from __future__ import annotations

import base64
import json
import socket
import socketserver
import threading
from typing import TYPE_CHECKING, Self

import msgspec

from manyhands.cluster.job import Spec
from manyhands.cluster.messages import Hello, Phase, Status, Task, Want, Wants, Welcome
from manyhands.cluster.office import OfficeRefused, OfficeUnreachable
from manyhands.cluster.uploads import OTHER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from manyhands.cluster.messages import Holding

PATIENCE_S = 90.0  # for anything that must happen; only a failure takes that long
_CALL_S = 10.0


class FakeOffice:
    """A coordinator of one host, without a scheduler: the test says what is wanted."""

    def __init__(self, *, lease_s: float = 60.0, cluster: str = "c1") -> None:
        self.lease_s, self.cluster = lease_s, cluster
        self.hellos: list[Hello] = []
        self.statuses: list[Status] = []
        self.logs: dict[tuple[int, int, int], bytearray] = {}
        self.chunks: list[int] = []
        self.refused: dict[str, str] = {}
        """Method -> code: what it is refused with."""
        self.refusals: dict[str, int] = {}
        """Method -> how many times it was."""
        self.unreachable: set[str] = set()
        """Methods whose requests do not arrive."""
        self.hangs = False
        """Whether whoever asks what is wanted is not answered, nor cut off."""
        self.lost_answers: dict[str, int] = {}
        """Method -> how many times it is done, and the answer lost."""
        self._wants = Wants(version=1)
        self._known: str | None = None
        self._closed = False
        self._changed = threading.Condition()

    # The test's side

    def want(self, *wants: Want, leave: bool = False) -> None:
        with self._changed:
            self._wants = Wants(version=self._wants.version + 1, wants=wants, leave=leave)
            self._changed.notify_all()

    def restart(self) -> None:
        """As a coordinator that was killed: it knows its jobs, not who is connected."""
        with self._changed:
            self._known = None
            self._wants = msgspec.structs.replace(self._wants, version=1)
            self._changed.notify_all()

    def cut(self, *methods: str) -> None:
        """Nothing of these arrives any more, and those that wait for an answer get none."""
        with self._changed:
            self.unreachable = set(methods or ("hello", "status", "wants", "send_log"))
            self._changed.notify_all()

    def mend(self) -> None:
        with self._changed:
            self.unreachable, self.hangs = set(), False
            self._changed.notify_all()

    def wait(self, what: Callable[[], object], name: str) -> object:
        with self._changed:
            found = self._changed.wait_for(what, PATIENCE_S)
        assert found, f"waited for {name} in vain; last status: {self.statuses[-1:]}"
        return found

    def holding(self, job: int = 1, attempt: int = 0) -> Holding | None:
        """As the last Status has it."""
        holdings = self.statuses[-1].holdings if self.statuses else ()
        return next((h for h in holdings if (h.job, h.attempt) == (job, attempt)), None)

    def wait_phase(self, phase: Phase, job: int = 1, attempt: int = 0) -> Holding:
        self.wait(
            lambda: (h := self.holding(job, attempt)) is not None and h.phase is phase,
            f"job {job} to be {phase}",
        )
        return self.holding(job, attempt)

    def wait_log(self, text: bytes, rank: int = 0, job: int = 1, attempt: int = 0) -> bytes:
        key = (job, attempt, rank)
        self.wait(lambda: text in self.logs.get(key, b""), f"{text!r} in the log of {key}")
        return bytes(self.logs[key])

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # The agent's side

    def hello(self, hello: Hello) -> Welcome:
        with self._done("hello"):
            self.hellos.append(hello)
            self._known = hello.agent
            return Welcome(lease_s=self.lease_s, cluster=self.cluster)

    def status(self, host: str, status: Status) -> None:
        with self._done("status"):
            self._check(status.agent)
            self.statuses.append(status)

    def wants(self, host: str, agent: str, seen: int, wait_s: float) -> Wants:
        with self._done("wants"):
            self._changed.wait_for(lambda: self._closed or not self.hangs)
            self._check(agent)
            self._changed.wait_for(
                lambda: (
                    self._closed
                    or self._wants.version != seen
                    or agent != self._known
                    or "wants" in self.unreachable
                ),
                wait_s,
            )
            if self._closed or "wants" in self.unreachable:
                raise OfficeUnreachable("cut while waiting")
            self._check(agent)
            return self._wants

    def send_log(
        self, host: str, agent: str, job: int, attempt: int, rank: int, offset: int, data: bytes
    ) -> int:
        with self._done("send_log"):
            self._check(agent)
            has = self.logs.setdefault((job, attempt, rank), bytearray())
            known = has[offset : offset + len(data)]
            if not data.startswith(known):
                raise OfficeRefused(OTHER_BYTES, "the log has other bytes there")
            if offset <= len(has) and len(known) < len(data):
                has += data[len(known) :]
                self.chunks.append(len(data) - len(known))
            return len(has)

    def _check(self, agent: str) -> None:
        if agent != self._known:
            raise OfficeRefused("not-a-host", "say Hello first")

    def _done(self, method: str) -> _Call:
        return _Call(self, self._changed, method)


class _Call:
    """One request: whether it arrives, is taken, and is answered."""

    def __init__(self, office: FakeOffice, changed: threading.Condition, method: str) -> None:
        self._office, self._changed, self._method = office, changed, method

    def __enter__(self) -> None:
        self._changed.acquire()
        office, method = self._office, self._method
        if office._closed or method in office.unreachable:
            self._changed.release()
            raise OfficeUnreachable(f"{method} does not arrive")
        if method in office.refused:
            office.refusals[method] = office.refusals.get(method, 0) + 1
            self._changed.notify_all()
            self._changed.release()
            raise OfficeRefused(office.refused[method], f"{method} is refused")

    def __exit__(self, kind, error, trace) -> None:
        lost = self._office.lost_answers.get(self._method, 0)
        if kind is None and lost:
            self._office.lost_answers[self._method] = lost - 1
        self._changed.notify_all()
        self._changed.release()
        if kind is None and lost:
            raise OfficeUnreachable("the answer is lost")


class OfficeServer:
    """A FakeOffice for other processes: a connection and a JSON line for each call."""

    def __init__(self, office: FakeOffice) -> None:
        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                method, *arguments = json.loads(self.rfile.readline())
                try:
                    answer = {"value": _call(office, method, arguments)}
                except OfficeRefused as error:
                    answer = {"refused": [error.code, error.message]}
                except OfficeUnreachable:
                    return
                self.wfile.write(msgspec.json.encode(answer) + b"\n")

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = False

            def handle_error(self, request, client_address) -> None:
                """Agents are killed in the middle of requests."""

        self._office = office
        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind, error, trace) -> None:
        self._office.close()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _call(office: FakeOffice, method: str, arguments: list) -> object:
    if method == "hello":
        return office.hello(msgspec.convert(arguments[0], Hello))
    if method == "status":
        return office.status(arguments[0], msgspec.convert(arguments[1], Status))
    if method == "send_log":
        return office.send_log(*arguments[:-1], base64.b64decode(arguments[-1]))
    return office.wants(*arguments)


class DistantOffice:
    """The agent's end of an OfficeServer."""

    welcomed = False  # in this process

    def __init__(self, port: int) -> None:
        self._port = port

    def hello(self, hello: Hello) -> Welcome:
        welcome = msgspec.convert(self._ask("hello", hello), Welcome)
        DistantOffice.welcomed = True
        return welcome

    def status(self, host: str, status: Status) -> None:
        self._ask("status", host, status)

    def wants(self, host: str, agent: str, seen: int, wait_s: float) -> Wants:
        return msgspec.convert(self._ask("wants", host, agent, seen, wait_s, wait_s=wait_s), Wants)

    def send_log(self, *arguments) -> int:
        data = base64.b64encode(arguments[-1]).decode()
        return self._ask("send_log", *arguments[:-1], data)

    def _ask(self, *call, wait_s: float = 0.0):
        try:
            with (
                socket.create_connection(("127.0.0.1", self._port), _CALL_S + wait_s) as connection,
                connection.makefile("rwb") as file,
            ):
                file.write(msgspec.json.encode(call) + b"\n")
                file.flush()
                line = file.readline()
        except OSError as error:
            raise OfficeUnreachable(str(error)) from error
        if not line:
            raise OfficeUnreachable("no answer")
        answer = json.loads(line)
        if "refused" in answer:
            raise OfficeRefused(*answer["refused"])
        return answer["value"]


def want(
    command: tuple[str, ...],
    *,
    job: int = 1,
    attempt: int = 0,
    ranks: int = 1,
    port: int = 29500,
    stop: bool = False,
    hub: str = "",
    **spec: object,
) -> Want:
    """A want of as many ranks on the first slots of one host."""
    task = Task(
        spec=Spec(command=command, gpus=ranks, **{"grace_s": 30.0, **spec}),
        ranks=tuple((rank, rank) for rank in range(ranks)),
        world_size=ranks,
        num_hosts=1,
        rank_of_host=0,
        master_addr="127.0.0.1",
        master_port=port,
        hub=hub,
        run=f"job-{job}-{attempt}" if hub else "",
    )
    return Want(job=job, attempt=attempt, task=task, stop=stop)
