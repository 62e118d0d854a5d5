"""The line that everything arrives by."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from manyhands.core.errors import (
    Excluded,
    LinkBroken,
    LinkClosed,
    LinkError,
    Malformed,
    Refused,
    WireError,
)
from manyhands.core.peers import View
from manyhands.links.amqp.channel import AmqpChannel
from manyhands.links.amqp.line import Deaf
from manyhands.links.amqp.login import AmqpLogin, run_errand
from manyhands.links.amqp.names import declare_exchange, declare_queue, from_key, to_key
from manyhands.links.messages import (
    HEADER_BYTES,
    BeatBack,
    Credit,
    Data,
    Dismissal,
    Fence,
    Header,
    Marker,
    NewView,
    decode_head,
)
from manyhands.wire.frames import Limits

if TYPE_CHECKING:
    from manyhands.links.amqp.carrier import AmqpCarrier

log = logging.getLogger(__name__)
_MAX_PREFETCH = 32  # messages of the watch queue that are on their way at once
_FUSE_BYTES = 4 << 30  # an inbox this full is a bug or an attack; windows keep it far below
_MAX_NUMBER = 1 << 62  # of eras and views: the next one must still fit the wire
_KINDS = (Data, Credit, NewView, BeatBack, Dismissal, Fence, Marker)


@dataclass(eq=False)
class _Switch:
    """From watch queue to inbox: fan-outs that come to the inbox wait until the watch queue has
    been read up to a marker, so that each sender's stay in order."""

    channel: AmqpChannel
    token: int = field(default_factory=lambda: secrets.randbits(60))
    asked_s: float | None = None  # when the marker was sent
    held: list[tuple[Data, memoryview]] = field(default_factory=list[tuple[Data, memoryview]])
    held_bytes: int = 0
    released: bool = False


@dataclass(frozen=True, slots=True)
class _Coming:
    """A message whose body is being read. `targets` is None for one that came before."""

    consumer_tag: str
    delivery_tag: int
    head: Header
    targets: Sequence[memoryview] | None
    hold: _Switch | None


class Inbox(Deaf):
    """The line that everything arrives by."""

    def __init__(self, carrier: AmqpCarrier, login: AmqpLogin) -> None:
        self._carrier, self._login = carrier, login
        self.up = threading.Event()  # what is sent to this peer arrives
        self.switched = False
        self._life = 0
        self._follows = False  # whether this life began with fan-outs in the inbox
        self._bound: set[int] = set()  # senders whose fan-outs reach this life's queues
        self._coming: _Coming | None = None
        self._switch: _Switch | None = None
        self._acking = threading.Lock()  # a tag is acknowledged once, and never after a later one
        self._watch_tag = 0  # of the last delivery of the watch queue that is not acknowledged
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
        self._follows = self._carrier.following
        bound: set[int] = set()
        with self._acking:
            self._watch_tag = 0
        declare_exchange(channel, names)
        fan = names.fan(me)
        channel.exchange_declare(fan, "fanout", durable=False, auto_delete=True)
        declare_queue(channel, self._queue, _FUSE_BYTES, "reject-publish")
        channel.queue_bind(self._queue, names.exchange, to_key(me))
        channel.queue_bind(self._queue, names.exchange, "view")
        if self._follows:
            channel.queue_bind(self._queue, fan, "")
        else:
            watch_bytes = self._carrier.terms.watch_bytes
            declare_queue(channel, self._watch_queue, watch_bytes, "drop-head")
            channel.queue_bind(self._watch_queue, fan, "")
        for other in self._others(self._carrier.newest()):
            channel.exchange_bind(fan, names.exchange, from_key(other))
            bound.add(other)
        self._bound = bound
        channel.basic_qos(0, self._prefetch(), False)

    def _prefetch(self) -> int:
        """How many messages of the watch queue may be on their way: a quarter of its memory."""
        terms = self._carrier.terms
        return min(_MAX_PREFETCH, max(1, terms.watch_bytes // (4 * terms.part_bytes)))

    def _start(self, channel: AmqpChannel) -> None:
        self.switched = self._follows
        if self._life > 1:
            self._carrier.renewed()  # before anything can arrive, a fence of ours for one
        channel.consume(self._queue, "inbox", no_ack=True)
        if not self._follows:
            channel.consume(self._watch_queue, "watch", no_ack=False)
        self.up.set()

    def _stop(self) -> None:
        self.up.clear()

    # -- bindings -------------------------------------------------------------------------------

    def make_bindings(self, timeout_s: float) -> None:
        """A newcomer's: both directions, with everybody who is here."""
        deadline = time.monotonic() + timeout_s
        while True:
            view = self._carrier.newest()
            try:
                run_errand(
                    self._login,
                    lambda channel, view=view: self._bind_receivers(channel, view),
                    timeout_s=timeout_s,
                )
                self.bind_senders(view)
                return
            except Refused as error:
                # Somebody left in this very moment; the next view is without it.
                if error.code != "missing" or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def _bind_receivers(self, channel: Any, view: View) -> None:  # noqa: ANN401
        names, me = self._carrier.names, self._carrier.me.incarnation
        for other in self._others(view):
            fan = names.fan(other)
            # It may be away for the moment, and its exchange with it.
            channel.exchange_declare(fan, "fanout", durable=False, auto_delete=True)
            channel.exchange_bind(fan, names.exchange, from_key(me))

    def bind_senders(self, view: View) -> set[int]:
        """Have the fan-outs of everybody in the view; returns whose were not had before."""
        names, me = self._carrier.names, self._carrier.me.incarnation
        bound = self._bound  # of this life: with the next one comes another set
        new = {other for other in self._others(view) if other not in bound}
        for other in new:
            self.channel().bind_exchange(names.fan(me), names.exchange, from_key(other))
            bound.add(other)
        return new

    def _others(self, view: View) -> Iterable[int]:
        me = self._carrier.me.incarnation
        return [m.peer.incarnation for m in view.roster if m.peer.incarnation != me]

    # -- the switch -----------------------------------------------------------------------------

    def switch(self) -> bool:
        """Take fan-outs in the inbox from now on. Call it again until it returns True."""
        fan = self._carrier.names.fan(self._carrier.me.incarnation)
        channel = self.channel()
        switch = self._switch
        if switch is None or switch.channel is not channel:
            switch = self._switch = _Switch(channel)
        if switch.asked_s is None:
            channel.bind(self._queue, fan, "")
            self._carrier.control.to_exchange(fan, Marker(switch.token))
            switch.asked_s = time.monotonic()
            self.allow_more()
        elif switch.released:
            channel.cancel("watch")  # the watch queue goes with its only consumer
            self.switched = True
        elif time.monotonic() - switch.asked_s > self._carrier.terms.lease_s:
            channel.abort()  # the marker is lost; a new inbox has its fan-outs from the start
        return self.switched

    def _switching(self) -> _Switch | None:
        """The switch under way on the line as it is now."""
        switch = self._switch
        if switch is None or switch.released or switch.channel is not self.line.channel:
            return None
        return switch

    def _hold(self, switch: _Switch, data: Data, body: memoryview) -> None:
        switch.held.append((data, body))
        switch.held_bytes += data.cost
        if switch.held_bytes > 2 * self._carrier.terms.watch_bytes:
            switch.held.clear()
            switch.channel.abort()  # more than a watching peer may take: a Gap is what it gets

    def _release(self, switch: _Switch) -> None:
        switch.released = True
        held, switch.held = switch.held, []
        for data, body in held:
            targets = self._targets(data)
            if targets is None:
                continue
            at = 0
            for target in targets:
                target[:] = body[at : at + target.nbytes]
                at += target.nbytes
            self._carrier.sink.delivered(data, targets)
        self._carrier.wake()

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
        self._check(head, payload_bytes, body_bytes)
        targets: Sequence[memoryview] | None = []
        hold = None
        if isinstance(head, Data):
            if head.to is None and consumer_tag == "inbox":
                hold = self._switching()
            targets = self._targets(head) if hold is None else [memoryview(bytearray(body_bytes))]
        self._coming = _Coming(consumer_tag, delivery_tag, head, targets, hold)
        return [memoryview(bytearray(body_bytes))] if targets is None else targets

    def _check(self, head: Header, payload_bytes: int, body_bytes: int) -> None:
        """Anybody with a login at the broker can have sent it."""
        if not isinstance(head, _KINDS):
            raise Malformed(f"{type(head).__name__} in an inbox")
        if isinstance(head, Data):
            me = self._carrier.me.incarnation
            if head.sender == me or head.to not in (None, me):
                raise Malformed(f"a message of {head.sender:x} to {head.to} in the wrong inbox")
            if not self._carrier.joined:
                raise Malformed("a message before the view that shows this peer")
        elif isinstance(head, NewView) and max(*head.view.number, *head.view.cut) >= _MAX_NUMBER:
            raise Malformed(f"view {head.view.number}")
        expected = sum(head.sizes) if isinstance(head, Data) else 0
        if not payload_bytes == body_bytes == expected:
            raise Malformed(f"{expected} bytes said, {payload_bytes} framed, {body_bytes} sent")

    def _targets(self, data: Data) -> Sequence[memoryview] | None:
        sink = self._carrier.await_sink()
        try:
            return sink.targets(data)
        except WireError as error:  # the place that was named for it does not fit
            self._carrier.fail(LinkBroken(f"a message could not be received: {error.message}"))
            raise

    def on_body(self) -> None:
        coming = self._coming
        assert coming is not None
        self._coming = None
        match coming.head:
            case Data() as data:
                if coming.hold is not None:
                    assert coming.targets is not None
                    self._hold(coming.hold, data, coming.targets[0])
                elif coming.targets is not None:
                    self._carrier.sink.delivered(data, coming.targets)
            case NewView() as view:
                self._carrier.on_view(view)
            case BeatBack() as beat:
                self._carrier.on_beat_back(beat)
            case Fence(token):
                self._carrier.control.on_fence(token)
            case Marker(token):
                switch = self._switching()
                if coming.consumer_tag == "watch" and switch and token == switch.token:
                    self._release(switch)
            case Dismissal(reason):
                self._carrier.fail(Excluded(reason))
            case other:
                if self._carrier.joined:
                    self._carrier.await_sink().handle(other)
        self._after(coming.consumer_tag, coming.delivery_tag)

    def on_bad_delivery(self, consumer_tag: str, delivery_tag: int, error: WireError) -> None:
        # What one peer sends amiss must not take this one down; its number shows as a hole.
        log.debug("dropped a message: %s", error.message)
        self._after(consumer_tag, delivery_tag)

    def on_cancelled(self, consumer_tag: str) -> None:
        channel = self.line.channel
        if channel is not None:
            channel.abort()  # somebody deleted our queue: begin anew

    def _after(self, consumer_tag: str, delivery_tag: int) -> None:
        if consumer_tag == "watch":
            with self._acking:
                self._watch_tag = delivery_tag
            self.allow_more()

    def allow_more(self) -> None:
        """Let the watch queue go on, unless the reader is far behind."""
        if not self._carrier.sink_set.is_set():
            return
        # A switch waits for the end of the watch queue, and the inbox grows until then.
        enough = self._carrier.terms.watch_bytes // 2
        go_on = self._switching() or self._carrier.sink.backlog_bytes() < enough
        with self._acking:
            channel, tag = self.line.channel, self._watch_tag
            if go_on and channel is not None and tag:
                self._watch_tag = 0
                with contextlib.suppress(LinkError):
                    channel.ack(tag, multiple=True)
