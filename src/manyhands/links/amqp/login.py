"""AMQP logins: from an address to an open channel on a socket, by py-amqp.

py-amqp does the handshake, the tuning and the declarations, on a transport of ours: it counts every
wait against one deadline, takes the caller's TLS context, refuses frames above our limit before it
reads them, and leaves the socket exactly at a frame's end, where `AmqpChannel` takes over.
"""

# py-amqp has no types: what comes from it is Any, and goes no further than this module.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUntypedBaseClass=false, reportAny=false, reportExplicitAny=false

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import amqp
import amqp.transport

from manyhands.core.errors import (
    LinkBroken,
    LinkError,
    LinkTimeout,
    Malformed,
    Oversized,
    Refused,
    WireError,
)
from manyhands.links.amqp.frames import MIN_FRAME_MAX

FRAME_MAX = 131072  # RabbitMQ's default; larger frames gained nothing measurable

Setup = Callable[[Any], None]  # takes py-amqp's Channel


@dataclass(frozen=True, kw_only=True, slots=True)
class AmqpLogin:
    """Where a broker is, and who we are there. The password stays out of `repr`."""

    host: str
    port: int
    user: str
    password: str = field(repr=False)
    vhost: str = "/"
    ssl_context: ssl.SSLContext | None = field(default=None, repr=False)

    @property
    def place(self) -> str:
        """How errors name the broker."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"the broker at {host}:{self.port}"


class OpenSocket(NamedTuple):
    """A socket with channel 1 open on it, and what was agreed."""

    sock: socket.socket
    frame_max: int
    heartbeat_s: int


def log_in(login: AmqpLogin, setup: Setup, *, timeout_s: float, heartbeat_s: int) -> OpenSocket:
    """Connect, log in, open channel 1 and call `setup` with it, all within `timeout_s`.

    `setup` declares, binds and selects confirms; it must not consume: py-amqp would eat deliveries.
    Raises Refused (`credentials`, `vhost`, `permission`, `missing`, `locked`, `precondition`),
    LinkTimeout, or LinkBroken for a broker that is not there or does not speak AMQP.
    """
    transport = _Transport(login, timeout_s)
    connection = _Connection(login, transport, heartbeat_s)
    try:
        _set_up(connection, setup, login, timeout_s)
        sock, transport.sock = transport.sock, None  # py-amqp must not close it any more
        return OpenSocket(sock, int(connection.frame_max), int(connection.heartbeat or 0))
    finally:
        transport.close()


def run_errand(login: AmqpLogin, errand: Setup, *, timeout_s: float) -> None:
    """Log in, call `errand` with a channel, say good-bye. Raises what `log_in` raises.

    For declarations that may be refused: a refusal ends the channel, and no line is lost with it.
    """
    transport = _Transport(login, timeout_s)
    connection = _Connection(login, transport, heartbeat_s=0)
    try:
        _set_up(connection, errand, login, timeout_s)
        with _explained(login, timeout_s, _SETUP_FAILURES, _refused_setup):
            connection.close()
    finally:
        transport.close()


def _set_up(connection: _Connection, setup: Setup, login: AmqpLogin, timeout_s: float) -> None:
    with _explained(login, timeout_s, _FAILURES, _refused_login):
        connection.connect()
    with _explained(login, timeout_s, _SETUP_FAILURES, _refused_setup):
        setup(connection.channel(1))


@contextlib.contextmanager
def _explained(
    login: AmqpLogin,
    timeout_s: float,
    failures: tuple[type[Exception], ...],
    refused: Callable[[int, str, AmqpLogin], LinkError],
) -> Generator[None]:
    """Turn what py-amqp raises into errors that say what to do."""
    try:
        yield
    except failures as error:
        raise _explain(error, refused, login, timeout_s) from None


def refusal(reply_code: int, reply_text: str, place: str) -> LinkError:
    """The error for a channel or connection that the broker closed with this reply."""
    message = f"{place} ended the channel: {reply_code} {reply_text}"
    match reply_code:
        case 403:
            hint = "grant it: rabbitmqctl set_permissions -p VHOST USER CONFIGURE WRITE READ"
            return Refused("permission", message, hint=hint)
        case 404:
            return Refused("missing", message)
        case 405:
            return Refused("locked", message, hint="another connection holds this queue")
        case 406:
            return Refused("precondition", message)
        case _:
            return LinkBroken(message)


_SETUP_FAILURES: tuple[type[Exception], ...] = (amqp.AMQPError, OSError, WireError)
# py-amqp trusts the broker's bytes: garbage in the handshake surfaces as any of the built-in ones.
_FAILURES = (*_SETUP_FAILURES, LookupError, ValueError, TypeError, AttributeError, RecursionError,
             struct.error)  # fmt: skip


def _explain(
    error: Exception,
    refused: Callable[[int, str, AmqpLogin], LinkError],
    login: AmqpLogin,
    timeout_s: float,
) -> LinkError:
    if isinstance(error, LinkError):  # of the caller's own setup
        return error
    if isinstance(error, amqp.AMQPError) and error.reply_code:
        return refused(int(error.reply_code), str(error.reply_text), login)
    if isinstance(error, TimeoutError):
        return LinkTimeout(f"answer from {login.place}", timeout_s, hint="is the address right?")
    if isinstance(error, ssl.SSLError):
        hint = "is this the broker's amqps port, and is its certificate the expected one?"
        return LinkBroken(f"no TLS with {login.place}: {error}", hint=hint)
    if isinstance(error, OSError):
        tls = "without" if login.ssl_context is None else "with"
        hint = f"is it running, is the address right, and does it listen {tls} TLS there?"
        return LinkBroken(f"{login.place} cannot be reached: {error}", hint=hint)
    hint = "is something else listening there, or does the port want amqps?"
    return LinkBroken(f"{login.place} does not speak AMQP 0-9-1: {error}", hint=hint)


def _refused_login(code: int, text: str, login: AmqpLogin) -> LinkError:
    if code == 403:
        message = f"{login.place} refused the login of user {login.user!r}"
        return Refused("credentials", message, hint="check user and password")
    if code in (402, 530):
        message = f"{login.place} refused vhost {login.vhost!r} to user {login.user!r}: {text}"
        hint = "check the path of the URL; rabbitmqctl add_vhost and set_permissions make one"
        return Refused("vhost", message, hint=hint)
    return LinkBroken(f"{login.place} ended the login: {code} {text}")


def _refused_setup(code: int, text: str, login: AmqpLogin) -> LinkError:
    return refusal(code, text, login.place)


class _Connection(amqp.Connection):
    """py-amqp's connection on our transport, with frames no larger than ours."""

    def __init__(self, login: AmqpLogin, transport: _Transport, heartbeat_s: int) -> None:
        super().__init__(
            userid=login.user,
            password=login.password,
            login_method="PLAIN",
            virtual_host=login.vhost,
            heartbeat=heartbeat_s,
            client_properties={"product": "manyhands"},
        )
        self._ours = transport

    def Transport(self, *_args: object, **_settings: object) -> _Transport:
        return self._ours

    def _on_tune(
        self, channel_max: int, frame_max: int, server_heartbeat: int, argsig: str = "BlB"
    ) -> None:
        if 0 < frame_max < MIN_FRAME_MAX:
            raise Malformed(f"it wants frames of at most {frame_max} bytes")
        frame_max = min(frame_max or FRAME_MAX, FRAME_MAX)  # py-amqp takes whatever is named
        super()._on_tune(channel_max, frame_max, server_heartbeat, argsig)


class _Transport(amqp.transport.TCPTransport):
    """A socket, TLS or not, whose every wait ends at one deadline.

    py-amqp's own sets TCP_USER_TIMEOUT to one second, which makes the kernel reset the connection
    when the broker does not read for that long: in a memory alarm, for one. Ours sets none.
    """

    sock: Any  # py-amqp's own attribute: a socket, or None before and after

    def __init__(self, login: AmqpLogin, timeout_s: float) -> None:
        super().__init__("")
        self._login = login
        self._deadline = time.monotonic() + timeout_s

    def _left_s(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        return left

    def _connect(self, host: str, port: int, timeout: float | None) -> None:
        del host, port, timeout  # of py-amqp's own; ours are in the login
        error: OSError = OSError("no address")
        for family, kind, protocol, _name, address in socket.getaddrinfo(
            self._login.host, self._login.port, type=socket.SOCK_STREAM
        ):
            self.sock = socket.socket(family, kind, protocol)
            try:
                self.sock.settimeout(self._left_s())
                self.sock.connect(address)
            except OSError as failed:
                self.sock.close()
                error = failed
            else:
                return
        self.sock = None
        raise error

    def _init_socket(
        self, socket_settings: object, read_timeout: object, write_timeout: object
    ) -> None:
        del socket_settings, read_timeout, write_timeout
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._login.ssl_context is not None:
            self.sock.settimeout(self._left_s())
            self.sock = self._login.ssl_context.wrap_socket(
                self.sock, server_hostname=self._login.host
            )
        self._write(amqp.transport.AMQP_PROTOCOL_HEADER)

    def _read(self, n: int, initial: bool = False, _errnos: object = ()) -> bytes:
        del initial
        if n > FRAME_MAX:
            raise Oversized(f"a frame of {n} bytes; at most {FRAME_MAX} are taken")
        data = bytearray(n)
        filled = 0
        while filled < n:  # never a byte more: the data path goes on from here
            self.sock.settimeout(self._left_s())
            got = self.sock.recv_into(memoryview(data)[filled:])
            if not got:
                raise OSError("it closed the connection")
            filled += got
        return bytes(data)

    def _write(self, s: bytes) -> None:
        self.sock.settimeout(self._left_s())
        self.sock.sendall(s)

    def close(self) -> None:
        """Drop the socket if it is still ours; nothing is said to the broker."""
        if self.sock is not None:
            with contextlib.suppress(OSError):
                self.sock.close()
        self.sock = None
        self.connected = False
