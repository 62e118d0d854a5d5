"""The server: a coordinator's API on a socket, in a thread of its own.

    with Server(coordinator, logs, identity, on_shutdown=stop) as server:
        server.url, server.code(Role.AGENT)

It speaks TLS, with the identity's certificate, which callers pin: on loopback too, where anybody
of this machine may listen while no coordinator does. Plain HTTP is for loopback, if asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, cast

import uvicorn

from manyhands.cluster.api import Api
from manyhands.cluster.bell import Bell
from manyhands.cluster.code import Code
from manyhands.cluster.desk import Desk
from manyhands.cluster.door import Door
from manyhands.cluster.gate import Gate
from manyhands.cluster.identity import Identity
from manyhands.cluster.limits import HttpLimits
from manyhands.cluster.logs import LogName, Logs
from manyhands.cluster.routes import Role
from manyhands.core.address import host_port, is_loopback, split_host_port
from manyhands.core.errors import SettingsError
from manyhands.links.tls import server_context

PORT = 12347
_GRACE_S = 5  # for answers that are being written when the server closes
_WAYS_OUT = {
    errno.EADDRINUSE: "is another one up? `manyhands down` ends it; or choose another --bind",
    errno.EACCES: "ports below 1024 are root's: choose another --bind",
}
_log = logging.getLogger(__name__)


class Server:
    """Serves from the end of `__enter__` to `close`. Raises SettingsError where it cannot listen.

    `names` are further names by which it is called (its Host headers). `plain`: no TLS.
    `listening`: what `listen` has opened at `bind`; it is closed with the server.
    `on_shutdown` is what a request to take the cluster down does, and must return at once.
    """

    def __init__(
        self,
        desk: Desk,
        logs: Logs,
        identity: Identity,
        *,
        bind: str = f"127.0.0.1:{PORT}",
        listening: socket.socket | None = None,
        names: Iterable[str] = (),
        plain: bool = False,
        limits: HttpLimits | None = None,
        on_shutdown: Callable[[], None],
    ) -> None:
        self._desk = desk
        self._logs = logs
        self._identity = identity
        self._limits = limits or HttpLimits()
        self._bind, self._listening = bind, listening
        self._host, self._port = split_host_port(bind, PORT)
        self._names = frozenset(names)
        self._on_shutdown = on_shutdown
        self.is_plain = plain
        if plain and not is_loopback(self._host):
            raise SettingsError(
                f"plain HTTP at {bind} would carry tokens in the clear",
                hint="it is for loopback only: --bind 127.0.0.1, or leave --plain out",
            )
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._running: _Uvicorn | None = None

    @property
    def host(self) -> str:
        """Where others reach it; this machine's name where it listens everywhere."""
        return socket.gethostname() if self._host in ("0.0.0.0", "::") else self._host

    @property
    def port(self) -> int:
        """The port, once it listens."""
        return self._port

    @property
    def url(self) -> str:
        """`http://HOST:PORT` or `https://HOST:PORT`."""
        return f"{'http' if self.is_plain else 'https'}://{host_port(self.host, self._port)}"

    @property
    def fingerprint(self) -> str:
        """Of the certificate that callers see; '' where there is none."""
        return "" if self.is_plain else self._identity.fingerprint

    def code(self, role: Role, host: str | None = None, port: int | None = None) -> str:
        """Lets its holder in, in this role, from where this host and port lead here. A secret."""
        return Code(
            role=role,
            host=host or self.host,
            port=port or self._port,
            token=self._identity.tokens[role],
            fingerprint=self.fingerprint,
        ).pack()

    def __enter__(self) -> Server:
        listening = self._listening or listen(self._bind)
        self._port = listening.getsockname()[1]
        self._thread = threading.Thread(
            target=self._run, args=(listening,), name="cluster-http", daemon=True
        )
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all waits, answers what is asked, and stops listening. Idempotent."""
        if self._running is not None:
            self._running.leave()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, listening: socket.socket) -> None:
        try:
            with listening:
                asyncio.run(self._serve(listening))
        except BaseException as error:
            if self._ready.is_set():
                _log.critical("the HTTP server of the cluster has ended: %s", error)
                raise
            self._failure = error
        finally:
            self._ready.set()

    async def _serve(self, listening: socket.socket) -> None:
        bell = Bell()
        pool = ThreadPoolExecutor(self._limits.threads, "cluster-http-worker")
        with contextlib.ExitStack() as stack:
            stack.callback(pool.shutdown)
            stack.callback(self._desk.listen(bell.ring))
            stack.callback(self._logs.listen(lambda name: _ring(bell, name)))
            api = Api(
                self._desk,
                self._logs,
                bell=bell,
                pool=pool,
                limits=self._limits,
                shut_down=self._on_shutdown,
            )
            gate = Gate(
                api.app(),
                tokens=self._identity.tokens,
                names={self._host, socket.gethostname(), *self._names},
                loopback=is_loopback(self._host),
                limits=self._limits,
            )
            identity = self._identity
            tls = None
            if not self.is_plain:
                tls = server_context(identity.key_pem, identity.certificate_pem)
            self._running = _Uvicorn(
                self._config(gate), bell=bell, limits=self._limits, tls=tls, ready=self._ready.set
            )
            await self._running.serve(sockets=[listening])

    def _config(self, gate: Gate) -> uvicorn.Config:
        door = Door(self._limits)
        return uvicorn.Config(
            cast("Any", gate),  # uvicorn's own ASGI types are closed TypedDicts
            http=cast("Any", door.protocol),
            ws="none",
            loop="asyncio",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="error",
            access_log=False,
            # Whoever may say where he comes from has no limits by address.
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=max(1, int(self._limits.idle_s)),
            timeout_graceful_shutdown=_GRACE_S,
            h11_max_incomplete_event_size=self._limits.headers_bytes,
        )


class _Uvicorn(uvicorn.Server):
    """uvicorn's server, with an end to TLS handshakes and a sign when it listens."""

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        bell: Bell,
        limits: HttpLimits,
        tls: ssl.SSLContext | None,
        ready: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._bell = bell
        self._tls = tls
        self._limits = limits
        self._tell_ready = ready
        self._loop = asyncio.get_running_loop()
        self._left = asyncio.Event()

    def leave(self) -> None:
        """From any thread."""
        self.should_exit = True
        self._bell.close()
        # It may be over already: a second `close`.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._left.set)

    async def main_loop(self) -> None:
        """As uvicorn's own, which looks ten times a second whether it is to end."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):  # the Date header changes
                    await self._left.wait()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's own, which takes certificates from files and leaves a TLS handshake a
        minute.
        """
        config = self.config

        def protocol() -> asyncio.Protocol:
            make = cast("Any", config.http_protocol_class)
            return make(config, self.server_state, self.lifespan.state, self._loop)

        self.servers = [
            await self._loop.create_server(
                protocol,
                sock=sock,
                ssl=self._tls,
                ssl_handshake_timeout=self._limits.headers_s if self._tls else None,
                backlog=config.backlog,
            )
            for sock in sockets or []
        ]
        self.started = True
        self._tell_ready()


def _ring(bell: Bell, name: LogName) -> None:
    bell.ring((name,))


def listen(bind: str) -> socket.socket:
    """Takes an address: nobody else can, and who calls there waits for a server. Raises
    SettingsError.
    """
    host, port = split_host_port(bind, PORT)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # By its number: asyncio sets TCP_NODELAY only where the protocol is said, and without it every
    # answer waits 40 ms for an acknowledgement.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen()
    except OSError as error:
        sock.close()
        raise SettingsError(
            f"the coordinator cannot listen at {host_port(host, port)}: {error.strerror}",
            hint=_WAYS_OUT.get(
                error.errno or 0,
                "an address of this machine is wanted; --bind 0.0.0.0:PORT takes all of them",
            ),
        ) from None
    return sock
