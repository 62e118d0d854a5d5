"""The carrier of an AMQP link: its three lines, and the housework between them."""

from __future__ import annotations

import contextlib
import logging
import ssl
import threading
import time
from collections.abc import Sequence
from typing import Any

from manyhands.core.address import AmqpAddress
from manyhands.core.errors import (
    AddressError,
    Excluded,
    LinkBroken,
    LinkClosed,
    LinkError,
    LinkTimeout,
)
from manyhands.core.peers import NO_VIEW, PeerId, PeerState, View, ViewNumber
from manyhands.links.amqp.control import Control
from manyhands.links.amqp.inbox import Inbox
from manyhands.links.amqp.line import Line
from manyhands.links.amqp.login import AmqpLogin
from manyhands.links.amqp.names import Names, from_key, to_key
from manyhands.links.amqp.out import Out
from manyhands.links.base import LinkSettings, Place
from manyhands.links.endpoint import Endpoint, Sink, Wrap
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

log = logging.getLogger(__name__)


def open_amqp(
    address: AmqpAddress,
    me: PeerId,
    settings: LinkSettings,
    place: Place | None,
    wrap: Wrap = lambda carrier: carrier,
) -> Endpoint:
    """Log in at the broker and join the run."""
    carrier = AmqpCarrier(address, me, settings)
    try:
        terms = carrier.join()
    except BaseException:
        carrier.close()
        raise
    return Endpoint(me, terms, wrap(carrier), place).start(settings.connect_s)


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
    """Three lines to the broker, and the seat of the arbiter in case it falls to this peer.

    An inbox that was replaced has lost messages, and for followers only a cut later than the last
    of them makes that good. It is asked for in two steps, since views may be among what was lost:
    1. A beat sent by now is answered: whatever view there was has come before (`_fresh_at`).
    2. All senders in it are bound: `renewed_at` in our calls is its number, until a later cut.
    """

    def __init__(self, address: AmqpAddress, me: PeerId, settings: LinkSettings) -> None:
        assert address.run is not None
        self.me, self.names, self.terms = me, Names(address.run), settings.terms
        self._settings = settings
        self._failed = threading.Event()
        self._failure: LinkError | None = None
        self._closing = False
        self._left = threading.Event()
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
        self._blind = False  # the inbox was replaced and no view has come since
        self._fresh_at: int | None = None
        self._is_fresh = False  # step 1 is done
        self._renewed_at: ViewNumber | None = None
        self._strangers: set[int] = set()  # in the view, and have perhaps not bound themselves
        self._to_forget: list[PeerId] = []
        self.beats = 0  # the number of the last one
        self._answered_s = 0.0  # when a call of ours was last answered
        login = login_of(address)
        self.inbox = Inbox(self, login)
        self.out = Out(self, login)
        self.control = Control(self, login)

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
        self.inbox.line.open()  # the first: a fence or a view that comes before it would be lost
        self.control.line.open()
        self.out.line.open()
        self._housekeeper.start()
        # With an arbiter that collects returns, the first view is a lease away.
        wait_s = self._settings.connect_s + 1.5 * self.terms.lease_s
        start_s = time.monotonic()
        deadline, told = start_s + wait_s, False
        while not self._joined.is_set():
            self.control.call(0)
            self._beat_lines()
            if self._failure is not None:
                raise self._failure
            if time.monotonic() > deadline:
                raise LinkTimeout("view that shows this peer", wait_s)
            if not told and time.monotonic() > start_s + 2 * self.terms.beat_s:
                told = True
                what = "its arbiter to let this peer in; it may be waiting for others to come back"
                log.warning("waiting up to %g s: run %r needs %s", wait_s, self.names.run, what)
            again_s = min(self.terms.beat_s, 0.5) if self.inbox.up.is_set() else 0.01
            self._joined.wait(again_s)
        return self.terms

    def start(self, sink: Sink) -> None:
        with self._lock:
            self._sink = sink
            view = self._early_view
        self.sink_set.set()
        assert view is not None
        self.inbox.make_bindings(self._settings.connect_s)
        sink.handle(view)  # unless a newer one was faster
        if self._failure is not None:
            sink.failed(self._failure)

    # -- Carrier --------------------------------------------------------------------------------

    def carry(self, header: Header, buffers: Sequence[Buffer] = ()) -> None:
        match header:
            case Data():
                key = from_key(self.me.incarnation) if header.to is None else to_key(header.to)
                self.out.publish(key, header, buffers)
            case Credit():
                self.out.publish(to_key(header.to), header)
            case Ready():
                self._want(PeerState.WATCHING, PeerState.ACTIVE)  # said after the switch
            case Leaving():
                self._want(PeerState.ACTIVE, PeerState.LEAVING)
                self.control.call(0)
            case _:
                self.control.say(header)

    def _want(self, instead_of: PeerState, state: PeerState) -> None:
        with self._lock:
            if self._wants is instead_of:
                self._wants = state
        self.wake()

    def beat(self, n: int, consumed: int) -> None:
        with self._lock:
            self.beats = n
        self.control.beat(n)
        self.inbox.allow_more()
        self._beat_lines()

    def _beat_lines(self) -> None:
        for line in (self.inbox.line, self.out.line, self.control.line):
            line.beat()

    def flush(self, timeout_s: float) -> None:
        self.out.flush(timeout_s)

    def close(self) -> None:
        with self._lock:
            first, self._closing = not self._closing, True
        self._failed.set()
        self.wake()
        if first:
            self._leave()
        else:
            self._left.wait()
        self.sink_set.set()  # a reader may still wait for one
        for line in self._lines:
            line.close()
        if self._housekeeper.is_alive() and self._housekeeper is not threading.current_thread():
            self._housekeeper.join()

    def _leave(self) -> None:
        try:
            with contextlib.suppress(LinkError):
                self.control.leave()
            self.out.close()
        finally:
            self._left.set()

    @property
    def _lines(self) -> tuple[Line, ...]:
        return self.out.line, self.inbox.line, self.control.line

    @property
    def bytes_sent(self) -> int:
        """Bytes written to the broker over the data line."""
        channel = self.out.line.channel
        return 0 if channel is None else channel.bytes_sent

    # -- for the lines --------------------------------------------------------------------------

    @property
    def joined(self) -> bool:
        """Whether a view has shown this peer."""
        return self._joined.is_set()

    @property
    def sink(self) -> Sink:
        """Where arrivals go, once the link is open."""
        assert self._sink is not None
        return self._sink

    def await_sink(self) -> Sink:
        """Where arrivals go, now or when the link is open. Raises LinkClosed if it never is."""
        self.sink_set.wait()
        if self._sink is None:
            raise LinkClosed("the link was closed before it was open")
        return self._sink

    @property
    def following(self) -> bool:
        """Whether fan-outs are (to be) taken by the inbox."""
        return self._wants is not PeerState.WATCHING

    def fail(self, error: LinkError) -> None:
        """The link cannot go on. The housekeeper then gives up its lines, and with them the seat:
        whoever has no part in the run must not decide about others."""
        self._failure = self._failure or error
        self._failed.set()
        self.control.seat.put_out()
        if self._sink is not None:
            self._sink.failed(error)
        self.wake()

    def wake(self) -> None:
        """There is something for the housekeeper."""
        self._housework.set()

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
        here = view.member(self.me.incarnation) is not None
        with self._lock:
            if view.number <= self._view.number:
                return
            if not here and not self._joined.is_set():
                return  # views before ours: the arbiter has not heard us yet
            if self._joined.is_set():
                self._strangers |= self._met_first_in(view)
            self._view, self._blind = view, False
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
        if not here:
            self.fail(Excluded("a view without it was published"))
        self.wake()

    def _met_first_in(self, view: View) -> set[int]:
        """Newcomers bind themselves to our inbox, but not if it has been replaced since, nor if
        they joined in a view that we missed."""
        known = {m.peer.incarnation for m in self._view.roster}
        unsure = self._fresh_at is not None or self._is_fresh
        return {
            m.peer.incarnation
            for m in view.roster
            if m.peer.incarnation not in known and (unsure or m.since != view.number)
        }

    def on_beat_back(self, header: BeatBack) -> None:
        """The arbiter has heard us."""
        self._answered_s = time.monotonic()
        self.control.answered(header.n)
        with self._lock:
            if self._fresh_at is not None and header.n >= self._fresh_at:
                self._fresh_at, self._is_fresh = None, True
                self.wake()
        if self._sink is not None:
            self._sink.handle(header)

    def newest(self) -> View:
        """The newest view this peer has."""
        return self._view

    def unsure(self) -> bool:
        """Whether our inbox was replaced and may have missed a view."""
        return self._blind

    def renewed(self) -> None:
        """The inbox was replaced."""
        with self._lock:
            self._blind = True
            self._ask_for_a_cut()
        if self._sink is not None:
            self._sink.renewed()

    def _ask_for_a_cut(self) -> None:
        self._fresh_at, self._is_fresh, self._renewed_at = self.beats + 1, False, None

    def forget(self, peer: PeerId) -> None:
        """The arbiter's housework: what a peer that is out has left at the broker."""
        with self._lock:
            self._to_forget.append(peer)
        self.wake()

    # -- the housekeeper ------------------------------------------------------------------------

    def _keep_house(self) -> None:
        """Ask the broker what needs an answer, so that no reader waits for one; tick the seat."""
        try:
            while not self._closing:
                if self._failure is not None:
                    return self.close()
                self._do_housework(time.monotonic())
                self._housework.wait(min(self.terms.grace_s, self.terms.lease_s) / 5)
                self._housework.clear()
        except Exception as error:
            log.exception("the housekeeper of %s failed", self.me)
            self.fail(LinkBroken(f"the link's own housework failed: {error}"))
            self.close()

    def _do_housework(self, now_s: float) -> None:
        fresh = now_s - self._answered_s < self.terms.lease_s / 2 and not self.control.blocked
        with contextlib.suppress(LinkError):  # a line is down: it is tried again when it is up
            self.control.seat.tick(now_s, may_judge=fresh)
        with contextlib.suppress(LinkError):
            if self._sink is not None:
                self._tidy(self._sink)

    def _tidy(self, sink: Sink) -> None:
        self._meet(sink)
        if self.following and not self.inbox.switched and self.inbox.switch():
            self.control.call(0)
        while self._to_forget:
            peer = self._to_forget[0]
            self.inbox.channel().delete_exchange(self.names.fan(peer.incarnation))
            with self._lock:
                self._to_forget.remove(peer)

    def _meet(self, sink: Sink) -> None:
        """Have everybody's fan-outs; what was missed until now calls for a cut."""
        view = self._view
        new = self.inbox.bind_senders(view)
        with self._lock:
            missed = bool(self._strangers & new)
            self._strangers -= {m.peer.incarnation for m in view.roster}
            complete = self._is_fresh and not missed
            if missed:
                self._ask_for_a_cut()
            elif complete:
                self._is_fresh = False
                member = view.member(self.me.incarnation)
                if member is not None and member.state is not PeerState.WATCHING:
                    self._renewed_at = view.number
        if missed:
            sink.renewed()
        elif complete:
            self.control.call(0)
