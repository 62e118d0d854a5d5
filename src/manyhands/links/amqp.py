"""The AMQP link: peers that meet at a RabbitMQ broker.

    exchange mh.RUN (direct)
      key to.PEER    ─► inbox of PEER                       messages to one peer
      key view       ─► every inbox                         the arbiter's views
      key control    ─► queue mh.RUN.control                calls to the arbiter
      key from.PEER  ─► exchange mh.RUN.fan.X of every X    fan-outs of PEER
    exchange mh.RUN.fan.X (fanout) ─► inbox of X, or its watch queue while X is watching

Three connections: one reads the inbox, one publishes data (a broker short of memory stops reading
from publishers only), one is for calls and the arbiter's seat. Inboxes are exclusive: they go with
their connection and whatever was in them, so a reconnect is a cut, never a resumption.

Whoever joins later makes the bindings in both directions, on the arbiter's word and before its link
is open, so nobody can miss a fan-out of a peer that it sees in a view. The watch queue drops its
oldest messages instead of growing; sequence numbers turn that into a Gap.
"""

from __future__ import annotations

import contextlib
import secrets
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from manyhands.core.address import AmqpAddress
from manyhands.core.errors import LinkClosed, LinkError, LinkTimeout, Malformed, WireError
from manyhands.core.peers import NO_VIEW, PeerId, PeerState, View, ViewNumber
from manyhands.links.amqp_channel import AmqpChannel
from manyhands.links.amqp_line import Deaf, Line
from manyhands.links.amqp_login import AmqpLogin
from manyhands.links.amqp_seat import Seat
from manyhands.links.base import LinkSettings, Place
from manyhands.links.endpoint import Endpoint, Sink
from manyhands.links.messages import (
    HEADER_BYTES,
    SCHEMA,
    BeatBack,
    Bye,
    Call,
    Credit,
    Data,
    Fence,
    Header,
    Leaving,
    Lost,
    Marker,
    Missing,
    NewView,
    Ready,
    Terms,
    decode_head,
)
from manyhands.wire.frames import Buffer, Limits, payload_size

_CONTROL_EXPIRES_S = 1800  # a run that nobody attends for this long is forgotten
_WATCH_PREFETCH = 32  # messages of the watch queue that are on their way at once
_FUSE_BYTES = 4 << 30  # an inbox this full is a bug or an attack; windows keep it far below


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
    context = ssl.create_default_context(cafile=address.ca_file) if address.tls else None
    return AmqpLogin(
        host=address.host,
        port=address.port,
        user=address.user,
        password=address.password,
        vhost=address.vhost,
        ssl_context=context,
    )


@dataclass(frozen=True)
class Names:
    """What things are called at the broker. All of it starts with `mh.RUN`."""

    run: str

    @property
    def exchange(self) -> str:
        return f"mh.{self.run}"

    @property
    def control(self) -> str:
        return f"mh.{self.run}.control"

    def queue(self, kind: str, incarnation: int, life: int) -> str:
        """A queue of one peer; it cannot have its name back while the broker thinks it in use."""
        return f"mh.{self.run}.{kind}.{incarnation:x}.{life}"

    def fan(self, incarnation: int) -> str:
        """The exchange of what fans out to that peer."""
        return f"mh.{self.run}.fan.{incarnation:x}"


def to_key(incarnation: int) -> str:
    """Routing key of messages to that peer."""
    return f"to.{incarnation:x}"


def from_key(incarnation: int) -> str:
    """Routing key of fan-outs of that peer."""
    return f"from.{incarnation:x}"


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
        self._first_view: NewView | None = None
        self._joined = threading.Event()
        self._view = View(NO_VIEW, ())
        self._wants = PeerState.WATCHING
        self._renewed_at: ViewNumber | None = None
        self._to_forget: list[PeerId] = []
        login = login_of(address)
        self.inbox = Inbox(self, login)
        self.out = Out(self, login)
        self.control = Control(self, login)
        self._lease_s = 0.0  # when our last beat came back

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
            if self._failed.is_set():
                assert self._failure is not None
                raise self._failure
            if time.monotonic() > deadline:
                raise LinkTimeout("view that shows this peer", wait_s)
            self._joined.wait(min(self.terms.beat_s, 0.5))
        return self.terms

    def start(self, sink: Sink) -> None:
        self._sink = sink
        self.sink_set.set()
        assert self._first_view is not None
        self.inbox.make_bindings(self._first_view.view)
        sink.handle(self._first_view)

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
            here = view.member(self.me.incarnation)
            if not self._joined.is_set() and here is None:
                return  # views before ours: the arbiter has not heard us yet
            self._view = view
            if self._renewed_at is not None and view.cut > self._renewed_at:
                self._renewed_at = None
        if not self._joined.is_set():
            self._first_view = header
            if header.terms is not None:
                self.terms = header.terms
                self.control.seat.set_terms(header.terms)
            self._joined.set()
        else:
            self.sink.handle(header)
            self._housework.set()

    def on_beat_back(self, header: BeatBack) -> None:
        """The arbiter has heard us."""
        if header.n:
            self._lease_s = time.monotonic()
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
            fresh = now_s - self._lease_s < self.terms.lease_s / 2 and not self.control.blocked
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


class Out(Deaf):
    """The line that data leaves by. Frames are kept until the broker confirms them."""

    def __init__(self, carrier: AmqpCarrier, login: AmqpLogin) -> None:
        self._carrier = carrier
        self._changed = threading.Condition()
        self._sending = threading.Lock()  # the order of `_kept` is that of the wire
        self._kept: dict[int, tuple[str, Header, Sequence[Buffer]]] = {}  # by tag, oldest first
        self._waiting: list[tuple[str, Header, Sequence[Buffer]]] = []  # for the line to be up
        self._up = False
        self._closed = False
        self.line = carrier.line(
            "out", login, self, setup=self._setup, up=self._start, down=self._stop
        )

    def publish(self, key: str, header: Header, buffers: Sequence[Buffer] = ()) -> None:
        """Send now, or when the line is up again."""
        with self._sending:
            self._send(key, header, buffers)

    def _send(self, key: str, header: Header, buffers: Sequence[Buffer]) -> None:
        channel = self.line.channel
        item = (key, header, buffers)
        with self._changed:
            if not self._up or channel is None:
                self._waiting.append(item)
                return
        head = SCHEMA.encode(header, payload_size(buffers))
        exchange = self._carrier.names.exchange
        mandatory = key.startswith("to.")
        # A LinkError here: the frame is kept, and goes out again when the line is up.
        with contextlib.suppress(LinkError):
            channel.publish(
                exchange,
                key,
                head,
                buffers,
                mandatory=mandatory,
                on_tag=lambda tag: self._keep(tag, item),
            )
            return
        with self._changed:
            if item not in self._kept.values():
                self._waiting.append(item)

    def _keep(self, tag: int, item: tuple[str, Header, Sequence[Buffer]]) -> None:
        with self._changed:
            self._kept[tag] = item

    def flush(self, timeout_s: float) -> None:
        """Return when the broker has confirmed everything."""
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._closed or not (self._kept or self._waiting), timeout_s
            )
            if not done:
                raise LinkTimeout("the broker's confirmation of what was sent", timeout_s)
            if self._kept or self._waiting:
                raise LinkClosed("the link was closed while messages were on their way")

    def close(self) -> None:
        """Wake whoever waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _setup(self, channel: Any) -> None:  # noqa: ANN401  (py-amqp has no types)
        _declare(channel, self._carrier.names)
        channel.confirm_select()

    def _start(self, channel: AmqpChannel) -> None:
        with self._sending:
            with self._changed:
                again = [*self._kept.values(), *self._waiting]
                self._kept, self._waiting = {}, []
                self._up = True
            # What the broker had taken already arrives twice and is dropped by its readers.
            for item in again:
                self._send(*item)

    def _stop(self) -> None:
        with self._changed:
            self._up = False

    def on_confirm(self, tag: int, multiple: bool, ok: bool) -> None:
        with self._changed:
            tags = [t for t in self._kept if t <= tag] if multiple else [tag]
            for t in tags:
                self._kept.pop(t, None)
            self._changed.notify_all()
        if not ok:  # a queue was over its fuse: somebody has missed something
            self._carrier.control.call(0, Lost(self._carrier.me.incarnation))

    def on_return(self, reply_code: int, reply_text: str, routing_key: str, header: bytes) -> None:
        self._carrier.control.call(0, Missing(int(routing_key.removeprefix("to."), 16)))

    def on_delivery(self, *message: object) -> Sequence[memoryview]:
        raise Malformed("a delivery on a line that only publishes")

    def on_body(self) -> None:
        pass

    def on_bad_delivery(self, consumer_tag: str, delivery_tag: int, error: WireError) -> None:
        pass


class Control(Deaf):
    """The line of calls: this peer's own to the arbiter, and everybody's while it is the arbiter."""

    def __init__(self, carrier: AmqpCarrier, login: AmqpLogin) -> None:
        self._carrier = carrier
        self._found = False
        self._delivery: tuple[int, Call | None] = (0, None)
        self.blocked = False
        self.line = carrier.line(
            "control", login, self, setup=self._setup, up=self._start, down=self._stop
        )
        self.seat = Seat(
            self,
            carrier.terms,
            newest=carrier.newest,
            unsure=carrier.unsure,
            new_run=lambda: not self._found,
            dropped=carrier.forget,
        )

    def call(self, n: int, word: Header | None = None) -> None:
        """Tell the arbiter. What cannot be said now is said by the next beat."""
        channel = self.line.channel
        if channel is None or self.blocked:
            return
        head = SCHEMA.encode(self._carrier.describe(n, word))
        with contextlib.suppress(LinkError):
            channel.publish(
                self._carrier.names.exchange,
                "control",
                head,
                (),
                mandatory=False,
                timeout_s=self._carrier.terms.lease_s,
            )

    def leave(self) -> None:
        """Say good-bye; the last one of a run leaves nothing at the broker."""
        channel = self.line.channel
        if channel is None:
            return
        if self.seat.alone():
            channel.delete_queue(self._carrier.names.control, timeout_s=1.0)
        else:
            self.call(0, Bye())

    # -- ControlLine ----------------------------------------------------------------------------

    def to_peer(self, incarnation: int, header: Header) -> None:
        self._say(to_key(incarnation), header, mandatory=True)

    def to_all(self, header: Header) -> int:
        return self._say("view", header, mandatory=False)

    def _say(self, key: str, header: Header, *, mandatory: bool) -> int:
        channel = self.line.channel
        if channel is None:
            raise LinkClosed("the control line is down")
        exchange = self._carrier.names.exchange
        return channel.publish(exchange, key, SCHEMA.encode(header), (), mandatory=mandatory)

    def to_exchange(self, exchange: str, header: Header) -> None:
        """Publish to an exchange that takes everything, by whatever key."""
        channel = self.line.channel
        if channel is None:
            raise LinkClosed("the control line is down")
        channel.publish(exchange, "", SCHEMA.encode(header), (), mandatory=False)

    def on_fence(self, token: int) -> None:
        """A fence of ours, or of another arbiter, has arrived in the inbox."""
        with contextlib.suppress(LinkError):  # the line is breaking, and the seat with it
            self.seat.on_fence(token)

    def acknowledge(self, delivery_tag: int) -> None:
        channel = self.line.channel
        if channel is not None:
            channel.ack(delivery_tag)

    # -- Handler --------------------------------------------------------------------------------

    def _setup(self, channel: Any) -> None:  # noqa: ANN401  (py-amqp has no types)
        names = self._carrier.names
        _declare(channel, names)
        declared = channel.queue_declare(
            names.control,
            durable=True,
            auto_delete=False,
            arguments={
                "x-queue-type": "classic",
                "x-single-active-consumer": True,
                "x-expires": _CONTROL_EXPIRES_S * 1000,
            },
        )
        # Somebody was here: consumers, or calls that nobody has read.
        self._found = bool(declared.consumer_count or declared.message_count)
        channel.queue_bind(names.control, names.exchange, "control")
        channel.basic_qos(0, 1, False)
        channel.confirm_select()

    def _start(self, channel: AmqpChannel) -> None:
        self.blocked = False
        channel.consume(self._carrier.names.control, "control", no_ack=False)

    def _stop(self) -> None:
        self.seat.lose()

    def on_delivery(
        self,
        consumer_tag: str,
        delivery_tag: int,
        redelivered: bool,
        header: bytes,
        body_bytes: int,
    ) -> Sequence[memoryview]:
        call, _ = decode_head(header, Limits(header_bytes=HEADER_BYTES, payload_bytes=0))
        if not isinstance(call, Call) or body_bytes:
            raise Malformed(f"{type(call).__name__} in the control queue")
        self._delivery = (delivery_tag, call)
        return []

    def on_body(self) -> None:
        tag, call = self._delivery
        assert call is not None
        with contextlib.suppress(LinkError):  # the line is breaking: the event goes to the next
            self.seat.on_call(tag, call)

    def on_bad_delivery(self, consumer_tag: str, delivery_tag: int, error: WireError) -> None:
        self.acknowledge(delivery_tag)  # nobody else could make more of it

    def on_return(self, reply_code: int, reply_text: str, routing_key: str, header: bytes) -> None:
        self.seat.bounced(int(routing_key.removeprefix("to."), 16))

    def on_confirm(self, tag: int, multiple: bool, ok: bool) -> None:
        with contextlib.suppress(LinkError):
            self.seat.on_confirm(tag, multiple=multiple)

    def on_blocked(self, reason: str) -> None:
        self.blocked = True

    def on_unblocked(self) -> None:
        self.blocked = False


class Inbox(Deaf):
    """The line that everything arrives by."""

    def __init__(self, carrier: AmqpCarrier, login: AmqpLogin) -> None:
        self._carrier = carrier
        self._life = 0
        self._bound: set[int] = set()  # senders whose fan-outs reach this life's queues
        self._body: tuple[str, int, Header, Sequence[memoryview] | None] | None = None
        # The switch: fan-outs that come to the inbox wait until the watch queue has been read up
        # to the marker, so that each sender's stay in order.
        self.switched = False
        self._marker = 0
        self._marked = threading.Event()
        self._held: list[tuple[Data, memoryview]] = []
        self._holding = False
        self._watch_tag = 0  # of the last delivery of the watch queue that is not acknowledged
        self._backlog_ok = True
        self.line = carrier.line(
            "inbox", login, self, setup=self._setup, up=self._start, down=self._stop
        )

    def channel(self) -> AmqpChannel:
        """The channel, if the line is up. Raises LinkClosed."""
        channel = self.line.channel
        if channel is None:
            raise LinkClosed("the inbox line is down")
        return channel

    @property
    def _queue(self) -> str:
        return self._carrier.names.queue("inbox", self._carrier.me.incarnation, self._life)

    @property
    def _watch_queue(self) -> str:
        return self._carrier.names.queue("watch", self._carrier.me.incarnation, self._life)

    def _setup(self, channel: Any) -> None:  # noqa: ANN401  (py-amqp has no types)
        names, me = self._carrier.names, self._carrier.me.incarnation
        self._life += 1
        self._bound.clear()
        _declare(channel, names)
        fan = names.fan(me)
        channel.exchange_declare(fan, "fanout", durable=False, auto_delete=True)
        _declare_queue(channel, self._queue, _FUSE_BYTES, "reject-publish")
        channel.queue_bind(self._queue, names.exchange, to_key(me))
        channel.queue_bind(self._queue, names.exchange, "view")
        if self._carrier.following:
            channel.queue_bind(self._queue, fan, "")
        else:
            watch_bytes = self._carrier.terms.watch_bytes
            _declare_queue(channel, self._watch_queue, watch_bytes, "drop-head")
            channel.queue_bind(self._watch_queue, fan, "")
        channel.basic_qos(0, _WATCH_PREFETCH, False)

    def _start(self, channel: AmqpChannel) -> None:
        self._holding, self._held, self._watch_tag = False, [], 0
        self.switched = self._carrier.following
        channel.consume(self._queue, "inbox", no_ack=True)
        if not self.switched:
            channel.consume(self._watch_queue, "watch", no_ack=False)
        if self._life > 1:
            self._carrier.renewed()

    def _stop(self) -> None:
        self._marked.set()  # whoever waits for the marker starts again

    # -- bindings -------------------------------------------------------------------------------

    def make_bindings(self, view: View) -> None:
        """A newcomer's: both directions, with everybody who is here."""
        names, me = self._carrier.names, self._carrier.me.incarnation
        channel = self.channel()
        for other in [m.peer.incarnation for m in view.roster if m.peer.incarnation != me]:
            channel.declare_fanout(names.fan(other))  # it may be away for the moment
            channel.bind_exchange(names.fan(other), names.exchange, from_key(me))
        self.bind_senders(view)

    def bind_senders(self, view: View) -> None:
        """Have the fan-outs of everybody in the view."""
        names, me = self._carrier.names, self._carrier.me.incarnation
        for other in [m.peer.incarnation for m in view.roster]:
            if other != me and other not in self._bound:
                self.channel().bind_exchange(names.fan(me), names.exchange, from_key(other))
                self._bound.add(other)

    def switch(self) -> None:
        """Take fan-outs in the inbox from now on. Called by the housekeeper."""
        names, me = self._carrier.names, self._carrier.me.incarnation
        channel = self.channel()
        self._marked.clear()
        self._marker = secrets.randbits(60)
        self._holding = True
        channel.bind(self._queue, names.fan(me), "")
        self._carrier.control.to_exchange(names.fan(me), Marker(self._marker))
        if not self._marked.wait(self._carrier.terms.lease_s) or self.line.channel is not channel:
            return  # tried again, or made anew with the line
        channel.cancel("watch")
        channel.unbind(self._watch_queue, names.fan(me), "")
        self.switched = True

    # -- Handler --------------------------------------------------------------------------------

    def on_delivery(
        self,
        consumer_tag: str,
        delivery_tag: int,
        redelivered: bool,
        header: bytes,
        body_bytes: int,
    ) -> Sequence[memoryview]:
        limits = Limits(header_bytes=HEADER_BYTES, payload_bytes=self._carrier.terms.part_bytes)
        head, payload_bytes = decode_head(header, limits)
        if payload_bytes != body_bytes:
            raise Malformed(f"a payload of {payload_bytes} bytes in a body of {body_bytes}")
        targets: Sequence[memoryview] | None = []
        if isinstance(head, Data):
            if sum(head.sizes) != body_bytes:
                raise Malformed(f"buffers of {sum(head.sizes)} bytes in a body of {body_bytes}")
            self._carrier.sink_set.wait()
            if self._holding and consumer_tag == "inbox" and head.to is None:
                targets = [memoryview(bytearray(body_bytes))]
            else:
                targets = self._carrier.sink.targets(head)
        self._body = (consumer_tag, delivery_tag, head, targets)
        return [memoryview(bytearray(body_bytes))] if targets is None else targets

    def on_body(self) -> None:
        assert self._body is not None
        consumer_tag, delivery_tag, head, targets = self._body
        self._body = None
        match head:
            case Data():
                if self._holding and consumer_tag == "inbox" and head.to is None:
                    assert targets is not None
                    self._held.append((head, targets[0]))
                elif targets is not None:
                    self._carrier.sink.delivered(head, targets)
            case NewView():
                self._carrier.on_view(head)
            case BeatBack():
                self._carrier.on_beat_back(head)
            case Fence():
                self._carrier.control.on_fence(head.token)
            case Marker():
                if consumer_tag == "watch" and head.token == self._marker:
                    self._release()
            case _:
                if self._carrier.sink_set.is_set():
                    self._carrier.sink.handle(head)
        if consumer_tag == "watch":
            self._watch_tag = delivery_tag
            self.allow_more()

    def on_bad_delivery(self, consumer_tag: str, delivery_tag: int, error: WireError) -> None:
        # What one peer sends amiss must not take this one down; its sequence number shows as a hole.
        if consumer_tag == "watch":
            self._watch_tag = delivery_tag
            self.allow_more()

    def on_cancelled(self, consumer_tag: str) -> None:
        channel = self.line.channel
        if channel is not None and consumer_tag == "inbox":
            channel.abort()  # somebody deleted our queue: begin anew

    def allow_more(self) -> None:
        """Let the watch queue go on, unless the reader is far behind."""
        channel, tag = self.line.channel, self._watch_tag
        if channel is None or not tag or not self._carrier.sink_set.is_set():
            return
        if self._carrier.sink.backlog_bytes() < self._carrier.terms.watch_bytes // 2:
            self._watch_tag = 0
            with contextlib.suppress(LinkError):
                channel.ack(tag, multiple=True)

    def _release(self) -> None:
        self._holding = False
        held, self._held = self._held, []
        for data, body in held:
            targets = self._carrier.sink.targets(data)
            if targets is None:
                continue
            at = 0
            for target in targets:
                target[:] = body[at : at + target.nbytes]
                at += target.nbytes
            self._carrier.sink.delivered(data, targets)
        self._marked.set()


def _declare(channel: Any, names: Names) -> None:  # noqa: ANN401  (py-amqp has no types)
    channel.exchange_declare(names.exchange, "direct", durable=False, auto_delete=True)


def _declare_queue(channel: Any, name: str, max_bytes: int, overflow: str) -> None:  # noqa: ANN401
    channel.queue_declare(
        name,
        durable=False,
        exclusive=True,
        auto_delete=True,
        arguments={
            # Said aloud: a broker may be set up to make quorum queues of whatever says nothing.
            "x-queue-type": "classic",
            "x-max-length-bytes": max_bytes,
            "x-overflow": overflow,
        },
    )
