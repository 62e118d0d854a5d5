"""The API: what each route does. Handlers are coroutines; the coordinator and the disk are asked
from a pool of threads, briefly; long polls wait by the bell.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import parse_qsl

import msgspec
from starlette.routing import Route as Path
from starlette.routing import Router

from manyhands._version import __version__
from manyhands.cluster import desk as ask
from manyhands.cluster import errors, gate
from manyhands.cluster.bell import Bell, Gone
from manyhands.cluster.desk import Desk, HttpError
from manyhands.cluster.hosts import ranks_of
from manyhands.cluster.job import PLACED, Job, State
from manyhands.cluster.limits import HttpLimits
from manyhands.cluster.logs import DiskFull, LogError, LogName, Logs, OtherBytes, WrongOffset
from manyhands.cluster.messages import Hello, Status, Wants
from manyhands.cluster.openapi import document
from manyhands.cluster.routes import ROUTES, Body, Kind, Route
from manyhands.core.errors import ManyhandsError, UsageError

T = TypeVar("T")
_MAX_QUERY_FIELDS = 16

_STATUSES: Mapping[type[ManyhandsError], tuple[int, str]] = {
    # The first that fits counts.
    errors.Unplaceable: (422, "unplaceable"),
    errors.BadJob: (422, "bad-job"),
    errors.BadReport: (422, "bad-report"),
    errors.NoSuchJob: (404, "no-such-job"),
    errors.KeyTaken: (409, "key-taken"),
    errors.QueueFull: (503, "queue-full"),
    errors.HostTaken: (409, "host-taken"),
    errors.NotAHost: (404, "not-a-host"),
    errors.CoordinatorClosed: (503, "closed"),
    errors.Fenced: (503, "fenced"),
    errors.StoreFull: (503, "store-full"),
    errors.StoreError: (503, "store"),
    DiskFull: (507, "disk-full"),
    WrongOffset: (409, "offset"),
    OtherBytes: (409, "other-bytes"),
    LogError: (503, "log"),
    UsageError: (422, "usage"),
    ManyhandsError: (503, "unavailable"),
}


class Answer(NamedTuple):
    """What a handler gives back; `value` is encoded as the route says."""

    status: int
    value: object
    headers: tuple[tuple[bytes, bytes], ...] = ()


class Call(NamedTuple):
    """A request that has passed the gate and fits its route."""

    parts: Any  # of the route's type `parts`, and so on: each handler says which it is
    query: Any
    body: Any
    receive: gate.Receive


class Api:
    """Answers every route of the table for one coordinator. Made in the event loop."""

    def __init__(
        self,
        desk: Desk,
        logs: Logs,
        *,
        bell: Bell,
        pool: Executor,
        limits: HttpLimits,
        shut_down: Callable[[], None],
    ) -> None:
        self._desk = desk
        self._logs = logs
        self._bell = bell
        self._pool = pool
        self._limits = limits
        self._shut_down = shut_down
        self._document = msgspec.json.encode(document())
        self._going_down = threading.Event()
        self._polls: dict[str, object] = {}
        """The newest poll of each host whose agent waits."""

    def app(self) -> gate.App:
        """All routes as one ASGI application, to be put behind a Gate."""
        paths: dict[str, dict[str, Route]] = {}
        for route in ROUTES:
            paths.setdefault(route.path, {})[route.method] = route
        table = [Path(path, _Methods(self, methods)) for path, methods in paths.items()]
        return Router(table, redirect_slashes=False, default=_not_found)

    async def answer(
        self, route: Route, scope: gate.Scope, receive: gate.Receive, send: gate.Send
    ) -> None:
        """Reads what the route takes, has it done, and answers."""
        if route.role is not None and scope[gate.ROLE] is not route.role:
            raise HttpError(
                403,
                "role",
                f"this needs the {route.role} token, and that was the {scope[gate.ROLE]} token",
                hint="a join code lets agents in and nobody else"
                if route.role == "user"
                else "agents use the join code that `manyhands up` prints",
            )
        parts = _fitting(scope["path_params"], route.parts, "path")
        query = _fitting(_query(scope), route.query, "query")
        most = self._limits.log_bytes if route.body is Body.BYTES else self._limits.json_bytes
        if route.body is Body.NONE:
            most = 0
        read = await gate.read_body(scope, receive, most, self._limits)
        body: object = read
        if not isinstance(route.body, Body):
            body = _decoded(scope, read, route.body)
        call = Call(parts, query, body, receive)
        handler: Callable[[Call], Awaitable[Answer]] = getattr(self, route.does)
        try:
            done = await handler(call)
        except Gone:
            return
        except ManyhandsError as error:
            raise _http(error) from error
        kind = route.answers[done.status]
        if kind is Body.BYTES or kind is Body.DOCUMENT:
            assert isinstance(done.value, bytes)
            await gate.answer(send, done.status, done.value, kind.value, done.headers)
        elif kind is Body.NONE:
            await gate.answer(send, done.status, b"", "", done.headers)
        else:
            # A list may have ten thousand jobs: the loop, and with it every lease, would wait.
            encode = msgspec.json.encode
            is_long = isinstance(done.value, Sequence)
            data = await self._do(encode, done.value) if is_long else encode(done.value)
            await gate.answer(send, done.status, data, "application/json", done.headers)

    async def _do(self, function: Callable[..., T], *arguments: object) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, function, *arguments)

    # What routes do. The names are those in the table.

    async def document(self, call: Call) -> Answer:
        """GET /openapi.json"""
        return Answer(200, self._document)

    async def info(self, call: Call) -> Answer:
        """GET /v1/info"""
        return Answer(200, ask.Info(version=__version__))

    async def submit(self, call: Call) -> Answer:
        """POST /v1/jobs"""
        body: ask.Submission = call.body
        job, is_new = await self._do(self._desk.submit, body.spec, body.key)
        return Answer(201 if is_new else 200, job)

    async def jobs(self, call: Call) -> Answer:
        """GET /v1/jobs"""
        query: ask.JobsQuery = call.query
        states = () if query.state is None else (query.state,)
        return Answer(
            200, await self._do(lambda: self._desk.jobs(states=states, limit=query.limit))
        )

    async def job(self, call: Call) -> Answer:
        """GET /v1/jobs/{id}"""
        parts: ask.JobParts = call.parts
        return Answer(200, await self._do(self._desk.job, parts.id))

    async def history(self, call: Call) -> Answer:
        """GET /v1/jobs/{id}/history"""
        parts: ask.JobParts = call.parts
        return Answer(200, await self._do(self._desk.history, parts.id))

    async def cancel(self, call: Call) -> Answer:
        """POST /v1/jobs/{id}/cancel"""
        parts: ask.JobParts = call.parts
        return Answer(200, await self._do(self._desk.cancel, parts.id))

    async def wait(self, call: Call) -> Answer:
        """GET /v1/jobs/{id}/wait"""
        parts: ask.JobParts = call.parts
        query: ask.WaitQuery = call.query
        job = await self._bell.hold(
            lambda: self._do(self._desk.job, parts.id),
            enough=lambda job: job.is_over,
            topics=(parts.id,),
            wait_s=query.timeout_s,
            receive=call.receive,
        )
        return Answer(200, job)

    async def read_log(self, call: Call) -> Answer:
        """GET /v1/jobs/{id}/logs"""
        parts: ask.JobParts = call.parts
        query: ask.LogQuery = call.query
        attempt = query.attempt
        if attempt is None:
            attempt = (await self._do(self._desk.job, parts.id)).attempt
        name = LogName(parts.id, attempt, query.rank)

        def look() -> tuple[bytes, bool]:
            # The job first: bytes that come after it is over are none.
            job = self._desk.job(name.job)
            _check(job, name, next_too=not job.is_over)
            data = self._logs.read(name, query.offset, query.limit)
            return data, is_written(job, attempt) and len(data) < query.limit

        data, ended = await self._bell.hold(
            lambda: self._do(look),
            enough=lambda seen: bool(seen[0]) or seen[1],
            topics=(parts.id, name),
            wait_s=query.wait_s,
            receive=call.receive,
        )
        headers = (
            (b"x-attempt", b"%d" % attempt),
            (b"x-next-offset", b"%d" % (query.offset + len(data))),
            (b"x-ended", b"true" if ended else b"false"),
        )
        return Answer(200, data, headers)

    async def nodes(self, call: Call) -> Answer:
        """GET /v1/nodes"""
        return Answer(200, await self._do(self._desk.nodes))

    async def shut_down(self, call: Call) -> Answer:
        """POST /v1/shutdown; asked twice, it goes down once."""
        if not self._going_down.is_set():
            self._going_down.set()
            self._shut_down()
        return Answer(202, ask.Down())

    async def hello(self, call: Call) -> Answer:
        """POST /v1/agents"""
        body: Hello = call.body
        return Answer(200, await self._do(self._desk.hello, body))

    async def status(self, call: Call) -> Answer:
        """POST /v1/agents/{host}/status"""
        parts: ask.HostParts = call.parts
        body: Status = call.body
        await self._do(self._desk.status, parts.host, body)
        return Answer(204, None)

    async def wants(self, call: Call) -> Answer:
        """GET /v1/agents/{host}/wants: who hangs up here may be gone altogether."""
        parts: ask.HostParts = call.parts
        query: ask.WantsQuery = call.query
        poll = self._polls[parts.host] = object()
        again = False

        async def look() -> Wants:
            nonlocal again
            asks = partial(self._desk.wants, again=again)
            again = True
            return await self._do(asks, parts.host, query.agent, query.seen, 0.0)

        try:
            wants = await self._bell.hold(
                look,
                # Not only newer: a coordinator that was restored may count from further back.
                enough=lambda wants: wants.version != query.seen,
                topics=(parts.host,),
                wait_s=query.wait_s,
                receive=call.receive,
            )
        except Gone:
            if self._polls.get(parts.host) is poll:  # else it has asked again since
                await self._do(self._desk.lost, parts.host, query.agent)
            raise
        finally:
            if self._polls.get(parts.host) is poll:
                del self._polls[parts.host]
        return Answer(200, wants)

    async def append_log(self, call: Call) -> Answer:
        """PUT /v1/agents/{host}/logs/{job}/{attempt}/{rank}"""
        parts: ask.LogParts = call.parts
        query: ask.AppendQuery = call.query
        name = LogName(parts.job, parts.attempt, parts.rank)

        def append() -> int:
            job = self._desk.job(name.job)
            _check(job, name, next_too=False)
            self._desk.check_sender(parts.host, query.agent)
            _check_place(job, name, parts.host)
            return self._logs.append(name, query.offset, call.body)

        return Answer(200, ask.LogPlace(offset=await self._do(append)))


class _Methods:
    """One path: each method that it has, and an error for the others."""

    def __init__(self, api: Api, methods: Mapping[str, Route]) -> None:
        self._api = api
        self._methods = methods

    async def __call__(self, scope: gate.Scope, receive: gate.Receive, send: gate.Send) -> None:
        route = self._methods.get(scope["method"])
        if route is None:
            allowed = ", ".join(sorted(self._methods))
            raise HttpError(
                405,
                "method",
                f"this path takes {allowed}",
                headers=((b"allow", allowed.encode()),),
            )
        await self._api.answer(route, scope, receive, send)


def is_written(job: Job, attempt: int) -> bool:
    """Whether nothing more can come of this attempt (its agents send the rest of its logs before
    they report its end).
    """
    if job.is_over or job.attempt > attempt:
        return True
    if job.attempt < attempt or job.state in PLACED:
        return False
    # A job that waits for its next attempt still carries the number of the last one.
    begun = job.started_s is not None or job.node_failures + job.preemptions > 0
    return job.state is not State.PENDING or begun


def _check(job: Job, name: LogName, *, next_too: bool) -> None:
    """Followers may ask for the attempt after the present one, which may be about to begin; of a
    job that is over, none is.
    """
    if name.rank >= job.spec.gpus:
        raise HttpError(
            404, "no-such-rank", f"job {job.id} has ranks 0 to {job.spec.gpus - 1}, not {name.rank}"
        )
    if name.attempt > job.attempt + next_too:
        raise HttpError(
            404,
            ask.NO_SUCH_ATTEMPT,
            f"job {job.id} has attempts 0 to {job.attempt}, not {name.attempt}",
        )


def _check_place(job: Job, name: LogName, host: str) -> None:
    """An agent speaks for its own host's ranks only. Where those of an attempt that is over were is
    not known any more: their last lines may still come.
    """
    is_current = bool(job.places) and name.attempt == job.attempt
    if is_current and name.rank not in ranks_of(job, host):
        raise HttpError(403, "not-here", f"rank {name.rank} of job {job.id} is not on host {host}")


def _http(error: ManyhandsError) -> HttpError:
    if isinstance(error, HttpError):
        return error
    status, code = next(found for kind, found in _STATUSES.items() if isinstance(error, kind))
    have = error.have if isinstance(error, LogError) else None
    return HttpError(status, code, error.message, hint=error.hint, offset=have)


def _query(scope: gate.Scope) -> dict[str, str]:
    try:
        pairs = parse_qsl(
            scope["query_string"].decode("ascii"),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=_MAX_QUERY_FIELDS,
        )
    except ValueError:
        raise HttpError(400, "query", "the query cannot be read") from None
    query = dict(pairs)
    if len(query) < len(pairs):
        raise HttpError(400, "query", "a parameter is there twice")
    if any(ord(sign) < 32 or ord(sign) == 127 for value in query.values() for sign in value):
        raise HttpError(400, "query", "no parameter has control characters in it")
    return query


def _fitting(values: Mapping[str, str], kind: type[T], where: str) -> T:
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise HttpError(400, where, str(error)) from None


def _decoded(scope: gate.Scope, body: bytes, kind: Kind) -> object:
    sent = [value for name, value in scope["headers"] if name == b"content-type"]
    if [value.split(b";")[0].strip().lower() for value in sent] != [b"application/json"]:
        raise HttpError(415, "type", "the body must be application/json")
    try:
        return msgspec.json.decode(body, type=cast("Any", kind))
    except RecursionError:
        raise HttpError(400, "body", "the body is nested too deeply") from None
    except UnicodeDecodeError:
        raise HttpError(400, "body", "the body is not UTF-8") from None
    except msgspec.MsgspecError as error:
        raise HttpError(400, "body", str(error)) from None


async def _not_found(scope: gate.Scope, receive: gate.Receive, send: gate.Send) -> None:
    raise HttpError(404, "path", "there is nothing at this path", hint="see /openapi.json")
