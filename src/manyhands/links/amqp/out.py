"""The line that data leaves by."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from manyhands.core.errors import LinkClosed, LinkError, LinkTimeout, Malformed, WireError
from manyhands.links.amqp.channel import AmqpChannel
from manyhands.links.amqp.line import Deaf
from manyhands.links.amqp.login import AmqpLogin
from manyhands.links.amqp.names import declare_exchange
from manyhands.links.messages import (
    SCHEMA,
    Data,
    Header,
    Lost,
    Missing,
)
from manyhands.wire.frames import Buffer, payload_size

if TYPE_CHECKING:
    from manyhands.links.amqp.carrier import AmqpCarrier


@dataclass(frozen=True, slots=True, eq=False)
class _Item:
    """A frame on its way; `number` counts them."""

    number: int
    key: str
    header: Header
    buffers: Sequence[Buffer]

    @property
    def cost(self) -> int:
        return self.header.cost if isinstance(self.header, Data) else 0


class Out(Deaf):
    """The line that data leaves by. Frames are kept, in order, until the broker confirms them.

    Windows bound what is on its way to peers that follow; fan-outs to watching ones have none, so
    `publish` waits while more than `watch_bytes` (or a window, if that is more) are unconfirmed.
    """

    def __init__(self, carrier: AmqpCarrier, login: AmqpLogin) -> None:
        self._carrier = carrier
        self._sending = threading.Lock()  # the order of `_kept` is that of the wire
        self._changed = threading.Condition()  # guards what follows
        self._waiting: deque[_Item] = deque()  # for their turn, or for the line to be up
        self._kept: dict[int, _Item] = {}  # by tag, oldest first; all older than those waiting
        self._held_bytes = 0  # of both
        self._num_items = 0
        self._up = False
        self._closed = False
        self._told_missing: dict[int, float] = {}
        self.line = carrier.line(
            "out", login, self, setup=self._setup, up=self._start, down=self._stop
        )

    def publish(self, key: str, header: Header, buffers: Sequence[Buffer] = ()) -> None:
        """Send now, or when the line is up again. Raises Oversized if the broker's frames are."""
        terms = self._carrier.terms
        with self._changed:
            if isinstance(header, Data):
                limit = max(terms.window_bytes, terms.watch_bytes)
                self._changed.wait_for(lambda: self._closed or self._held_bytes < limit)
            if self._closed:
                return
        with self._sending:
            with self._changed:
                self._num_items += 1
                item = _Item(self._num_items, key, header, buffers)
                self._waiting.append(item)
                self._held_bytes += item.cost
            self._write_waiting()

    def _write_waiting(self) -> None:
        """Write as much as the line allows. Called with `_sending` held."""
        while True:
            channel = self.line.channel
            with self._changed:
                if not self._up or channel is None or not self._waiting:
                    return
                item = self._waiting[0]
            try:
                channel.publish(
                    self._carrier.names.exchange,
                    item.key,
                    SCHEMA.encode(item.header, payload_size(item.buffers)),
                    item.buffers,
                    mandatory=item.key.startswith("to."),
                    on_tag=self._keep_first,
                )
            except LinkError:
                return  # it is kept, or still waits; either way it goes when the line is up
            except WireError:
                with self._changed:
                    self._held_bytes -= self._waiting.popleft().cost
                raise

    def _keep_first(self, tag: int) -> None:
        with self._changed:
            self._kept[tag] = self._waiting.popleft()

    def flush(self, timeout_s: float) -> None:
        """Return when the broker has confirmed everything that was published before."""
        with self._changed:
            last = self._num_items
            done = self._changed.wait_for(lambda: self._closed or self._oldest() > last, timeout_s)
            if not done:
                raise LinkTimeout("the broker's confirmation of what was sent", timeout_s)
            if self._oldest() <= last:
                raise LinkClosed("the link was closed while messages were on their way")

    def _oldest(self) -> int:
        if self._kept:
            return next(iter(self._kept.values())).number
        return self._waiting[0].number if self._waiting else self._num_items + 1

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
                # What the broker had taken already arrives twice and is dropped by its readers.
                self._waiting.extendleft(reversed(self._kept.values()))
                self._kept = {}
                self._up = True
            self._write_waiting()

    def _stop(self) -> None:
        with self._changed:
            self._up = False

    def on_confirm(self, tag: int, multiple: bool, ok: bool) -> None:
        with self._changed:
            tags = list(takewhile(lambda t: t <= tag, self._kept)) if multiple else [tag]
            for t in tags:
                item = self._kept.pop(t, None)
                self._held_bytes -= 0 if item is None else item.cost
            self._changed.notify_all()
        if not ok:  # a queue was over its fuse: somebody has missed something
            self._carrier.control.say(Lost(self._carrier.me.incarnation))

    def on_return(self, reply_code: int, reply_text: str, routing_key: str, header: bytes) -> None:
        missing, now_s = int(routing_key.removeprefix("to."), 16), time.monotonic()
        # A whole window may come back: once a beat is enough.
        recent_s = now_s - self._carrier.terms.beat_s
        self._told_missing = {i: at for i, at in self._told_missing.items() if at > recent_s}
        if missing not in self._told_missing:
            self._told_missing[missing] = now_s
            self._carrier.control.call(0, Missing(missing))

    def on_delivery(self, *message: object) -> Sequence[memoryview]:
        raise Malformed("a delivery on a line that only publishes")

    def on_body(self) -> None:
        pass

    def on_bad_delivery(self, consumer_tag: str, delivery_tag: int, error: WireError) -> None:
        pass
