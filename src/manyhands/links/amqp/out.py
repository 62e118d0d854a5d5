"""The line that data leaves by."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from manyhands.core.errors import LinkClosed, LinkError, LinkTimeout, Malformed, WireError
from manyhands.links.amqp.channel import AmqpChannel
from manyhands.links.amqp.line import Deaf
from manyhands.links.amqp.login import AmqpLogin
from manyhands.links.amqp.names import declare_exchange
from manyhands.links.messages import (
    SCHEMA,
    Header,
    Lost,
    Missing,
)
from manyhands.wire.frames import Buffer, payload_size

if TYPE_CHECKING:
    from manyhands.links.amqp.carrier import AmqpCarrier


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
        declare_exchange(channel, self._carrier.names)
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
