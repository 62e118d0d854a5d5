"""Room: one run at a meeting point that we run ourselves (the hub, or this process).

It routes frames between the ports of its peers, asks the arbiter what membership events mean, and
publishes views. One lock makes a fan-out or a view enter all queues at one moment, so that every
peer sees them in the same order. The room has no thread: its owner calls `tick`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from manyhands.core.peers import Member, PeerId, PeerState, View, ViewNumber
from manyhands.links import arbiter
from manyhands.links.lease import LeaseBook
from manyhands.links.messages import (
    SCHEMA,
    Bye,
    Credit,
    Data,
    Gone,
    Header,
    Leaving,
    Lost,
    NewView,
    Ready,
    Resign,
    Return,
    Terms,
)


@dataclass(eq=False)
class Frame:
    """A frame at rest: header and payload; the encoded header is made once and shared."""

    header: Header
    payload: memoryview | None = None
    encoded: bytes | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of payload."""
        return 0 if self.payload is None else len(self.payload)

    def encode(self) -> bytes:
        """Prefix and header as bytes."""
        if self.encoded is None:
            self.encoded = SCHEMA.encode(self.header, self.num_bytes)
        return self.encoded


class Port(Protocol):
    """A peer's place in the room: its outgoing queue. Called under the room's lock."""

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

    def put(self, frame: Frame, *, droppable: bool = False) -> None:
        """Queue a frame. A droppable one may become a Gap when the queue is full."""
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
        self._view = view
        self._ports: dict[int, Port] = {}
        self._leases = LeaseBook(terms.lease_s, terms.grace_s)
        self._journal = journal
        # After a restart: who came back so far, until when we wait, and for whom.
        self._back: dict[int, Member] = {}
        self._back_until_s = now_s + terms.lease_s if restarted else None
        self._era = era or view.number.era

    @property
    def view(self) -> View:
        """The newest view."""
        return self._view

    @property
    def num_ports(self) -> int:
        """How many peers are here."""
        return len(self._ports)

    def join(self, port: Port, now_s: float, back: Return | None = None) -> str | None:
        """Take a peer in; returns why not, if it cannot be.

        `back` marks a peer that was in the run before: it is taken as what it was while a
        restarted meeting point collects returns, and is excluded at any other time.
        """
        with self._lock:
            if back is not None:
                if self._back_until_s is None:
                    return "it was away for longer than its lease"
                self._era = max(self._era, back.view.era + 1)
            self._ports[port.peer.incarnation] = port
            self._leases.heard(port.peer.incarnation, now_s)
            if self._back_until_s is not None:
                state = PeerState.WATCHING if back is None else back.state
                number = ViewNumber(self._era, 0)
                self._back[port.peer.incarnation] = Member(port.peer, state, number)
                self._collect(now_s)
            else:
                self._decide(arbiter.joined(self._view, port.peer), "another peer took its name")
        return None

    def post(self, sender: PeerId, frame: Frame) -> None:
        """Route a frame of a peer: data, credit, or a word to the arbiter."""
        header = frame.header
        with self._lock:
            if sender.incarnation not in self._ports:
                return  # excluded: what it still sends reaches nobody
            match header:
                case Data(to=None):
                    self._fan_out(sender, frame)
                case Data() | Credit():
                    port = self._ports.get(header.to or 0)
                    if port is not None:
                        port.put(frame)
                case _:
                    self._word(sender, header)

    def closed(self, port: Port, now_s: float) -> None:
        """The connection of this port has closed; only its grace is left."""
        with self._lock:
            if self._ports.get(port.peer.incarnation) is port:
                self._leases.closed(port.peer.incarnation, now_s)

    def lost(self, port: Port) -> None:
        """The queue of this port overflowed or is gone: its peer has missed messages."""
        with self._lock:
            if self._ports.get(port.peer.incarnation) is port:
                self._decide(arbiter.shaken(self._view, [port.peer]), "")

    def dismiss(self, peer: PeerId, reason: str) -> None:
        """Exclude a peer."""
        with self._lock:
            self._decide(arbiter.removed(self._view, [peer]), reason)

    def tick(self, now_s: float) -> None:
        """Judge leases; call it every `tick_s`."""
        with self._lock:
            self._collect(now_s)
            for incarnation, port in self._ports.items():
                self._leases.heard(incarnation, port.heard_s)
            expired = self._leases.expired(now_s)
            for incarnation, reason in expired.items():
                member = self._view.member(incarnation)
                if member is not None:
                    self._decide(arbiter.removed(self._view, [member.peer]), reason)
                elif incarnation in self._back:  # came back after a restart, and went again
                    del self._back[incarnation]
                    self._drop(incarnation, reason)

    @property
    def tick_s(self) -> float:
        """How often `tick` wants to be called."""
        return self._leases.tick_s

    def close(self, reason: str) -> None:
        """Dismiss everybody."""
        with self._lock:
            for incarnation in list(self._ports):
                self._drop(incarnation, reason)

    # -- under the lock -------------------------------------------------------------------------

    def _fan_out(self, sender: PeerId, frame: Frame) -> None:
        for member in self._view.roster:
            port = self._ports.get(member.peer.incarnation)
            if port is not None and member.peer != sender:
                port.put(frame, droppable=member.state is PeerState.WATCHING)

    def _word(self, peer: PeerId, word: Header) -> None:
        view = self._view
        match word:
            case Ready():
                # A Gap it has not seen yet: it would be active with a hole. It will start over.
                if word.gaps == self._ports[peer.incarnation].num_gaps:
                    self._decide(arbiter.ready(view, peer), "the run is over")
            case Leaving():
                self._decide(arbiter.leaving(view, peer), "")
            case Gone():
                self._decide(arbiter.gone(view, peer, word.cut), "it left")
            case Resign():
                after = arbiter.resigned(view, peer, finished=word.finished)
                self._decide(after, f"it resigned: {word.reason}")
            case Lost():
                self._decide(arbiter.shaken(view, [peer]), "")
            case Bye():
                self._back.pop(peer.incarnation, None)
                self._decide(arbiter.removed(view, [peer]), "it closed its link")
                self._drop(peer.incarnation, "it closed its link")
            case _:
                pass  # a frame that means nothing to a room

    def _collect(self, now_s: float) -> None:
        """While returns are collected: publish once all have come, or the lease has passed."""
        if self._back_until_s is None:
            return
        awaited = {m.peer.incarnation for m in self._view.roster} - set(self._back)
        if now_s < self._back_until_s and (awaited or not self._back):
            return
        self._back_until_s = None
        order = [m.peer.incarnation for m in self._view.roster]
        back = sorted(
            self._back.values(),
            key=lambda m: order.index(m.peer.incarnation) if m.peer.incarnation in order else 1e9,
        )
        self._back = {}
        self._decide(arbiter.returned(self._view, self._era, back), "it did not come back")

    def _decide(self, view: View, reason: str) -> None:
        """Make `view` the newest: publish it, drop whoever is not in it."""
        if view == self._view:
            return
        self._view = view
        self._journal(view)
        here = {m.peer.incarnation for m in view.roster}
        for incarnation in [i for i in self._ports if i not in here]:
            self._drop(incarnation, reason)
        frame = Frame(NewView(view))
        for incarnation in here:
            port = self._ports.get(incarnation)
            if port is not None:
                port.put(frame)

    def _drop(self, incarnation: int, reason: str) -> None:
        self._leases.forget(incarnation)
        port = self._ports.pop(incarnation, None)
        if port is not None:
            port.dismiss(reason)
