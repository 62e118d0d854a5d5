"""The hub: our relay, which every peer dials and which dials nobody.

    accept ─► TLS, Hello ─► Session ─┬─ reader thread: frames of the peer ─► Room
                                     └─ writer thread: the peer's Outbox ─► frames to the peer
    ticker thread: leases of all rooms, deadlines of handshakes

Threads and blocking sockets: a relay copies bytes, and Python lets go of its lock while it does.
It starts inside any process (`with Hub(...)`) or as `manyhands hub`.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from manyhands.core.address import (
    HUB_PORT,
    HubAddress,
    check_run,
    host_port,
    is_loopback,
    split_host_port,
)
from manyhands.core.errors import (
    AddressError,
    LinkBroken,
    LinkError,
    Malformed,
    SettingsError,
    WireError,
)
from manyhands.core.peers import PEER_NAME_HINT, PeerId, is_peer_name
from manyhands.links import arbiter
from manyhands.links.door import Porter, is_by_door, open_doors, whence
from manyhands.links.journal import Journal
from manyhands.links.memory import Memory
from manyhands.links.messages import (
    HEADER_BYTES,
    SCHEMA,
    Dismissal,
    Hello,
    Refusal,
    Terms,
)
from manyhands.links.outbox import Budget
from manyhands.links.room import Room
from manyhands.links.session import Session
from manyhands.links.stream import Stream
from manyhands.links.tls import server_context
from manyhands.wire.frames import FrameReader, Limits

_KEEP_BYTES = 64 << 20  # of memory for frames while none are on their way
DOCTOR_NAME = "doctor-hello"  # what `manyhands doctor` calls itself while it only asks
_SHOWN = 120  # characters of a stranger's name in a log
_TICK_S = 0.2  # at least this often; a room with short leases asks for more
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class HubLimits:
    """What a hub takes on at most."""

    peers: int = 256
    runs: int = 64
    handshakes: int = 64
    """Connections that have not said who they are."""
    handshake_s: float = 5.0
    bytes_in_flight: int = 1 << 30
    """Payload held for all peers; above it the hub stops reading from whoever sends."""


class Hub:
    """A running hub. `address` is where peers find it; `address.code()` is the join code.

    `near` is for peers on this machine: an advertised address may lead there from outside only.
    With `door` these come in by a Unix socket (`links/door.py`): no TLS, half the kernel's work. An
    insecure hub has none: it could not show which hub it is.
    `exposed`: an insecure hub beyond loopback, for a network that is all yours.
    """

    def __init__(
        self,
        bind: str = f"127.0.0.1:{HUB_PORT}",
        *,
        advertise: str | None = None,
        state: Path | None = None,
        insecure: bool = False,
        exposed: bool = False,
        door: bool = True,
        runs: frozenset[str] | None = None,
        limits: HubLimits | None = None,
    ) -> None:
        host, port = split_host_port(bind, HUB_PORT)
        split_host_port(advertise or bind, HUB_PORT)  # complain before anything is opened
        if insecure and not exposed and not is_loopback(host):
            raise AddressError(
                f"an insecure hub on {host} would let anybody on the network in",
                hint="bind it to 127.0.0.1, or leave --insecure out: TLS and a token are no work",
            )
        for run in runs or ():
            check_run(run)
        self._limits = limits or HubLimits()
        self._runs = runs
        self._journal = Journal(state)
        self._tls = (
            None
            if insecure
            else server_context(self._journal.key_pem, self._journal.certificate_pem)
        )
        self._porter = Porter(self._journal.key_pem, self._journal.certificate_pem)
        self._lock = threading.Lock()
        self._rooms: dict[str, Room] = {}
        self._sessions: dict[int, Session] = {}
        self._handshakes: dict[socket.socket, float] = {}  # socket -> deadline
        self._budget = Budget(self._limits.bytes_in_flight)
        self._memory = Memory(Terms().part_bytes, _KEEP_BYTES)
        self._threads: set[threading.Thread] = set()
        self._closing = threading.Event()
        try:
            front = _listen(host, port)
        except LinkBroken:
            self._journal.close()
            raise
        bound = front.getsockname()[1]
        shown_host, shown_port = _reachable(host), bound
        if advertise:
            shown_host, shown_port = split_host_port(advertise, bound)
        self.address = HubAddress(
            host=shown_host,
            port=shown_port,
            token="" if insecure else self._journal.token,
            fingerprint="" if insecure else self._journal.fingerprint,
            insecure=insecure,
            exposed=insecure and exposed,
        )
        self.near = replace(self.address, host=_nearby(host), port=bound)
        doors = () if insecure or not door else open_doors((self.near, self.address))
        self._listeners = (front, *doors)
        for listener in self._listeners:
            self._spawn(partial(self._accept, listener), "hub accept")
        self._spawn(self._tick, "hub tick")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def room(self, run: str) -> Room | None:
        """The room of a run, if somebody has opened it."""
        return self._rooms.get(run)

    def close(self) -> None:
        """Stop. Peers see their connection end and look for a restarted hub. Idempotent."""
        self._closing.set()
        self._budget.wake()
        for listener in self._listeners:
            _shut(listener)
        with self._lock:
            sessions = list(self._sessions.values())
            waiting = list(self._handshakes)
        for sock in waiting:
            _shut(sock)
        for session in sessions:
            session.end()
        while True:
            with self._lock:
                threads = [t for t in self._threads if t is not threading.current_thread()]
            if not threads:
                break
            for thread in threads:
                thread.join()
        for listener in self._listeners:
            listener.close()
        self._journal.close()

    # -- connections ----------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        while not self._closing.is_set():
            try:
                sock, where = listener.accept()
            except OSError:
                if self._closing.is_set():
                    return
                # Out of descriptors: the peers that are here go on, newcomers try again.
                log.exception("hub cannot accept connections")
                self._closing.wait(1.0)
                continue
            with self._lock:
                full = len(self._handshakes) >= self._limits.handshakes
                if not full:
                    deadline = time.monotonic() + self._limits.handshake_s
                    self._handshakes[sock] = deadline
            if full:
                log.warning("a connection was turned away: too many that have not said Hello")
                sock.close()
            else:
                where = whence(sock) if is_by_door(sock) else where[:2]
                self._spawn(partial(self._serve, sock, where), "hub connection")

    def _serve(self, raw: socket.socket, where: tuple[str, int]) -> None:
        """One connection, from its first byte to its last."""
        stream: Stream | None = None
        sock = raw
        try:
            if self._closing.is_set():
                _shut(raw)  # `close` may have looked for it before it was there
            if not _speaks(raw):
                return self._log_silence(raw, where)
            if is_by_door(raw):
                self._porter.answer(raw)
            elif self._tls is not None:
                sock = self._secure(raw, self._tls)
                sock.do_handshake()
            stream = Stream(sock)
            self._greet(stream, sock, where)
        except (LinkError, WireError, OSError) as error:
            log.warning("%s:%s: connection ended: %s", *where, error)
        finally:
            with self._lock:
                self._handshakes.pop(sock, None)
            if stream is not None:
                stream.detach()
            sock.close()

    def _log_silence(self, sock: socket.socket, where: tuple[str, int]) -> None:
        """A connection has ended without a byte."""
        with self._lock:
            late = self._handshakes.pop(sock, None) is None
        if late:
            log.warning("%s:%s: no greeting in time", *where)
        else:
            # Who looks whether a hub listens here does this: our doctor, a load balancer's check.
            log.debug("%s:%s: connection ended without a byte", *where)

    def _secure(self, raw: socket.socket, tls: ssl.SSLContext) -> ssl.SSLSocket:
        """A TLS socket in the place of `raw`, which can be used no more: it has the deadline."""
        with self._lock:
            sock = tls.wrap_socket(raw, server_side=True, do_handshake_on_connect=False)
            deadline = self._handshakes.pop(raw, None)
            if deadline is not None:
                self._handshakes[sock] = deadline
        if deadline is None or self._closing.is_set():
            _shut(sock)
        return sock

    def _greet(self, stream: Stream, sock: socket.socket, where: tuple[str, int]) -> None:
        """Read the Hello, find or make the session, then read until the connection ends."""
        reader = FrameReader(stream.recv_into, Limits(header_bytes=4096, payload_bytes=0))
        try:
            first = reader.next()
            hello = None if first is None else SCHEMA.decode(first[0].kind, first[1])
        except WireError as error:
            # In frames of our version, so that the other side sees if it has another one.
            refusal = Refusal("hello", error.message, error.hint or "")
            stream.send([SCHEMA.encode(refusal)], timeout_s=1.0)
            raise
        with self._lock:
            # From here on silence is a matter of leases.
            if self._handshakes.pop(sock, None) is None:
                return log.warning("%s:%s: no greeting in time", *where)
        if hello is None:
            return None
        if isinstance(hello, Refusal):  # a peer that does not trust us says so
            return log.warning("%s:%s went away: %s", *where, hello.message)
        if not isinstance(hello, Hello):
            raise Malformed(f"a connection starts with Hello, not {type(hello).__name__}")
        session = self._admit(hello, stream)
        if isinstance(session, Refusal | Dismissal):
            self._log_refusal(hello, session, where)
            return stream.send([SCHEMA.encode(session)], timeout_s=1.0)
        reader.limits = Limits(
            header_bytes=HEADER_BYTES, payload_bytes=session.room.terms.part_bytes
        )
        return session.read(stream, reader)

    def _log_refusal(
        self, hello: Hello, refusal: Refusal | Dismissal, where: tuple[str, int]
    ) -> None:
        text = refusal.message if isinstance(refusal, Refusal) else refusal.reason
        unserved = isinstance(refusal, Refusal) and refusal.code == "run"
        if unserved and hello.peer.name == DOCTOR_NAME:
            # It has the token, and tries a run of its own first: no peer stays out by that.
            log.info("%s:%s: the doctor asked: %s", *where, text)
        else:
            who = str(hello.peer)[:_SHOWN]
            log.warning("%s:%s, %r of run %r turned away: %s", *where, who, hello.run, text)

    def _admit(self, hello: Hello, stream: Stream) -> Session | Refusal | Dismissal:
        if not self.address.insecure and not hmac.compare_digest(
            hello.token.encode(), self._journal.token.encode()
        ):
            return Refusal("token", "the token is wrong", "use the join code this hub prints")
        if refusal := self._check_run(hello.run) or _check_peer(hello.peer):
            return refusal
        with self._lock:
            if self._closing.is_set():
                return Refusal("closing", "the hub is shutting down")
            session = self._sessions.get(hello.peer.incarnation)
            if session is not None and hello.back is not None:
                if session.reconnect(stream, hello.back.session, hello.back.received):
                    return session
                return Dismissal("its session cannot be resumed: frames are gone")
            if session is not None:
                return Refusal("incarnation", "this peer is already here")
            if len(self._sessions) >= self._limits.peers:
                return Refusal("peers", f"the hub is full: {self._limits.peers} peers")
            room = self._room_for(hello)
            if isinstance(room, Refusal):
                return room
            session = Session(
                hello.run,
                room,
                hello.peer,
                self._budget,
                self._memory,
                forget=self._forget,
                stopping=self._closing.is_set,
            )
            self._sessions[hello.peer.incarnation] = session
        session.connect(stream)
        reason = room.join(session, time.monotonic(), hello.back)
        if reason is not None:
            self._forget(session)
            return Dismissal(reason)
        self._spawn(session.write, f"hub to {hello.peer}")
        log.info("%s joined run %r", hello.peer, hello.run)
        return session

    def _check_run(self, run: str) -> Refusal | None:
        try:
            check_run(run)
        except AddressError as error:
            return Refusal("run", error.message, error.hint or "")
        if self._runs is not None and run not in self._runs:
            served = ", ".join(sorted(self._runs))
            return Refusal("run", f"this hub does not serve run {run!r}", f"it serves {served}")
        return None

    def _room_for(self, hello: Hello) -> Room | Refusal:
        """Under the lock: the run's room, opened (or reopened from the journal) if need be."""
        room = self._rooms.get(hello.run)
        if room is not None:
            return room
        if len(self._rooms) >= self._limits.runs:
            # An empty room is kept as long as there is space: it knows whom it has excluded.
            empty = next((name for name, room in self._rooms.items() if not room.num_ports), None)
            if empty is None:
                return Refusal("runs", f"the hub is full: {self._limits.runs} runs")
            del self._rooms[empty]
        try:
            known = self._journal.view(hello.run)
        except SettingsError as error:
            return Refusal("journal", error.message, error.hint or "")
        era = 1 if known is None else known.number.era + 1
        restarted = hello.back is not None or (known is not None and bool(known.roster))
        view = arbiter.first_view(era) if known is None else known
        run = hello.run
        room = Room(
            hello.terms,
            view,
            time.monotonic(),
            era=era,
            restarted=restarted,
            journal=lambda view: self._journal.save_view(run, view),
        )
        self._rooms[hello.run] = room
        return room

    def _forget(self, session: Session) -> None:
        """The session has ended."""
        with self._lock:
            if self._sessions.get(session.peer.incarnation) is session:
                del self._sessions[session.peer.incarnation]

    # -- threads --------------------------------------------------------------------------------

    def _tick(self) -> None:
        tick_s = _TICK_S
        while not self._closing.wait(tick_s):
            now = time.monotonic()
            with self._lock:
                rooms = list(self._rooms.values())
                late = [sock for sock, deadline in self._handshakes.items() if now > deadline]
                for sock in late:
                    del self._handshakes[sock]
            for sock in late:
                _shut(sock)
            for room in rooms:
                room.tick(now)
            tick_s = min([_TICK_S, *(room.tick_s for room in rooms)])

    def _spawn(self, work: Callable[[], None], name: str) -> None:
        def body() -> None:
            try:
                work()
            finally:
                with self._lock:
                    self._threads.discard(thread)

        thread = threading.Thread(target=body, name=name, daemon=True)
        with self._lock:  # `close` joins whatever it finds there
            thread.start()
            self._threads.add(thread)


def _speaks(sock: socket.socket) -> bool:
    """Waits for the first byte, and leaves it there; False if the connection ends before it."""
    try:
        return bool(sock.recv(1, socket.MSG_PEEK))
    except ConnectionError:
        return False


def _check_peer(peer: PeerId) -> Refusal | None:
    """What others will read in views and logs, and address."""
    if is_peer_name(peer.name) and 0 < peer.incarnation < 1 << 63:
        return None
    return Refusal("name", "the peer's name or number cannot be used", PEER_NAME_HINT)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # All interfaces are those of IPv4 too: the address that is shown may be one.
        both = host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server((host, port), family=family, backlog=128, dualstack_ipv6=both)
    except OSError as error:
        raise LinkBroken(
            f"cannot listen on {host_port(host, port)}: {error.strerror}",
            hint="is a hub running there already? --bind HOST:0 takes a free port"
            if error.errno == errno.EADDRINUSE
            else "an address of this machine is wanted; --bind 0.0.0.0:PORT takes all of them",
        ) from None


def _reachable(host: str) -> str:
    """The address to put into the join code when none was given."""
    if host not in ("0.0.0.0", "::"):
        return host
    # No packet is sent: connecting a UDP socket only asks which interface would be used.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def _nearby(host: str) -> str:
    """Where a process on this machine finds what listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # TLS has its own: not for other threads
