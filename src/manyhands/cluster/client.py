"""The Python client of a cluster.

with Cluster() as cluster:
    job = cluster.submit(["python", "train.py"], gpus=4)
    for piece in cluster.logs(job.id, follow=True):
        sys.stdout.buffer.write(piece)
    print(cluster.wait(job.id).state)
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote, urlencode

import msgspec

from manyhands.cluster.desk import NO_SUCH_ATTEMPT, Info, LogPlace, Submission
from manyhands.cluster.dial import (
    ANSWER_S,
    CoordinatorRefused,
    CoordinatorUnreachable,
    Dialler,
    OtherVersion,
    Reply,
    decoded,
)
from manyhands.cluster.errors import BadJob, ClusterError, NoSuchJob
from manyhands.cluster.find import find_coordinator
from manyhands.cluster.hosts import Node
from manyhands.cluster.job import Job, Spec, State, Step
from manyhands.cluster.messages import PROTOCOL, Hello, Status, Wants, Welcome
from manyhands.cluster.office import OfficeRefused, OfficeUnreachable
from manyhands.cluster.submission import checked_key

POLL_S = 30.0
"""How long one request of a longer wait is held back by the coordinator."""
OFFICE_S = 15.0
"""How long an agent waits for an answer: one that comes after its lease is of no use to it. Pieces
of logs may take longer, over a slow line.
"""
_JSON = "application/json"


class WaitTimeout(ClusterError, TimeoutError):
    """The job was not over in time; `job` is what it was then."""

    def __init__(self, job: Job, timeout_s: float) -> None:
        super().__init__(f"job {job.id} is {job.state} after {timeout_s:g} s of waiting")
        self.job = job


class Cluster:
    """A coordinator, as a user sees it. May be used from many threads; `close` when done.

    Without arguments it finds the coordinator of this machine: see `manyhands.cluster.find`.
    Raises CoordinatorUnreachable, CoordinatorRefused (with the coordinator's code), OtherVersion;
    NoSuchJob and BadJob where the coordinator says so.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        token: str | None = None,
        fingerprint: str | None = None,
        state: Path | None = None,
    ) -> None:
        self._dialler = Dialler(
            find_coordinator(address, token=token, fingerprint=fingerprint, state=state)
        )

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connections. Idempotent."""
        self._dialler.close()

    def info(self) -> Info:
        """Who answers. Raises OtherVersion where it speaks another protocol."""
        info = decoded(self._ask("GET", "/v1/info"), Info)
        if info.protocol != PROTOCOL:
            raise OtherVersion(f"protocol {info.protocol}, expected {PROTOCOL}")
        return info

    # Any: the fields of Spec, each checked there.
    def submit(self, command: Sequence[str], *, key: str = "", **spec: Any) -> Job:  # noqa: ANN401
        """Submits a job; `spec` are the fields of `manyhands.cluster.job.Spec`.

        Without a key one is drawn: the request may then be repeated by this client, never by
        accident by another.
        """
        try:
            made = msgspec.convert({"command": list(command), **spec}, Spec)
        except msgspec.ValidationError as error:
            raise BadJob(f"this is not a job: {error}") from None
        key = checked_key(key) or f"auto:{secrets.token_urlsafe(18).replace('_', '.')}"
        try:
            body = msgspec.json.encode(Submission(spec=made, key=key))
        except UnicodeEncodeError:
            raise BadJob("a job's texts must be Unicode") from None
        return decoded(self._ask("POST", "/v1/jobs", body=body), Job)

    def job(self, id: int) -> Job:
        """The job as it is now."""
        return decoded(self._ask("GET", f"/v1/jobs/{_id(id)}", job=id), Job)

    def jobs(self, *, state: State | None = None, limit: int = 1000) -> list[Job]:
        """The newest first."""
        query = {"limit": limit, **({} if state is None else {"state": State(state).value})}
        return decoded(self._ask("GET", f"/v1/jobs?{urlencode(query)}"), list[Job])

    def history(self, id: int) -> list[Step]:
        """Every step of the job."""
        return decoded(self._ask("GET", f"/v1/jobs/{_id(id)}/history", job=id), list[Step])

    def cancel(self, id: int) -> Job:
        """Has the job ended; it may take its grace. One that is over stays as it is."""
        return decoded(self._ask("POST", f"/v1/jobs/{_id(id)}/cancel", job=id), Job)

    def wait(self, id: int, timeout_s: float | None = None) -> Job:
        """Blocks until the job is over. Raises WaitTimeout; without a time-out it has no end."""
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            rest_s = POLL_S if end_s is None else max(0.0, end_s - time.monotonic())
            poll_s = min(POLL_S, rest_s)
            path = f"/v1/jobs/{_id(id)}/wait?timeout_s={poll_s:.3f}"
            job = decoded(self._ask("GET", path, job=id, wait_s=poll_s), Job)
            if job.is_over:
                return job
            if end_s is not None and time.monotonic() >= end_s:
                raise WaitTimeout(job, timeout_s or 0.0)

    def logs(
        self,
        id: int,
        *,
        rank: int = 0,
        follow: bool = False,
        attempt: int | None = None,
        offset: int = 0,
    ) -> Iterator[bytes]:
        """What a rank wrote, piece by piece, from byte `offset` on.

        Of one attempt, or without `attempt` of the present one. With `follow` it goes on while
        the attempt does; and without `attempt`, through all further attempts, until the job is
        over and all of its log has been given.
        """
        current = self.job(id).attempt if attempt is None else attempt
        while True:
            wait_s = POLL_S if follow else 0.0
            query = {"rank": rank, "attempt": current, "offset": offset, "wait_s": wait_s}
            path = f"/v1/jobs/{_id(id)}/logs?{urlencode(query)}"
            try:
                reply = self._ask("GET", path, job=id, wait_s=wait_s)
            except CoordinatorRefused as error:
                # It was to begin again, and was ended before it did.
                if attempt is None and error.code == NO_SUCH_ATTEMPT:
                    return
                raise
            if reply.body:
                yield reply.body
            offset += len(reply.body)
            if not follow and not reply.body:
                return
            if reply.headers.get("x-ended") != "true":
                continue
            if attempt is not None or not follow:
                return
            job = self.job(id)
            if job.is_over and job.attempt <= current:
                return
            current, offset = current + 1, 0

    def nodes(self) -> list[Node]:
        """The hosts."""
        return decoded(self._ask("GET", "/v1/nodes"), list[Node])

    def shut_down(self) -> None:
        """Has the cluster go down; it has begun to when this returns."""
        self._ask("POST", "/v1/shutdown")

    def _ask(
        self,
        method: str,
        path: str,
        *,
        body: bytes = b"",
        job: int | None = None,
        wait_s: float = 0.0,
    ) -> Reply:
        kind = _JSON if body else ""
        try:
            return self._dialler.ask(method, path, body=body, kind=kind, wait_s=wait_s)
        except CoordinatorRefused as error:
            if error.code == "no-such-job" and job is not None:
                raise NoSuchJob(job) from None
            if error.code in ("bad-job", "unplaceable"):
                raise BadJob(error.message, hint=error.hint) from None
            raise


class HttpOffice:
    """The coordinator as an agent sees it, over HTTP: an Office. Each thread has a connection of
    its own; `close` ends them all.
    """

    def __init__(self, dialler: Dialler) -> None:
        self._dialler = dialler
        self._status_s = OFFICE_S

    def __enter__(self) -> HttpOffice:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent."""
        self._dialler.close()

    def hello(self, hello: Hello) -> Welcome:
        body = msgspec.json.encode(hello)
        welcome = _decoded(self._ask("POST", "/v1/agents", body=body), Welcome)
        # A connection that is dead without a word must leave time to try another one.
        self._status_s = min(OFFICE_S, welcome.lease_s / 4)
        return welcome

    def status(self, host: str, status: Status) -> None:
        body = msgspec.json.encode(status)
        path = f"/v1/agents/{quote(host, safe='')}/status"
        self._ask("POST", path, body=body, answer_s=self._status_s)

    def wants(self, host: str, agent: str, seen: int, wait_s: float) -> Wants:
        query = urlencode({"agent": agent, "seen": seen, "wait_s": wait_s})
        path = f"/v1/agents/{quote(host, safe='')}/wants?{query}"
        return _decoded(self._ask("GET", path, wait_s=wait_s), Wants)

    def send_log(
        self, host: str, agent: str, job: int, attempt: int, rank: int, offset: int, data: bytes
    ) -> int:
        query = urlencode({"agent": agent, "offset": offset})
        path = f"/v1/agents/{quote(host, safe='')}/logs/{job}/{attempt}/{rank}?{query}"
        try:
            reply = self._ask(
                "PUT", path, body=data, kind="application/octet-stream", answer_s=ANSWER_S
            )
        except _WrongOffset as error:
            return error.have
        return _decoded(reply, LogPlace).offset

    def _ask(
        self,
        method: str,
        path: str,
        *,
        body: bytes = b"",
        kind: str = _JSON,
        wait_s: float = 0.0,
        answer_s: float = OFFICE_S,
    ) -> Reply:
        kind = kind if body else ""
        try:
            return self._dialler.ask(
                method, path, body=body, kind=kind, wait_s=wait_s, answer_s=answer_s
            )
        except CoordinatorUnreachable as error:
            raise OfficeUnreachable(error.message, hint=error.hint) from None
        except OtherVersion as error:
            raise OfficeRefused("version", error.message, hint=error.hint) from None
        except CoordinatorRefused as error:
            if error.code == "offset" and error.offset is not None:
                raise _WrongOffset(error.offset) from None
            # It is busy, going down, or has no room: that passes.
            if error.status >= 500 or error.status in (408, 429):
                raise OfficeUnreachable(error.message, hint=error.hint) from None
            raise OfficeRefused(error.code, error.message, hint=error.hint) from None


class _WrongOffset(Exception):
    def __init__(self, have: int) -> None:
        super().__init__(have)
        self.have = have


def _decoded(reply: Reply, kind: type[Any]) -> Any:  # noqa: ANN401 - what `kind` says
    try:
        return decoded(reply, kind)
    except OtherVersion as error:
        raise OfficeRefused("version", error.message, hint=error.hint) from None


def _id(id: int) -> int:
    """A number that is put in a path must be one."""
    if isinstance(id, bool) or not isinstance(id, int) or id < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise NoSuchJob(id)
    return id
