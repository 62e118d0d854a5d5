"""A faulty link, driven by a script: what the layers above must survive, on demand.

    link = open_faulty(url, [Drop(at=3), Duplicate(at=5)], run="r", name="a")

The faults strike between the endpoint and what carries its frames, so the endpoint's own checks
(stream numbers, windows, views) meet them as they would meet a bad network or a bad broker.
Outgoing faults count the messages this peer sends, `Reorder` those it receives, both from 1.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from manyhands.core.address import AmqpAddress, HubAddress, LocalAddress, parse_address
from manyhands.core.errors import LinkError
from manyhands.links.amqp import open_amqp
from manyhands.links.base import Link, LinkSettings, Place, new_peer
from manyhands.links.endpoint import Carrier, Sink
from manyhands.links.hub_link import open_hub
from manyhands.links.local import open_local
from manyhands.links.messages import Data, Header, NewView
from manyhands.wire.frames import Buffer

__all__ = ["Cut", "Delay", "Drop", "Duplicate", "Fault", "Kill", "Reorder", "open_faulty"]


@dataclass(frozen=True, slots=True)
class Drop:
    """The `at`-th message, and `count` in all, are lost on the way."""

    at: int
    count: int = 1


@dataclass(frozen=True, slots=True)
class Duplicate:
    """The `at`-th message arrives `extra` times more."""

    at: int
    extra: int = 1


@dataclass(frozen=True, slots=True)
class Delay:
    """The `at`-th message, and so all behind it, leaves that much later."""

    at: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Cut:
    """The connection breaks just before the `at`-th message; `open_faulty` is told how."""

    at: int


@dataclass(frozen=True, slots=True)
class Kill:
    """This very process dies, as by kill -9, instead of sending its `at`-th message."""

    at: int


@dataclass(frozen=True, slots=True)
class Reorder:
    """What the sender of the `at`-th message sends from there on is overtaken by `behind` messages
    of others (or by the next view); the order of each sender stays."""

    at: int
    behind: int = 1


Fault = Drop | Duplicate | Delay | Cut | Kill | Reorder


def open_faulty(
    url: str,
    script: Sequence[Fault],
    *,
    run: str | None = None,
    name: str | None = None,
    settings: LinkSettings | None = None,
    place: Place | None = None,
    cut: Callable[[], None] | None = None,
) -> Link:
    """As `open_link`, with these faults. `cut` breaks the connection (`Proxy.cut`, say)."""
    address = parse_address(url, run=run)
    settings, me = settings or LinkSettings(), new_peer(name)

    def wrap(carrier: Carrier) -> Carrier:
        return FaultyCarrier(carrier, script, cut)

    match address:
        case LocalAddress():
            return open_local(address, me, settings, place, wrap)
        case HubAddress():
            return open_hub(address, me, settings, place, wrap)
        case AmqpAddress():
            return open_amqp(address, me, settings, place, wrap)


class FaultyCarrier:
    """A carrier that follows a script."""

    def __init__(
        self, inner: Carrier, script: Sequence[Fault], cut: Callable[[], None] | None
    ) -> None:
        self._inner, self._script, self._cut = inner, script, cut
        self._lock = threading.Lock()
        self._num_sent = 0

    def start(self, sink: Sink) -> None:
        """See `Carrier`."""
        reorders = [fault for fault in self._script if isinstance(fault, Reorder)]
        self._inner.start(FaultySink(sink, reorders) if reorders else sink)

    def carry(self, header: Header, buffers: Sequence[Buffer] = ()) -> None:
        """See `Carrier`."""
        if not isinstance(header, Data):
            return self._inner.carry(header, buffers)
        with self._lock:
            self._num_sent += 1
            n = self._num_sent
        for _ in range(self._strike(n)):
            self._inner.carry(header, buffers)
        return None

    def _strike(self, n: int) -> int:
        """What happens at the n-th message; returns how often it is carried."""
        times = 1
        for fault in self._script:
            match fault:
                case Drop(at, count) if at <= n < at + count:
                    times = 0
                case Duplicate(at, extra) if at == n:
                    times += extra
                case Delay(at, seconds) if at == n:
                    time.sleep(seconds)
                case Cut(at) if at == n:
                    assert self._cut is not None, "open_faulty(cut=...) says how to cut"
                    self._cut()
                case Kill(at) if at == n:
                    os.kill(os.getpid(), signal.SIGKILL)
                case _:
                    continue
        return times

    def beat(self, n: int, consumed: int) -> None:
        """See `Carrier`."""
        self._inner.beat(n, consumed)

    @property
    def bytes_sent(self) -> int:
        return self._inner.bytes_sent

    def flush(self, timeout_s: float) -> None:
        """See `Carrier`."""
        self._inner.flush(timeout_s)

    def close(self) -> None:
        """See `Carrier`."""
        self._inner.close()


class FaultySink:
    """A sink that lets some senders wait. Used by the carrier's reader thread only."""

    def __init__(self, inner: Sink, script: Sequence[Reorder]) -> None:
        self._inner, self._script = inner, script
        self._num_received = 0
        self._held: defaultdict[int, deque[tuple[Data, Sequence[memoryview]]]] = defaultdict(deque)
        self._behind: Counter[int] = Counter()  # sender -> messages of others to let pass

    def targets(self, data: Data) -> Sequence[memoryview] | None:
        """See `Sink`."""
        return self._inner.targets(data)

    def delivered(self, data: Data, buffers: Sequence[memoryview]) -> None:
        """See `Sink`."""
        self._num_received += 1
        for fault in self._script:
            if fault.at == self._num_received:
                self._behind[data.sender] += fault.behind
        if self._behind[data.sender] > 0:
            self._held[data.sender].append((data, buffers))
            return
        self._inner.delivered(data, buffers)
        for sender in list(self._held):
            self._behind[sender] -= 1
            if self._behind[sender] <= 0:
                self._release(sender)

    def _release(self, sender: int) -> None:
        for data, buffers in self._held.pop(sender, ()):
            self._inner.delivered(data, buffers)

    def handle(self, header: Header) -> None:
        """See `Sink`."""
        if isinstance(header, NewView):
            for sender in list(self._held):
                self._behind[sender] = 0
                self._release(sender)
        self._inner.handle(header)

    def heard(self, sent_s: float) -> None:
        """See `Sink`."""
        self._inner.heard(sent_s)

    def renewed(self) -> None:
        """See `Sink`."""
        self._inner.renewed()

    def failed(self, error: LinkError) -> None:
        """See `Sink`."""
        self._inner.failed(error)

    def backlog_bytes(self) -> int:
        """See `Sink`."""
        return self._inner.backlog_bytes()
