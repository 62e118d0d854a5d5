"""The gate: every request passes here first, before anything of it is believed.

    Host ─► Origin ─► token ─► rate ─► route ─► body (size, time) ─► handler

A browser that was lured here has the wrong Host (DNS rebinding) or an Origin that is not ours, and
no token; a guesser of tokens is slowed down; a body is refused by its announced length before it
is read. All methods are treated alike.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any

import msgspec

from manyhands.cluster.desk import Failed, HttpError, Problem
from manyhands.cluster.limits import HttpLimits, Rates
from manyhands.cluster.routes import Role
from manyhands.core.address import is_loopback

# ASGI's own words: the values of these dictionaries have many types.
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

KNOWN = "manyhands.known"
"""Set in the scope of a request that has shown a token."""
MADE_KNOWN = "manyhands.made_known"
"""In the state of a scope: to be called then, since its connection is no stranger's from now on,
however long the answer takes."""
ROLE = "manyhands.role"

HEADERS = (
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
)
"""On every answer: nothing of ours is shown in a page, kept, or guessed at by a browser."""


class Gate:
    """Lets those in who have business here; everybody else gets an error as JSON.

    `names` are the names by which this server may be called; with `loopback`, beside those of
    this machine, and otherwise beside any IP address (rebinding needs a name).
    """

    def __init__(
        self,
        app: App,
        *,
        tokens: Mapping[Role, str],
        names: Iterable[str],
        loopback: bool,
        limits: HttpLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._tokens = {role: token.encode() for role, token in tokens.items()}
        if not all(self._tokens.values()):
            raise ValueError("an empty token would let everybody in")
        self._names = frozenset(name.lower().rstrip(".") for name in names)
        self._loopback = loopback
        self._limits = limits
        per_s = limits.failures_per_min / 60
        self._failures = Rates(per_s, limits.failures_per_min, clock=clock)
        self._requests = Rates(limits.requests_per_s, 2 * limits.requests_per_s, clock=clock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            self._admit(scope)
            await self._app(scope, receive, send)
        except HttpError as error:
            await answer_error(scope, send, error)
        except Exception:
            # A bug of ours; uvicorn writes what was raised to the log.
            error = HttpError(500, "internal", "the coordinator failed at this request")
            await answer_error(scope, send, error)
            raise

    def _admit(self, scope: Scope) -> None:
        # h11 counts only what has not come in one piece.
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        if size + len(scope["raw_path"]) + len(scope["query_string"]) > self._limits.headers_bytes:
            raise HttpError(431, "headers", "the path and the headers are too long")
        host = _only(scope, b"host")
        if host is None or not self._is_ours(host):
            raise HttpError(
                421,
                "host",
                "this coordinator is not known by that name",
                hint="call it by its address, or by the name that `manyhands up` has for it: that "
                "of --advertise, or of --bind",
            )
        origin = _only(scope, b"origin")
        # A page of this very server could say so; nobody else's.
        if origin is not None and origin.lower() != f"{scope['scheme']}://{host}".lower():
            raise HttpError(403, "origin", "requests from web pages are not taken")
        if any(ord(sign) < 32 or ord(sign) == 127 for sign in scope["path"]):
            raise HttpError(404, "path", "no path has control characters in it")
        scope[ROLE] = self._role(scope)
        scope[KNOWN] = True
        scope["state"][MADE_KNOWN]()

    def _role(self, scope: Scope) -> Role:
        address = _address(scope)
        scheme, _, shown = (_only(scope, b"authorization") or "").partition(" ")
        given = shown.strip().encode("latin-1", "replace")
        # Both are compared, whatever the first says: how long it takes tells nothing.
        fits = [role for role, token in self._tokens.items() if hmac.compare_digest(given, token)]
        if scheme.lower() != "bearer" or not fits:
            # A right token from the same address still passes: a lock would let anybody on this
            # machine keep its users out, and 192 bits are not guessed at any rate.
            if wait_s := self._failures.take(address):
                raise HttpError(
                    429, "guesses", "too many wrong tokens from your address", retry_after_s=wait_s
                )
            raise HttpError(
                401,
                "token",
                "a token is needed" if not shown else "this is not the token of this cluster",
                hint="set MANYHANDS_TOKEN, or use the account that ran `manyhands up`",
            )
        self._count(fits[0], address)
        return fits[0]

    def _count(self, role: Role, address: str) -> None:
        if wait_s := self._requests.take((role, address)):
            raise HttpError(429, "rate", "too many requests", retry_after_s=wait_s)

    def _is_ours(self, header: str) -> bool:
        name = _host_name(header)
        if name is None:
            return False
        if name in self._names or is_loopback(name):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return not self._loopback


def _address(scope: Scope) -> str:
    return (scope.get("client") or ("",))[0]


def _host_name(header: str) -> str | None:
    """The name in a Host header, without its port and brackets; None where it is malformed."""
    name, bracket, rest = header.rpartition("]")
    if bracket:
        name = name[1:] if name.startswith("[") else ""
        port = rest.removeprefix(":") if rest else "0"
    else:
        name, _, port = header.partition(":")
        port = port if ":" in header else "0"
    # A forwarded port (ssh -L) is another than ours, so any will do.
    if not name or not port.isascii() or not port.isdigit():
        return None
    return name.lower().rstrip(".")


def _only(scope: Scope, name: bytes) -> str | None:
    """The value of a header that may be there once."""
    values = [value for key, value in scope["headers"] if key == name]
    if len(values) > 1:
        raise HttpError(400, "header", f"the header {name.decode()} is there {len(values)} times")
    return values[0].decode("latin-1") if values else None


async def read_body(scope: Scope, receive: Receive, most: int, limits: HttpLimits) -> bytes:
    """The body of a request, of at most this many bytes, refused before it is read if longer."""
    # h11 has checked that it is a number.
    announced = int(_only(scope, b"content-length") or 0)
    too_much = HttpError(
        413, "size", f"the body may have {most} bytes", hint="send less, or in pieces"
    )
    if announced > most:
        raise too_much
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_s):
            while True:
                async with asyncio.timeout(limits.pause_s):
                    message = await receive()
                if message["type"] == "http.disconnect":
                    raise HttpError(400, "incomplete", "the body ends too early")
                body += message.get("body", b"")
                if len(body) > most:
                    raise too_much
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise HttpError(
            408, "slow", f"the body did not come within {limits.pause_s:g} s a piece"
        ) from None


async def answer(
    send: Send,
    status: int,
    body: bytes,
    kind: str,
    headers: Iterable[tuple[bytes, bytes]] = (),
) -> None:
    """A whole answer."""
    lines = [*HEADERS, (b"content-length", b"%d" % len(body)), *headers]
    if kind:
        lines.append((b"content-type", kind.encode()))
    if status == 204:
        lines = [line for line in lines if line[0] != b"content-length"]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body})


async def answer_error(scope: Scope, send: Send, error: HttpError) -> None:
    """An error as JSON; the connection ends where the request's body may still be under way."""
    headers: list[tuple[bytes, bytes]] = []
    names = {name for name, _ in scope["headers"]}
    if not scope.get(KNOWN) or names & {b"content-length", b"transfer-encoding"}:
        headers.append((b"connection", b"close"))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % (int(error.retry_after_s) + 1)))
    headers += error.headers
    await answer(send, error.status, error_body(error), "application/json", headers)


def error_body(error: HttpError) -> bytes:
    """The JSON of an error."""
    problem = Problem(code=error.code, message=error.message, hint=error.hint, offset=error.offset)
    return msgspec.json.encode(Failed(error=problem))
