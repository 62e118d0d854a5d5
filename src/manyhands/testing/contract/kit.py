"""What the tests of the contract are made of: a meeting point, readers, patience."""

from __future__ import annotations

import os
import time
import uuid
import zlib
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self, TypeVar

import msgspec
import pytest

from manyhands.core.errors import (
    LinkError,
    LinkTimeout,
)
from manyhands.core.peers import Member, PeerId, PeerState, View
from manyhands.links.base import Delivery, Event, Gap, Link, LinkSettings, Place, open_link
from manyhands.links.messages import Ready, Terms
from manyhands.testing.peer import PeerProcess
from manyhands.testing.proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType


T = TypeVar("T")
PATIENCE_S = 30.0  # for what must happen; nothing here waits this long unless it is broken

# Where leases are not the matter they must not decide a test on a machine that is busy.
STEADY = Terms(
    beat_s=0.1,
    lease_s=20.0,
    grace_s=0.3,
    window_bytes=256 << 10,
    part_bytes=64 << 10,
    watch_bytes=1 << 20,
)
QUICK = msgspec.structs.replace(STEADY, lease_s=1.5)  # for tests of the lease itself
PATIENT = msgspec.structs.replace(STEADY, grace_s=10.0)  # for tests of reconnecting


class Meeting:
    """A meeting point under test. Closing it closes all that was opened through it."""

    resumes = True  # a reconnect in time is invisible; else it is a cut with the same roster
    spawns = True  # peers of other processes can come
    proxies = True  # it is reached by TCP
    restarts = True  # it can die and come back

    def __init__(self, url: str) -> None:
        self.url = url
        self.run = f"contract-{uuid.uuid4().hex[:8]}"
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def target(self) -> tuple[str, int]:
        """Where the meeting point listens."""
        raise self._missing()

    def via(self, port: int) -> str:
        """The URL by which it is found behind a proxy on that loopback port."""
        raise self._missing()

    def restart(self) -> None:
        """The meeting point dies and comes back."""
        raise self._missing()

    def _missing(self) -> AssertionError:
        return AssertionError(
            f"{type(self).__name__} must define target, via and restart, "
            "or say that it has no `proxies` and no `restarts`"
        )

    def open(
        self,
        name: str,
        *,
        run: str | None = None,
        terms: Terms = STEADY,
        place: Place | None = None,
        url: str | None = None,
    ) -> Link:
        """A link of this process."""
        return self._stack.enter_context(
            open_link(
                url or self.url,
                run=run or self.run,
                name=name,
                settings=LinkSettings(terms=terms, connect_s=PATIENCE_S),
                place=place,
            )
        )

    def open_proxied(self, name: str, *, terms: Terms = STEADY) -> tuple[Link, Proxy]:
        """A link of this process whose network can be spoiled."""
        proxy = self._stack.enter_context(Proxy(*self.target()))
        return self.open(name, terms=terms, url=self.via(proxy.port)), proxy

    def spawn(self, name: str, *, terms: Terms = STEADY) -> PeerProcess:
        """A peer of another process, in the run."""
        process = self._stack.enter_context(PeerProcess())
        return process.open(self.url, run=self.run, name=name, terms=terms)


class Reader:
    """Reads a link on the calling thread and remembers all that came."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.events: list[Event] = []

    @property
    def views(self) -> list[View]:
        """All views so far."""
        return [event for event in self.events if isinstance(event, View)]

    @property
    def deliveries(self) -> list[Delivery]:
        """All messages so far."""
        return [event for event in self.events if isinstance(event, Delivery)]

    @property
    def num_gaps(self) -> int:
        """How many gaps there were so far."""
        return sum(isinstance(event, Gap) for event in self.events)

    def until(self, wanted: Callable[[Event], bool], patience_s: float = PATIENCE_S) -> Event:
        """Read on to the first event that is wanted. Raises LinkTimeout when none comes."""
        deadline = time.monotonic() + patience_s
        while True:
            event = self.link.receive(max(0.0, deadline - time.monotonic()))
            self.events.append(event)
            if wanted(event):
                return event

    def until_view(self, wanted: Callable[[View], bool]) -> View:
        """Read on to the first view that is wanted."""
        view = self.until(lambda event: isinstance(event, View) and wanted(event))
        assert isinstance(view, View)
        return view

    def settle(self, wanted: Callable[[View], bool]) -> View:
        """Read on until the newest view is wanted; it may be so already."""
        if self.views and wanted(self.views[-1]):
            return self.views[-1]
        return self.until_view(wanted)

    def until_roster(self, **states: PeerState) -> View:
        """Read on until the roster is exactly these names in these states."""
        return self.until_view(lambda view: {m.peer.name: m.state for m in view.roster} == states)

    def until_without(self, peer: PeerId) -> View:
        """Read on until that peer is out."""
        return self.until_view(lambda view: peer not in view.peers())

    def until_deliveries(self, count: int) -> list[Delivery]:
        """Read on until that many messages have come in all."""
        while len(self.deliveries) < count:
            self.until(lambda event: isinstance(event, Delivery))
        return self.deliveries

    def until_message(self, message: bytes) -> Delivery:
        """Read on to that message."""
        found = self.until(lambda event: isinstance(event, Delivery) and event.message == message)
        assert isinstance(found, Delivery)
        return found

    def until_error(self, patience_s: float = PATIENCE_S) -> LinkError:
        """Read on until the link says why it cannot."""
        try:
            self.until(lambda event: False, patience_s)
        except LinkTimeout:
            raise
        except LinkError as error:
            return error
        raise AssertionError


def together(*works: Callable[[], T], patience_s: float = 90.0) -> list[T]:
    """Run these at the same time and return what they return; the first error is raised."""
    pool = ThreadPoolExecutor(len(works))
    try:
        futures = [pool.submit(work) for work in works]
        done, late = wait(futures, patience_s, FIRST_EXCEPTION)
        for future in done:
            future.result()
        assert not late, f"{len(late)} of {len(works)} threads hang"
        return [future.result() for future in futures]
    finally:
        pool.shutdown(wait=False)  # a thread that hangs ends when the links are closed


def sealed(count: int, size: int) -> tuple[bytes, bytes]:
    """A message with a running number and a checksum of the fresh random data beside it."""
    data = os.urandom(size)
    return f"{count}:{zlib.crc32(data)}".encode(), data


def number_of(delivery: Delivery) -> int:
    """The running number of a sealed message. Raises AssertionError when its data is damaged."""
    count, crc = delivery.message.split(b":")
    assert zlib.crc32(b"".join(delivery.buffers)) == int(crc), "the data is not what was sent"
    return int(count)


def activate(*readers: Reader) -> View:
    """Everybody says Ready and reads on until all are active; returns the last one's view."""
    for reader in readers:
        reader.link.tell(Ready())
    wanted = {reader.link.me for reader in readers}
    views = [
        reader.until_view(lambda view: wanted <= set(view.peers(PeerState.ACTIVE)))
        for reader in readers
    ]
    return views[-1]


def fill(link: Link, to: PeerId | None, timeout_s: float = 0.5) -> tuple[int, LinkTimeout]:
    """Send until nothing more goes; returns the bytes that went, and the error."""
    size = link.terms.part_bytes
    for i in range(10_000):
        try:
            link.send(to, *part_of(size), timeout_s=timeout_s)
        except LinkTimeout as error:
            return i * size, error
    raise AssertionError("nothing holds this sender back")


def state_of(view: View, peer: PeerId) -> PeerState | None:
    """How far the peer takes part, if it does."""
    member = view.member(peer.incarnation)
    return None if member is None else member.state


def is_cut(view: View) -> bool:
    """Whether this very view is a cut."""
    return view.cut == view.number


def states_of(roster: tuple[Member, ...]) -> list[tuple[PeerId, PeerState]]:
    """The roster without the numbers of its views."""
    return [(member.peer, member.state) for member in roster]


def part_of(size: int) -> tuple[bytes, list[bytes]]:
    """A message with that much fresh random data."""
    return b"part", [os.urandom(size)]


def numbered(i: int) -> tuple[bytes, list[bytes]]:
    """A message that says its number, with data that shows whether it is whole."""
    message, data = sealed(i, 10_000)
    return message, [data]


def need(supported: bool, what: str) -> None:
    """Skip, aloud, what this kind of link cannot have."""
    if not supported:
        pytest.skip(f"this link has no {what}")


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for what no event tells; fails when it does not come."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)
