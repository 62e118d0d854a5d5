"""The line of calls to the arbiter, and from it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from manyhands.core.errors import Excluded, LinkClosed, LinkError, Malformed, WireError
from manyhands.core.peers import is_peer_name
from manyhands.links.amqp.channel import AmqpChannel
from manyhands.links.amqp.line import Deaf
from manyhands.links.amqp.login import AmqpLogin
from manyhands.links.amqp.names import BEGUN, declare_control, declare_exchange, to_key
from manyhands.links.amqp.seat import Seat
from manyhands.links.messages import (
    HEADER_BYTES,
    SCHEMA,
    Bye,
    Call,
    Header,
    Marker,
    decode_head,
)
from manyhands.wire.frames import Limits

if TYPE_CHECKING:
    from manyhands.links.amqp.carrier import AmqpCarrier


_CONTROL_EXPIRES_S = 1800  # a run that nobody attends for this long is forgotten
_MAX_CALLS = 10_000  # the oldest are dropped: the next beats say it all again
_MAX_NUMBER = 1 << 62  # of eras and views: the next one must still fit the wire
_FAREWELL_S = 1.0
_NOT_SAID = -1
_FORGOTTEN = (
    "the broker knows nothing of the run: it ended while this peer was cut off, "
    "or the broker has lost its memory"
)


class Control(Deaf):
    """The line of calls: its own to the arbiter, and everybody's while it has the seat."""

    def __init__(self, carrier: AmqpCarrier, login: AmqpLogin) -> None:
        self._carrier = carrier
        self._delivery: tuple[int, Call | None] = (0, None)
        self.blocked = False
        self._leaving = False
        self._lock = threading.Lock()
        self._words: dict[Header, int] = {}  # that wait for an answer: the beat before each
        self.line = carrier.line(
            "control", login, self, setup=self._setup, up=self._start, down=self._stop
        )
        self.seat = Seat(
            self,
            carrier.me,
            carrier.terms,
            newest=carrier.newest,
            unsure=carrier.unsure,
            dropped=carrier.forget,
            run=carrier.names.run,
        )

    def call(self, n: int, word: Header | None = None, *, timeout_s: float | None = None) -> bool:
        """Tell the arbiter how things are; False if that was not possible.

        Not while the inbox is down: a peer that hears nothing does not take part, and views that
        answer its call would be lost.
        """
        channel = self.line.channel
        if channel is None or self.blocked or not self._carrier.inbox.up.is_set():
            return False
        head = SCHEMA.encode(self._carrier.describe(n, word))
        try:
            channel.publish(
                self._carrier.names.exchange,
                "control",
                head,
                (),
                mandatory=False,
                timeout_s=timeout_s or self._carrier.terms.lease_s,
            )
        except LinkError:
            return False
        return True

    def say(self, word: Header) -> None:
        """Tell the arbiter what no beat repeats: it is said until a later beat is answered."""
        with self._lock:
            self._words[word] = self._carrier.beats
        if not self.call(0, word):
            with self._lock:
                self._words[word] = _NOT_SAID

    def beat(self, n: int) -> None:
        """Say what could not be said, and call."""
        with self._lock:
            unsaid = [word for word, beat in self._words.items() if beat == _NOT_SAID]
        for word in unsaid:
            self.say(word)
        self.call(n)

    def answered(self, n: int) -> None:
        """The arbiter has heard beat `n`, and so all words before it."""
        with self._lock:
            self._words = {w: beat for w, beat in self._words.items() if not -1 < beat < n}

    def leave(self) -> None:
        """Say good-bye; the last one of a run leaves nothing at the broker."""
        channel = self.line.channel
        if channel is None:
            return
        self._leaving = True
        # Whoever leaves stays until it is out: of those who leave together, the seat comes to the
        # last one, and good-byes that nobody decides would leave a run that looks cut off.
        said = not self.seat.alone() and self.call(0, Bye(), timeout_s=_FAREWELL_S)
        if said and (self.seat.taken or self._carrier.joined):
            self.seat.await_own_end(_FAREWELL_S)
        if self.seat.retire():
            channel.delete_queue(self._carrier.names.control, timeout_s=_FAREWELL_S)
        self.line.close()  # the next one waits for the seat

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

    def ask_begun(self) -> None:
        channel = self.line.channel
        if channel is None:
            raise LinkClosed("the control line is down")
        # Without the mark it comes back; with it, it comes to the queue, where it means nothing.
        head = SCHEMA.encode(Marker(0))
        channel.publish(self._carrier.names.begun, BEGUN, head, (), mandatory=True)

    def to_exchange(self, exchange: str, header: Header) -> None:
        """Publish to an exchange that takes everything, by whatever key."""
        channel = self.line.channel
        if channel is None or self.blocked:
            raise LinkClosed("the control line is down, or blocked")
        channel.publish(exchange, "", SCHEMA.encode(header), (), mandatory=False)

    def on_fence(self, token: int) -> None:
        """A fence of ours, or of another arbiter, has arrived in the inbox."""
        channel = self.line.channel
        if channel is None or not self.seat.awaits(token):
            return
        with contextlib.suppress(LinkError):  # the line is breaking, and the seat with it
            names, wait_s = self._carrier.names, self._carrier.terms.lease_s / 4
            if self._carrier.unsure():
                # It is bound like this already; the answer comes after that to `ask_begun`.
                channel.bind(names.control, names.exchange, "control", timeout_s=wait_s)
            if self.seat.forgotten:
                self._leaving = True  # else the line would make the queue anew
                channel.delete_queue(names.control, timeout_s=wait_s)
                self._carrier.fail(Excluded(_FORGOTTEN))
                return
            # The mark, before any view.
            channel.bind(names.control, names.begun, BEGUN, timeout_s=wait_s)
            self.seat.on_fence(token)

    def acknowledge(self, delivery_tag: int) -> None:
        channel = self.line.channel
        if channel is not None:
            channel.ack(delivery_tag)

    def give_up(self) -> None:
        channel = self.line.channel
        if channel is not None:
            channel.abort()

    # -- Handler --------------------------------------------------------------------------------

    def _setup(self, channel: Any) -> None:  # noqa: ANN401  (py-amqp has no types)
        names = self._carrier.names
        declare_exchange(channel, names)
        declare_control(channel, names, _CONTROL_EXPIRES_S, _MAX_CALLS)
        channel.basic_qos(0, 1, False)
        channel.confirm_select()

    def _start(self, channel: AmqpChannel) -> None:
        self.blocked = False
        channel.consume(self._carrier.names.control, "control", no_ack=False)

    def _stop(self) -> None:
        self.seat.lose()
        with self._lock:  # they may have gone with the line
            self._words = dict.fromkeys(self._words, _NOT_SAID)

    def on_delivery(
        self,
        consumer_tag: str,
        delivery_tag: int,
        redelivered: bool,
        header: bytes,
        body_bytes: int,
    ) -> Sequence[memoryview]:
        call, _ = decode_head(header, Limits(header_bytes=HEADER_BYTES, payload_bytes=0))
        if not isinstance(call, Call) or body_bytes:  # a Marker, perhaps: see `ask_begun`
            raise Malformed(f"{type(call).__name__} in the control queue")
        _check(call)
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
        if routing_key == BEGUN:
            return self.seat.not_begun()
        return self.seat.bounced(int(routing_key.removeprefix("to."), 16))

    def on_confirm(self, tag: int, multiple: bool, ok: bool) -> None:
        with contextlib.suppress(LinkError):
            self.seat.on_confirm(tag, multiple=multiple)

    def on_cancelled(self, consumer_tag: str) -> None:
        if not self._leaving:
            self.give_up()  # the last one of the run took the queue along, just as we came

    def on_blocked(self, reason: str) -> None:
        self.blocked = True

    def on_unblocked(self) -> None:
        self.blocked = False


def _check(call: Call) -> None:
    """Anybody with a login at the broker can have sent it, and its names go into views."""
    name, incarnation = call.peer
    if not is_peer_name(name) or not 0 < incarnation < 1 << 63:
        raise Malformed("a call of a peer that nobody can be")
    if max(*call.view, *(call.renewed_at or call.view)) >= _MAX_NUMBER:
        raise Malformed(f"a call about view {call.view}")
