"""The line that everything arrives by."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from manyhands.core.errors import LinkClosed, LinkError, Malformed, Refused, WireError
from manyhands.core.peers import View
from manyhands.links.amqp.channel import AmqpChannel
from manyhands.links.amqp.line import Deaf
from manyhands.links.amqp.login import AmqpLogin, run_errand
from manyhands.links.amqp.names import declare_exchange, declare_queue, from_key, to_key
from manyhands.links.messages import (
    HEADER_BYTES,
    BeatBack,
    Data,
    Fence,
    Header,
    Marker,
    NewView,
    decode_head,
)
from manyhands.wire.frames import Limits

if TYPE_CHECKING:
    from manyhands.links.amqp.carrier import AmqpCarrier


_WATCH_PREFETCH = 32  # messages of the watch queue that are on their way at once
_FUSE_BYTES = 4 << 30  # an inbox this full is a bug or an attack; windows keep it far below


class Inbox(Deaf):
    """The line that everything arrives by."""

    def __init__(self, carrier: AmqpCarrier, login: AmqpLogin) -> None:
        self._carrier, self._login = carrier, login
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
        declare_exchange(channel, names)
        fan = names.fan(me)
        channel.exchange_declare(fan, "fanout", durable=False, auto_delete=True)
        declare_queue(channel, self._queue, _FUSE_BYTES, "reject-publish")
        channel.queue_bind(self._queue, names.exchange, to_key(me))
        channel.queue_bind(self._queue, names.exchange, "view")
        if self._carrier.following:
            channel.queue_bind(self._queue, fan, "")
        else:
            watch_bytes = self._carrier.terms.watch_bytes
            declare_queue(channel, self._watch_queue, watch_bytes, "drop-head")
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
                return self.bind_senders(view)
            except Refused as error:
                # Somebody left in this very moment; the next view is without it.
                if error.code != "missing" or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def _bind_receivers(self, channel: Any, view: View) -> None:  # noqa: ANN401
        names, me = self._carrier.names, self._carrier.me.incarnation
        for other in [m.peer.incarnation for m in view.roster if m.peer.incarnation != me]:
            fan = names.fan(other)
            # It may be away for the moment, and its exchange with it.
            channel.exchange_declare(fan, "fanout", durable=False, auto_delete=True)
            channel.exchange_bind(fan, names.exchange, from_key(me))

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
        channel.cancel("watch")  # the watch queue goes with its only consumer
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
        # What one peer sends amiss must not take this one down; its number shows as a hole.
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
