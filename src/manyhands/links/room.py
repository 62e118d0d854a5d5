"""Room: one run at a meeting point that we run ourselves (the hub, or this process).

It routes frames between the ports of its peers and publishes the views that its membership makes of
what happens. One lock makes a fan-out or a view enter all queues at one moment, so that every
peer sees them in the same order. The room has no thread: its owner calls `tick`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from manyhands.core.peers import PeerId, PeerState, View
from manyhands.links.membership import Membership
from manyhands.links.messages import (
    SCHEMA,
    Credit,
    Data,
    Header,
    NewView,
    Ready,
    Return,
    Terms,
)


@dataclass(eq=False)
class Frame:
    """A frame at rest: header and payload; the encoded header is made once and shared."""

    header: Header
    payload: memoryview | None = None
    encoded: bytes | None = None
    loan: object = None  # what the payload's memory is held by, if it is borrowed

    @property
    def num_bytes(self) -> int:
        """Bytes of payload."""
        return 0 if self.payload is None else len(self.payload)

    @property
    def cost(self) -> int:
        """Bytes it is counted as where memory is bounded: what links itself say is small."""
        return self.header.cost if isinstance(self.header, Data) else 0

    def encode(self) -> bytes:
        """Prefix and header as bytes."""
        if self.encoded is None:
            self.encoded = SCHEMA.encode(self.header, self.num_bytes)
        return self.encoded


class Port(Protocol):
    """A peer's place in the room: its outgoing queue. Called under the room's lock, but `push`."""

    @property
    def peer(self) -> PeerId:
        """Whose port it is."""
        ...

    @property
    def num_gaps(self) -> int:
        """How many Gap notices this port has queued."""
        ...

    @property
    def heard_s(self) -> float:
        """When the last byte of this peer arrived."""
        ...

    def put(self, frame: Frame, *, droppable: bool = False, pushed: bool = False) -> None:
        """Queue a frame. A droppable one may become a Gap when the queue is full.

        `pushed`: a `push` will follow, so nobody needs to be woken to send it.
        """
        ...

    def push(self) -> None:
        """Send what waits, as far as that can be done at once."""
        ...

    def dismiss(self, reason: str) -> None:
        """Tell the peer that it is out, then end."""
        ...


class Room:
    """See the module. All methods are thread-safe."""

    def __init__(
        self,
        terms: Terms,
        view: View,
        now_s: float,
        *,
        era: int | None = None,
        restarted: bool = False,
        journal: Callable[[View], None] = lambda view: None,
    ) -> None:
        self.terms = terms
        self._lock = threading.Lock()
        self._ports: dict[int, Port] = {}
        self._journal = journal
        self._members = Membership(
            terms, view, now_s, publish=self._publish, drop=self._drop, era=era, collect=restarted
        )

    @property
    def view(self) -> View:
        """The newest view."""
        return self._members.view

    @property
    def num_ports(self) -> int:
        """How many peers are here."""
        return len(self._ports)

    @property
    def tick_s(self) -> float:
        """How often `tick` wants to be called."""
        return self._members.leases.tick_s

    def join(self, port: Port, now_s: float, back: Return | None = None) -> str | None:
        """Take a peer in; returns why not, if it cannot be.

        `back` marks a peer that was in the run before: it is taken as what it was while a
        restarted meeting point collects returns, and is excluded at any other time.
        """
        peer = port.peer
        with self._lock:
            self._ports[peer.incarnation] = port
            if back is None:
                self._members.join(peer, now_s)
            elif not self._members.come_back(peer, back.state, back.view, now_s):
                del self._ports[peer.incarnation]
                return "it was away for longer than its lease"
        return None

    def post(self, sender: PeerId, frame: Frame) -> Sequence[Port]:
        """Route a frame of a peer: data, credit, or a word to the arbiter.

        Returns the ports that it has been put into, to be pushed.
        """
        header = frame.header
        with self._lock:
            port = self._ports.get(sender.incarnation)
            if port is None:
                return ()  # excluded: what it still sends reaches nobody
            match header:
                case Data(to=None):
                    return self._fan_out(sender, frame)
                case Data() | Credit():
                    to = self._ports.get(header.to or 0)
                    if to is not None:
                        to.put(frame, pushed=True)
                        return (to,)
                case Ready() if header.gaps != port.num_gaps:
                    pass  # a Gap it has not seen yet: it would be active with a hole
                case _:
                    self._members.word(sender, header)
        return ()

    def closed(self, port: Port, now_s: float) -> None:
        """The connection of this port has closed; only its grace is left."""
        with self._lock:
            if self._ports.get(port.peer.incarnation) is port:
                self._members.leases.closed(port.peer.incarnation, now_s)

    def dismiss(self, peer: PeerId, reason: str) -> None:
        """Exclude a peer."""
        with self._lock:
            self._members.remove(peer, reason)

    def tick(self, now_s: float) -> None:
        """Judge leases; call it every `tick_s`."""
        with self._lock:
            for incarnation, port in self._ports.items():
                self._members.leases.heard(incarnation, port.heard_s)
            self._members.tick(now_s)

    # -- under the lock -------------------------------------------------------------------------

    def _fan_out(self, sender: PeerId, frame: Frame) -> Sequence[Port]:
        ports: list[Port] = []
        for member in self._members.view.roster:
            port = self._ports.get(member.peer.incarnation)
            if port is not None and member.peer != sender:
                port.put(frame, droppable=member.state is PeerState.WATCHING, pushed=True)
                ports.append(port)
        return ports

    def _publish(self, view: View) -> None:
        self._journal(view)
        frame = Frame(NewView(view))
        for member in view.roster:
            port = self._ports.get(member.peer.incarnation)
            if port is not None:
                port.put(frame)

    def _drop(self, peer: PeerId, reason: str) -> None:
        port = self._ports.pop(peer.incarnation, None)
        if port is not None:
            port.dismiss(reason)
