"""The carrier of an AMQP link: its three lines, and the housework between them."""

from __future__ import annotations

import contextlib
import ssl
import threading
import time
from collections.abc import Sequence
from typing import Any

from manyhands.core.address import AmqpAddress
from manyhands.core.errors import AddressError, LinkError, LinkTimeout
from manyhands.core.peers import NO_VIEW, PeerId, PeerState, View, ViewNumber
from manyhands.links.amqp.control import Control
from manyhands.links.amqp.inbox import Inbox
from manyhands.links.amqp.line import Line
from manyhands.links.amqp.login import AmqpLogin
from manyhands.links.amqp.names import Names, from_key, to_key
from manyhands.links.amqp.out import Out
from manyhands.links.base import LinkSettings, Place
from manyhands.links.endpoint import Endpoint, Sink
from manyhands.links.messages import (
    SCHEMA,
    BeatBack,
    Call,
    Credit,
    Data,
    Header,
    Leaving,
    NewView,
    Ready,
    Terms,
)
from manyhands.wire.frames import Buffer


def open_amqp(
    address: AmqpAddress, me: PeerId, settings: LinkSettings, place: Place | None
) -> Endpoint:
    """Log in at the broker and join the run."""
    carrier = AmqpCarrier(address, me, settings)
    try:
        terms = carrier.join()
    except BaseException:
        carrier.close()
        raise
    return Endpoint(me, terms, carrier, place).start(settings.connect_s)


def login_of(address: AmqpAddress) -> AmqpLogin:
    """How to log in at that address."""
    try:
        context = ssl.create_default_context(cafile=address.ca_file) if address.tls else None
    except OSError as error:  # ssl.SSLError is one
        raise AddressError(
            f"ca_file={address.ca_file} cannot be used: {error}", hint="it must be a PEM file"
        ) from None
    return AmqpLogin(
        host=address.host,
        port=address.port,
        user=address.user,
        password=address.password,
        vhost=address.vhost,
        ssl_context=context,
    )


class AmqpCarrier:
    """Three lines to the broker, and the seat of the arbiter in case it falls to this peer."""

    def __init__(self, address: AmqpAddress, me: PeerId, settings: LinkSettings) -> None:
        assert address.run is not None
        self.me, self.names, self.terms = me, Names(address.run), settings.terms
        self._settings = settings
        self._failed = threading.Event()
        self._failure: LinkError | None = None
        self._closing = False
        self._sink: Sink | None = None
        self.sink_set = threading.Event()
        self._housework = threading.Event()
        self._housekeeper = threading.Thread(
            target=self._keep_house, name=f"house {me}", daemon=True
        )
        self._lock = threading.Lock()  # guards what follows
        self._early_view: NewView | None = None  # the newest, while nobody listens
        self._joined = threading.Event()
        self._view = View(NO_VIEW, ())
        self._wants = PeerState.WATCHING
        self._renewed_at: ViewNumber | None = None
        self._to_forget: list[PeerId] = []
        login = login_of(address)
        self.inbox = Inbox(self, login)
        self.out = Out(self, login)
        self.control = Control(self, login)
        self._answered_s = 0.0  # when a call of ours was last answered

    def line(self, name: str, login: AmqpLogin, handler: Any, **how: Any) -> Line:  # noqa: ANN401
        """A line of this link."""
        return Line(
            f"{name} {self.me}",
            login,
            handler,
            failed=self.fail,
            connect_s=self._settings.connect_s,
            outage_s=self._settings.outage_s,
            heartbeat_s=max(1, round(self.terms.lease_s / 3)),
            **how,
        )

    # -- joining --------------------------------------------------------------------------------

    def join(self) -> Terms:
        """Open the lines and call the arbiter until a view shows this peer."""
        self.control.line.open()
        self.inbox.line.open()
        self.out.line.open()
        self._housekeeper.start()
        # With an arbiter that collects returns, the first view is a lease away.
        wait_s = self._settings.connect_s + 1.5 * self.terms.lease_s
        deadline = time.monotonic() + wait_s
        while not self._joined.is_set():
            self.control.call(0)
            self._beat_lines()
            if self._failed.is_set():
                assert self._failure is not None
                raise self._failure
            if time.monotonic() > deadline:
                raise LinkTimeout("view that shows this peer", wait_s)
            self._joined.wait(min(self.terms.beat_s, 0.5))
        return self.terms

    def start(self, sink: Sink) -> None:
        with self._lock:
            self._sink = sink
            view = self._early_view
        self.sink_set.set()
        assert view is not None
        self.inbox.make_bindings(self._settings.connect_s)
        sink.handle(view)  # unless a newer one was faster

    # -- Carrier --------------------------------------------------------------------------------

    def carry(self, header: Header, buffers: Sequence[Buffer] = ()) -> None:
        match header:
            case Data():
                key = from_key(self.me.incarnation) if header.to is None else to_key(header.to)
                self.out.publish(key, header, buffers)
            case Credit():
                self.out.publish(to_key(header.to), header)
            case Ready():
                self._want(PeerState.ACTIVE)  # after the switch from watch queue to inbox
            case Leaving():
                self._want(PeerState.LEAVING)
                self.control.call(0)
            case _:
                self.control.call(0, header)

    def _want(self, state: PeerState) -> None:
        with self._lock:
            self._wants = state
        self._housework.set()

    def beat(self, n: int, consumed: int) -> None:
        self.control.call(n)
        self.inbox.allow_more()
        self._beat_lines()

    def _beat_lines(self) -> None:
        for line in (self.inbox.line, self.out.line, self.control.line):
            line.beat()

    def flush(self, timeout_s: float) -> None:
        self.out.flush(timeout_s)

    def close(self) -> None:
        first, self._closing = not self._closing, True
        self._failed.set()
        self._housework.set()
        if first:
            with contextlib.suppress(LinkError):
                self.control.leave()
        self.out.close()
        for line in (self.out.line, self.inbox.line, self.control.line):
            line.close()
        if self._housekeeper.is_alive():
            self._housekeeper.join()

    @property
    def bytes_sent(self) -> int:
        """Bytes written to the broker over the data line."""
        channel = self.out.line.channel
        return 0 if channel is None else channel.bytes_sent

    # -- for the lines --------------------------------------------------------------------------

    @property
    def sink(self) -> Sink:
        """Where arrivals go, once the link is open."""
        assert self._sink is not None
        return self._sink

    @property
    def following(self) -> bool:
        """Whether fan-outs are (to be) taken by the inbox."""
        return self._wants is not PeerState.WATCHING

    def fail(self, error: LinkError) -> None:
        """A line cannot be had back."""
        self._failure = self._failure or error
        self._failed.set()
        if self._sink is not None:
            self._sink.failed(error)

    def describe(self, n: int, word: Header | None) -> Call:
        """What this peer has to tell the arbiter now."""
        with self._lock:
            member = self._view.member(self.me.incarnation)
            return Call(
                self.me,
                n,
                self._view.number,
                PeerState.WATCHING if member is None else member.state,
                self._wants if self.inbox.switched else PeerState.WATCHING,
                self._renewed_at,
                b"" if word is None else SCHEMA.encode(word),
            )

    def on_view(self, header: NewView) -> None:
        """A view has arrived in the inbox."""
        view = header.view
        with self._lock:
            if view.number <= self._view.number:
                return
            if not self._joined.is_set() and view.member(self.me.incarnation) is None:
                return  # views before ours: the arbiter has not heard us yet
            self._view = view
            if self._renewed_at is not None and view.cut > self._renewed_at:
                self._renewed_at = None
            if self._sink is None:
                self._early_view = header
        if not self._joined.is_set():
            if header.terms is not None:
                self.terms = header.terms
                self.control.seat.set_terms(header.terms)
            self._joined.set()
        if self._sink is not None:
            self._sink.handle(header)
        self._housework.set()

    def on_beat_back(self, header: BeatBack) -> None:
        """The arbiter has heard us."""
        self._answered_s = time.monotonic()
        if self._sink is not None:
            self._sink.handle(header)

    def newest(self) -> View:
        """The newest view this peer has."""
        return self._view

    def unsure(self) -> bool:
        """Whether our inbox was replaced and no cut has followed yet."""
        return self._renewed_at is not None

    def renewed(self) -> None:
        """The inbox was replaced."""
        with self._lock:
            if self._renewed_at is None:
                self._renewed_at = self._view.number
        if self._sink is not None:
            self._sink.renewed()
        self._housework.set()

    def forget(self, peer: PeerId) -> None:
        """The arbiter's housework: what a peer that is out has left at the broker."""
        with self._lock:
            self._to_forget.append(peer)
        self._housework.set()

    # -- the housekeeper ------------------------------------------------------------------------

    def _keep_house(self) -> None:
        """Ask the broker what needs an answer, so that no reader waits for one; tick the seat."""
        tick_s = min(self.terms.grace_s, self.terms.lease_s) / 5
        while not self._closing:
            now_s = time.monotonic()
            fresh = now_s - self._answered_s < self.terms.lease_s / 2 and not self.control.blocked
            with contextlib.suppress(LinkError):  # a line is down: it is tried again when it is up
                self.control.seat.tick(now_s, may_judge=fresh)
            with contextlib.suppress(LinkError):
                if self._sink is not None:
                    self._tidy()
            self._housework.wait(tick_s)
            self._housework.clear()

    def _tidy(self) -> None:
        self.inbox.bind_senders(self._view)
        if self.following and not self.inbox.switched:
            self.inbox.switch()
            self.control.call(0)
        while self._to_forget:
            peer = self._to_forget[0]
            self.inbox.channel().delete_exchange(self.names.fan(peer.incarnation))
            with self._lock:
                self._to_forget.remove(peer)
