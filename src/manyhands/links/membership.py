"""Membership: who takes part in a run, decided at its meeting point.

Events go in (joins, words, silence, restarts); views and exclusions come out through two callbacks.
What an event means is decided by `arbiter`, how long silence may last by `lease`; this is where
the two meet. No thread and no lock: its owner, a hub's room or the arbiter on a broker, has both.
"""

from __future__ import annotations

from collections.abc import Callable

from manyhands.core.peers import Member, PeerId, PeerState, View, ViewNumber
from manyhands.links import arbiter
from manyhands.links.lease import LeaseBook
from manyhands.links.messages import Bye, Gone, Header, Leaving, Lost, Ready, Resign, Terms

MAX_CUTS_A_MINUTE = 3  # that one peer may cause
_MINUTE_S = 60.0


class Membership:
    """`publish(view)` is called for every new view, after `drop(peer, reason)` for who is out."""

    def __init__(
        self,
        terms: Terms,
        view: View,
        now_s: float,
        *,
        publish: Callable[[View], None],
        drop: Callable[[PeerId, str], None],
        era: int | None = None,
        collect: bool = False,
    ) -> None:
        self.view = view
        self.leases = LeaseBook(terms.lease_s, terms.grace_s)
        self._publish, self._drop = publish, drop
        self._era = era or view.number.era
        # After a restart: who came back so far, and until when the others have time to.
        self._back: dict[int, Member] = {}
        self._unheard: list[tuple[PeerId, Header]] = []
        self._back_until_s = now_s + terms.lease_s if collect else None
        # A peer that keeps on breaking is a cut for everybody each time: by name, since it may
        # come as another incarnation.
        self._now_s = now_s
        self._cuts: dict[str, list[float]] = {}
        self._kept_out_until_s: dict[str, float] = {}
        self._not_yet: dict[PeerId, Ready] = {}

    @property
    def collecting(self) -> bool:
        """Whether it waits for peers to come back before it says anything."""
        return self._back_until_s is not None

    def __contains__(self, peer: PeerId) -> bool:
        return peer.incarnation in self._back or self.view.member(peer.incarnation) is not None

    def join(self, peer: PeerId, now_s: float) -> None:
        """A newcomer."""
        self._now_s = now_s
        self.leases.heard(peer.incarnation, now_s)
        if self.collecting:
            for namesake in self._namesakes(peer):
                self.remove(namesake, f"another peer joined as {peer.name!r}")
            self._collect_one(peer, PeerState.WATCHING, now_s)
        else:
            self.decide(arbiter.joined(self.view, peer), f"another peer joined as {peer.name!r}")

    def come_back(self, peer: PeerId, state: PeerState, seen: ViewNumber, now_s: float) -> bool:
        """A peer that was in the run before; False if it is too late for that."""
        if not self.collecting or self._namesakes(peer):
            return False
        self._era = max(self._era, seen.era + 1)
        self.leases.heard(peer.incarnation, now_s)
        self._collect_one(peer, state, now_s)
        return True

    def word(self, peer: PeerId, word: Header) -> None:
        """A peer of the run says something to the arbiter."""
        if self.collecting and not isinstance(word, Bye):
            if not isinstance(word, Lost):  # a cut is coming anyway
                self._unheard.append((peer, word))
            return
        view = self.view
        match word:
            case Ready() if self._kept_out_until_s.get(peer.name, 0.0) > self._now_s:
                self._not_yet[peer] = word
            case Ready():
                self.decide(arbiter.ready(view, peer), "the run is over")
            case Leaving():
                self.decide(arbiter.leaving(view, peer))
            case Gone():
                self.decide(arbiter.gone(view, peer, word.cut), "it left")
            case Resign():
                after = arbiter.resigned(view, peer, finished=word.finished)
                self.decide(after, f"it resigned: {word.reason}")
            case Lost():
                self._break(peer)
            case Bye():
                self.remove(peer, "it closed its link")
            case _:
                pass  # a frame that means nothing to an arbiter

    def remove(self, peer: PeerId, reason: str) -> None:
        """Exclude a peer."""
        if self.collecting:
            if self._back.pop(peer.incarnation, None):
                self._out(peer, reason)
        else:
            self.decide(arbiter.removed(self.view, [peer]), reason)

    def tick(self, now_s: float) -> None:
        """Judge leases and returns; call it every `leases.tick_s`."""
        self._now_s = now_s
        if self._back_until_s is not None and now_s >= self._back_until_s:
            self._end_collecting()
        for incarnation, reason in self.leases.expired(now_s).items():
            member = self._back.get(incarnation) or self.view.member(incarnation)
            if member is not None:
                self.remove(member.peer, reason)
            self.leases.forget(incarnation)
        for peer, word in list(self._not_yet.items()):
            if self._kept_out_until_s[peer.name] <= now_s:
                del self._not_yet[peer]
                self.word(peer, word)

    def decide(self, view: View, reason: str = "") -> None:
        """Make `view` the newest one: `reason` is what those who are not in it are told."""
        if view == self.view:
            return
        old, self.view = self.view, view
        for member in old.roster:
            if view.member(member.peer.incarnation) is None:
                self._out(member.peer, reason)
        self._publish(view)

    def _out(self, peer: PeerId, reason: str) -> None:
        self.leases.forget(peer.incarnation)
        self._drop(peer, reason)

    def _break(self, peer: PeerId) -> None:
        """Messages for this peer are lost: a cut, or the end of everybody's patience."""
        recent = [at for at in self._cuts.get(peer.name, ()) if self._now_s - at < _MINUTE_S]
        self._cuts[peer.name] = [*recent, self._now_s]
        if len(recent) < MAX_CUTS_A_MINUTE:
            self.decide(arbiter.shaken(self.view, [peer]))
        else:
            self._kept_out_until_s[peer.name] = self._now_s + _MINUTE_S
            self.remove(
                peer,
                f"it lost messages more than {MAX_CUTS_A_MINUTE} times in a minute; "
                "it may watch, and become active in a minute",
            )

    def _namesakes(self, peer: PeerId) -> list[PeerId]:
        """Other incarnations of this name that have come (back) so far."""
        others = [m.peer for m in self._back.values() if m.peer != peer]
        return [other for other in others if other.name == peer.name]

    def _collect_one(self, peer: PeerId, state: PeerState, now_s: float) -> None:
        self._back[peer.incarnation] = Member(peer, state, ViewNumber(self._era, 0))
        awaited = [m for m in self.view.roster if m.peer.incarnation not in self._back]
        # Without a memory of who was here there is nobody whose return could end the wait.
        if self.view.roster and not awaited:
            self._end_collecting()

    def _end_collecting(self) -> None:
        self._back_until_s = None
        order = [m.peer.incarnation for m in self.view.roster]
        known = sorted((i for i in self._back if i in order), key=order.index)
        new = [i for i in self._back if i not in order]
        members = [self._back[i] for i in (*known, *new)]
        self._back = {}
        if members or self.view.roster:
            self.decide(arbiter.returned(self.view, self._era, members), "it did not come back")
        unheard, self._unheard = self._unheard, []
        for peer, word in unheard:
            if peer in self:
                self.word(peer, word)
