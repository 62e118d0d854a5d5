"""Station: a trainer's two queues at the broker, held for as long as the training lasts.

`my_queue` carries nothing here. Its only consumer marks that there is a trainer of that name, so
that a second one is turned away; whatever else arrives in it is thrown away.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from manyhands.compat.deepbooster.errors import QueueInUse
from manyhands.core.errors import (
    LinkBroken,
    LinkError,
    LinkTimeout,
    Oversized,
    Refused,
    WireError,
)
from manyhands.core.settings import find_outage
from manyhands.links.amqp.channel import AmqpChannel
from manyhands.links.amqp.line import Deaf, Line
from manyhands.links.amqp.login import AmqpLogin
from manyhands.links.amqp.queues import purge, set_up

log = logging.getLogger(__name__)
CONNECT_S = 15.0
TAKEN_PATIENCE_S = 3.0  # for a trainer that has just ended: the broker may not know yet
HEARTBEAT_S = 10
_PAUSE_S = 0.5
_TICK_S = 0.05
_SYNC, _IGNITION = "sync", "ignition"
_PATH_BYTES = 64 << 10  # a message that is longer ignites, but is no path


class _Came(NamedTuple):
    """The message that ignited: where it came from, to acknowledge it there."""

    channel: AmqpChannel
    tag: int


class Station(Deaf):
    """`open`, then `wait_for_ignition`, then `close` when the training is over."""

    def __init__(self, login: AmqpLogin, *, my_queue: str, ignition_queue: str) -> None:
        self._login, self._queues = login, {_SYNC: my_queue, _IGNITION: ignition_queue}
        self._line = Line(
            f"queues of {my_queue}",
            login,
            self,
            setup=lambda channel: channel.basic_qos(0, 1, False),
            up=self._start,
            down=lambda: None,
            failed=self._fail,
            connect_s=CONNECT_S,
            outage_s=find_outage(os.environ),
            heartbeat_s=HEARTBEAT_S,
        )
        self._held = threading.Event()
        self._lit = threading.Event()  # or failed
        self._closing = threading.Event()
        self._beats: threading.Thread | None = None
        self._taken: str | None = None  # a queue that somebody else has
        self._error: LinkError | None = None
        self._body = bytearray()
        self._came: _Came | None = None

    def open(self) -> None:
        """Make and bind the queues, take them, purge `my_queue`. Raises QueueInUse, LinkError."""
        set_up(self._login, list(self._queues.values()))
        self._line.open()
        self._beats = threading.Thread(target=self._beat, name="queues beat", daemon=True)
        self._beats.start()
        try:
            self._await_hold()
            purge(self._login, [self._queues[_SYNC]])
        except BaseException:
            self.close()
            raise

    def wait_for_ignition(self) -> bytes:
        """Block until a message is in the ignition queue; take it out, and no other one."""
        while not self._lit.wait(_PAUSE_S):
            pass  # in pieces, so that Ctrl-C is heard
        if self._error is not None:
            raise self._error.with_traceback(None)
        assert self._came is not None
        try:
            self._came.channel.cancel(_IGNITION)  # first: the next message stays where it is
            self._came.channel.ack(self._came.tag)
        except LinkError as error:
            name = self._queues[_IGNITION]
            log.warning("the message that ignited is still in %s: %s", name, error.message)
        return bytes(self._body)

    def close(self) -> None:
        """Let go of the queues; they stay. Idempotent."""
        self._closing.set()
        self._line.close()
        if self._beats is not None:
            self._beats.join()

    def _await_hold(self) -> None:
        start_s = time.monotonic()
        while not self._held.wait(_TICK_S):
            waited_s = time.monotonic() - start_s
            if self._taken is not None and waited_s > TAKEN_PATIENCE_S:
                raise QueueInUse(
                    f"another trainer has the queue {self._taken!r}",
                    hint="each trainer has a my_queue and an ignition_queue of its own. If that "
                    f"one was cut off, the broker frees its queues after {2 * HEARTBEAT_S} s",
                )
            if waited_s > CONNECT_S:
                raise LinkTimeout(f"queues from {self._login.place}", CONNECT_S)
        if self._error is not None:
            raise self._error.with_traceback(None)

    def _start(self, channel: AmqpChannel) -> None:
        wanted = [_SYNC] if self._lit.is_set() else [_SYNC, _IGNITION]
        for tag in wanted:
            try:
                channel.consume(self._queues[tag], tag, no_ack=False, exclusive=True)
            except Refused as error:
                if "exclusive use" not in error.message:
                    raise
                self._taken = self._queues[tag]
                # Perhaps this peer's own connection, which the broker does not know to be dead.
                self._closing.wait(_PAUSE_S)
                raise LinkBroken(error.message) from None
        self._held.set()

    def _fail(self, error: LinkError) -> None:
        if self._held.is_set() and self._lit.is_set():
            log.warning("the queue %s is not held any more: %s", self._queues[_SYNC], error)
        self._error = error
        self._held.set()
        self._lit.set()

    def _beat(self) -> None:
        while not self._closing.wait(HEARTBEAT_S / 4):
            self._line.beat()

    # -- Handler --------------------------------------------------------------------------------

    def on_delivery(
        self,
        consumer_tag: str,
        delivery_tag: int,
        redelivered: bool,
        header: bytes,
        body_bytes: int,
    ) -> Sequence[memoryview]:
        del redelivered, header
        if consumer_tag == _SYNC or body_bytes > _PATH_BYTES:
            raise Oversized(f"{body_bytes} bytes that nobody waits for")
        self._take(delivery_tag)
        self._body = bytearray(body_bytes)
        return [memoryview(self._body)]

    def _take(self, delivery_tag: int) -> None:
        channel = self._line.channel
        assert channel is not None, "its reader calls this"
        self._came = _Came(channel, delivery_tag)

    def on_body(self) -> None:
        self._lit.set()

    def on_bad_delivery(self, consumer_tag: str, delivery_tag: int, error: WireError) -> None:
        if consumer_tag == _IGNITION:  # whatever it is, it ignites
            self._take(delivery_tag)
            self._lit.set()
            return
        log.info("a message in %s is thrown away: %s", self._queues[_SYNC], error)
        channel = self._line.channel
        if channel is not None:
            with contextlib.suppress(LinkError):  # the line is breaking: it will come again
                channel.ack(delivery_tag)

    def on_cancelled(self, consumer_tag: str) -> None:
        self._fail(Refused("missing", f"the queue {self._queues[consumer_tag]!r} was deleted"))
