"""The arbiter's seat on a broker: taken by one peer of the run at a time.

All peers consume from the run's control queue, which the broker serves to a single one of them
(x-single-active-consumer): that one is the arbiter. When it goes, the broker hands the queue, and
the event that was not acknowledged yet, to the next. Order of events in a tenure:

    1. the first event arrives; a Fence goes to everybody, this peer included. Before it, the broker
       is asked whether the run has begun. If it has not, nobody can come back; and one that was cut
       off from a run it was in finds that this has ended without it
    2. the Fence comes back: every view of earlier arbiters has arrived before it. The run is marked
       as begun
    3. from the newest of these views on, events are decided and views published, all on the very
       channel the events come by; an event is acknowledged after the views it made are confirmed

Events say how things are rather than what changed, so one that comes twice changes nothing.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from typing import Protocol

from manyhands.core.errors import WireError
from manyhands.core.peers import NO_VIEW, PeerId, PeerState, View
from manyhands.links import arbiter
from manyhands.links.membership import Membership
from manyhands.links.messages import (
    BeatBack,
    Bye,
    Call,
    Dismissal,
    Fence,
    Gone,
    Header,
    Leaving,
    Lost,
    Missing,
    NewView,
    Ready,
    Resign,
    Terms,
    decode_head,
)
from manyhands.wire.frames import Limits

log = logging.getLogger(__name__)
_WORDS = Limits(header_bytes=4096, payload_bytes=0)
MAX_PEERS = 200  # a view of more, with the longest names, would not fit a header
_LATE_BEATS = 1.2  # after so many a peer is late
_KNOCKS_A_BEAT = 4


class ControlLine(Protocol):
    """What the seat needs of its channel. Called under the seat's lock."""

    def to_peer(self, incarnation: int, header: Header) -> None:
        """Send to one inbox; if it is gone, `Seat.bounced` will hear of it."""
        ...

    def to_all(self, header: Header) -> int:
        """Send to all inboxes; returns the tag of the broker's confirmation."""
        ...

    def ask_begun(self) -> None:
        """Ask whether the run was marked as begun; if not, `Seat.not_begun` will hear of it."""
        ...

    def acknowledge(self, delivery_tag: int) -> None:
        """The event has had its effect."""
        ...

    def give_up(self) -> None:
        """Let the broker offer the seat, and the event, to the next in line."""
        ...


class Seat:
    """Decides events while this peer is the arbiter. Thread-safe.

    `newest()` is the newest view in this peer's own inbox, `unsure()` whether that inbox was
    replaced since: then there may be newer ones, others may have been cut off too, and all have
    one lease to come back.
    """

    def __init__(
        self,
        line: ControlLine,
        me: PeerId,
        terms: Terms,
        *,
        newest: Callable[[], View],
        unsure: Callable[[], bool],
        dropped: Callable[[PeerId], None],
        run: str,
    ) -> None:
        self._line, self._me, self._terms = line, me, terms
        self._newest, self._unsure = newest, unsure
        self._dropped, self._run = dropped, run
        self._lock = threading.Lock()
        self._members: Membership | None = None
        self._fence: int | None = None
        self._pending: tuple[int, Call] | None = None
        self._unconfirmed: set[int] = set()  # tags of views
        self._to_ack: int | None = None
        self._knocked_s = self._fenced_s = 0.0
        self._own_end = threading.Event()
        self._gave_way = self._retired = False
        self._begun = True  # unless the broker says otherwise

    @property
    def taken(self) -> bool:
        """Whether this peer is the arbiter."""
        return self._members is not None

    def alone(self) -> bool:
        """Whether this peer is the arbiter of a run with nobody else in it."""
        members = self._members
        if members is None or members.collecting:
            return False
        return all(m.peer == self._me for m in members.view.roster)

    def await_own_end(self, timeout_s: float) -> None:
        """Wait until the arbiter, which may be this peer, has put this peer out."""
        self._own_end.wait(timeout_s)

    def put_out(self) -> None:
        """Another arbiter has put this peer out, or its link has failed."""
        if not self.taken:
            self._own_end.set()

    def retire(self) -> bool:
        """Decide nothing from now on; True if this peer is the last one of the run.

        Without that, an arbiter that is going could put the others out, and none of them would
        be the last.
        """
        with self._lock:
            self._retired = True
            return self.alone()

    def set_terms(self, terms: Terms) -> None:
        """The terms of the run, once a view has told them."""
        self._terms = terms

    # -- events ---------------------------------------------------------------------------------

    def on_call(self, delivery_tag: int, call: Call) -> None:
        """The broker gives this peer an event: it is, or now becomes, the arbiter."""
        with self._lock:
            if self._retired:
                return None  # the next arbiter gets it
            if self._members is not None:
                return self._decide(delivery_tag, call)
            self._pending = (delivery_tag, call)
            # One token for all copies: an inbox may be slower than the next copy comes.
            self._fence = secrets.randbits(60)
            self._begun = True
            # Whatever this peer knows now: its inbox may be replaced before the Fence is back.
            self._line.ask_begun()
            self._send_fence(time.monotonic())
        return None

    def _send_fence(self, now_s: float) -> None:
        assert self._fence is not None
        self._fenced_s = now_s
        self._line.to_all(Fence(self._fence))

    def not_begun(self) -> None:
        """No arbiter has ever taken the seat of this run."""
        with self._lock:
            self._begun = False

    def awaits(self, token: int) -> bool:
        """Whether that Fence is the one that this peer waits for."""
        return self._pending is not None and token == self._fence

    @property
    def forgotten(self) -> bool:
        """Whether the broker knows nothing of a run that this peer was in until it was cut off.

        Its last peer takes everything along. This one may have been put out long before.
        """
        return not self._begun and self._unsure() and self._newest().number != NO_VIEW

    def on_fence(self, token: int) -> None:
        """A Fence has come back through the inbox, and the run is marked as begun."""
        with self._lock:
            if self._retired or not self.awaits(token):
                return None
            assert self._pending is not None
            if not self._gave_way and self._begun and self._newest().number == NO_VIEW:
                # The run was there before this newcomer, which knows neither its views nor its
                # terms. The next in line may; if nobody is, the seat comes back.
                self._gave_way = True
                return self._line.give_up()
            self._take_seat()
            pending, self._pending = self._pending, None
            self._decide(*pending)
        return None

    def on_confirm(self, tag: int, *, multiple: bool) -> None:
        """The broker has what was published under this tag."""
        with self._lock:
            done = {t for t in self._unconfirmed if t == tag or (multiple and t <= tag)}
            self._unconfirmed -= done
            self._settle()

    def bounced(self, incarnation: int) -> None:
        """A message of the arbiter found no inbox."""
        with self._lock:
            if self._members is not None:
                self._members.leases.closed(incarnation, time.monotonic())

    def lose(self) -> None:
        """The channel is gone, and the seat with it."""
        with self._lock:
            self._members = self._pending = self._fence = self._to_ack = None
            self._unconfirmed.clear()

    def tick(self, now_s: float, *, may_judge: bool) -> None:
        """Judge leases, but only while this peer's own beats come back."""
        with self._lock:
            members = self._members
            if members is None:
                # It went into an inbox that was not there yet, or has been replaced since.
                if self._pending is not None and now_s - self._fenced_s > self._terms.beat_s:
                    self._send_fence(now_s)
                return None
            if not may_judge:
                return members.leases.restart(now_s)
            members.tick(now_s)
            if now_s - self._knocked_s >= self._terms.beat_s / _KNOCKS_A_BEAT:
                self._knocked_s = now_s
                # A dead peer's inbox goes with its connection: whoever is late is knocked at. Not
                # this peer: to itself that would look as if its own beats still came back.
                for incarnation in members.leases.silent(now_s - _LATE_BEATS * self._terms.beat_s):
                    if incarnation != self._me.incarnation:
                        self._line.to_peer(incarnation, BeatBack(0))
        return None

    # -- under the lock -------------------------------------------------------------------------

    def _take_seat(self) -> None:
        view, now_s = self._newest(), time.monotonic()
        if view.number == NO_VIEW:
            # Nothing is known of earlier eras; they were numbered by the clock too.
            view, collect = arbiter.first_view(time.time_ns() // 1_000_000), self._begun
        else:
            collect = self._unsure()
        if collect:
            why = "had peers that may come back"
            log.warning("waiting up to %g s: run %r %s", self._terms.lease_s, self._run, why)
        self._members = Membership(
            self._terms, view, now_s, publish=self._publish, drop=self._drop, collect=collect
        )
        for member in view.roster:
            self._members.leases.heard(member.peer.incarnation, now_s)

    def _decide(self, delivery_tag: int, call: Call) -> None:
        members = self._members
        assert members is not None
        word, before = _word_of(call), members.view.number
        if self._admit(members, call, word):
            self._attend(members, call, word)
            if call.view < before and call.peer in members and not members.collecting:
                # It may only be on its way; but an inbox that was replaced has missed it.
                self._line.to_peer(call.peer.incarnation, NewView(members.view, self._terms))
            self._line.to_peer(call.peer.incarnation, BeatBack(call.n))
        self._to_ack = delivery_tag
        self._settle()

    def _admit(self, members: Membership, call: Call, word: Header | None) -> bool:
        """Whether the peer takes part, now that it has called."""
        now_s = time.monotonic()
        if call.view != NO_VIEW:
            if members.collecting:
                if not members.come_back(call.peer, call.state, call.view, now_s):
                    return self._refuse(call.peer, f"another peer joined as {call.peer.name!r}")
            elif call.peer not in members:
                return self._refuse(call.peer, "it was away for longer than its lease")
        elif call.peer not in members:
            if isinstance(word, Bye):
                return False  # it gave up before it was in
            if len(members.view.roster) >= MAX_PEERS:
                return self._refuse(call.peer, f"the run is full, with {MAX_PEERS} peers")
            members.join(call.peer, now_s)
        members.leases.heard(call.peer.incarnation, now_s)
        return True

    def _refuse(self, peer: PeerId, reason: str) -> bool:
        self._line.to_peer(peer.incarnation, Dismissal(reason))
        return False

    def _attend(self, members: Membership, call: Call, word: Header | None) -> None:
        """What the call says, beyond that its sender is alive."""
        peer = call.peer
        if call.renewed_at is not None and members.view.cut <= call.renewed_at:
            members.word(peer, Lost(peer.incarnation))
        if call.wants is not PeerState.WATCHING and self._is(peer, PeerState.WATCHING):
            members.word(peer, Ready())
        if call.wants is PeerState.LEAVING and self._is(peer, PeerState.ACTIVE):
            members.word(peer, Leaving())
        if isinstance(word, Missing):
            members.leases.closed(word.peer, time.monotonic())
        elif word is not None:
            members.word(peer, word)

    def _is(self, peer: PeerId, state: PeerState) -> bool:
        assert self._members is not None
        member = self._members.view.member(peer.incarnation)
        return member is not None and member.state is state

    def _publish(self, view: View) -> None:
        self._unconfirmed.add(self._line.to_all(NewView(view, self._terms)))

    def _drop(self, peer: PeerId, reason: str) -> None:
        self._line.to_peer(peer.incarnation, Dismissal(reason))
        self._dropped(peer)

    def _settle(self) -> None:
        if self._to_ack is not None and not self._unconfirmed:
            self._line.acknowledge(self._to_ack)
            self._to_ack = None
            if self._members is not None and self._me not in self._members:
                self._own_end.set()


def _word_of(call: Call) -> Header | None:
    if not call.word:
        return None
    try:
        word, _ = decode_head(call.word, _WORDS)
    except WireError:
        return None  # the rest of the call stands, and nobody could make more of this
    return word if isinstance(word, Gone | Resign | Lost | Bye | Missing) else None
