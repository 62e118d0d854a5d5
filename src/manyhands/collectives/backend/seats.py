"""Seats: who has which rank. The first peer of the roster decides, once it has heard from all.

A peer that was given a rank is named after it, so that a restarted rank takes the place of its
predecessor at once. The others get what is left, in order of joining. The number of members must
be known to at least one of them.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from manyhands.collectives.backend import messages as words
from manyhands.collectives.backend.failure import name_ranks
from manyhands.core.errors import LinkTimeout, PeerGone, Refused, UsageError, WireError
from manyhands.core.peers import PeerId, PeerState, View
from manyhands.links.base import Delivery, Link
from manyhands.links.messages import Ready

log = logging.getLogger(__name__)
_HINT = "all of a group give one world_size and ranks of their own; another group, another run"
_REPORT_S = 5.0  # how often a peer says for whom it waits
_SHOWN = 4  # of sizes that differ
_REFUSAL_S = 1.0  # how long a refusal waits for those who have yet to come
_LOOK_S = 0.25  # how often it is asked whether the meeting is called off: no link tells of it


@dataclass(frozen=True, slots=True)
class Seating:
    """The members in rank order, as the newest view that this peer knows shows them."""

    roster: tuple[PeerId, ...]
    view: View


def assign(order: Sequence[int], hellos: Mapping[int, words.Hello]) -> tuple[int, ...] | str | None:
    """Ranks for the peers of `order` (incarnations, in order of joining).

    Returns the members in rank order, what is wrong, or None while some have yet to come.
    """
    here = [peer for peer in order if peer in hellos]
    worlds = {hellos[peer].world for peer in here} - {None}
    if len(worlds) > 1:
        return f"the peers disagree on world_size: {_who_says_what(hellos[p] for p in here)}"
    if not worlds:
        return None
    (world,) = worlds
    assert world is not None
    seats: dict[int, int] = {}
    for peer in here:
        rank = hellos[peer].rank
        if rank is None:
            continue
        if rank >= world:
            return f"rank {rank} was given, but world_size is {world}: ranks count from 0"
        if rank in seats:
            return f"rank {rank} was given to two peers"
        seats[rank] = peer
    free = (rank for rank in range(world) if rank not in seats)
    for peer in here:
        if hellos[peer].rank is None and len(seats) < world:
            seats[next(free)] = peer
    if len(seats) < world:
        return None
    return tuple(seats[rank] for rank in range(world))


def _who_says_what(hellos: Iterable[words.Hello]) -> str:
    """One peer for each size is enough: the text must fit a message."""
    said: dict[int, str] = {}
    for hello in hellos:
        if hello.world is not None and hello.world not in said:
            said[hello.world] = "one without rank" if hello.rank is None else f"rank {hello.rank}"
    return ", ".join(f"{who} says {world}" for world, who in list(said.items())[:_SHOWN])


def name_of(rank: int | None) -> str | None:
    """The name of a peer that was given this rank."""
    return None if rank is None else f"rank-{rank}"


def rank_of(name: str) -> int | None:
    """The rank that a peer of this name was given, if any."""
    number = name.removeprefix("rank-")
    return int(number) if number.isdecimal() and name_of(int(number)) == name else None


@dataclass
class _Table:
    """What this peer has heard so far."""

    link: Link
    mine: words.Hello
    view: View | None = None
    lead: PeerId | None = None
    told_cut: object = None
    hellos: dict[int, words.Hello] = field(default_factory=dict[int, words.Hello])
    refusal_s: float = math.inf  # when to say what is wrong, come who may

    def see(self, view: View) -> None:
        self.view = view
        active = view.peers(PeerState.ACTIVE)
        if self.link.me not in active:
            return
        lead = active[0]
        # A cut may have lost what was said: say it again.
        if lead != self.lead or view.cut != self.told_cut:
            self.lead, self.told_cut = lead, view.cut
            if lead == self.link.me:
                self.hellos[lead.incarnation] = self.mine
            else:
                try:
                    self.link.send(lead, words.encode(self.mine))
                except PeerGone:
                    self.lead = None  # the next view names another

    def decide(self) -> tuple[int, ...] | str | None:
        if self.view is None or self.lead != self.link.me:
            return None
        order = [peer.incarnation for peer in self.view.peers(PeerState.ACTIVE)]
        return assign(order, self.hellos)

    def has_to_wait(self, now_s: float) -> bool:
        """Something is wrong: whether to wait for more peers before it is said.

        Those who come after it was said, and whoever knew has gone, wait for them in vain.
        """
        worlds = [hello.world for hello in self.hellos.values() if hello.world is not None]
        if worlds and len(self.hellos) >= min(worlds):
            return False
        if self.refusal_s == math.inf:
            self.refusal_s = now_s + _REFUSAL_S
        return now_s < self.refusal_s

    @property
    def world(self) -> int | None:
        """The size of the group, as far as this peer has heard of it."""
        if self.mine.world is not None:
            return self.mine.world
        return next((h.world for h in self.hellos.values() if h.world is not None), None)

    def missing(self) -> str:
        """Who is waited for: as the leader has heard, as the others see by names."""
        if self.lead is not None and self.lead == self.link.me:
            ranks = [hello.rank for hello in self.hellos.values()]
        else:
            here = self.view.peers(PeerState.ACTIVE) if self.view is not None else ()
            ranks = [rank_of(peer.name) for peer in here]
        world = self.world
        if world is None:
            return "peer that knows world_size"
        absent = [rank for rank in range(world) if rank not in ranks]
        if absent and None not in ranks:
            return name_ranks(absent)
        if len(ranks) < world:
            return f"further peer ({len(ranks)} of {world} are here)"
        return f"word from {self.lead or 'the first peer'}, which seats the members"


def take_seat(
    link: Link,
    rank: int | None,
    world: int | None,
    timeout_s: float,
    *,
    where: str,
    called_off: Callable[[], str | None] | None = None,
) -> Seating:
    """Meet the others. Raises Refused (and why), LinkTimeout naming who is missing, LinkError.

    `where`: the run and its meeting point, in words. `called_off` says why nobody needs to wait any
    more, or None: then all who are here are refused with that reason.
    """
    # Here: the others take what does not fit a message for no word of this run.
    if world is not None and not 1 <= world <= words.MAX_WORLD:
        hint = f"how many processes the group has: 1 to {words.MAX_WORLD}"
        raise UsageError(f"a world_size of {world}", hint=hint)
    size = words.MAX_WORLD if world is None else world
    if rank is not None and not 0 <= rank < size:
        raise UsageError(
            f"rank {rank} of a world of {world or 'any size'}",
            hint=f"ranks count from 0 to {size - 1}; without one the meeting point gives it out",
        )
    table = _Table(link, words.Hello(rank, world))
    link.tell(Ready())
    deadline = time.monotonic() + timeout_s
    report_s = time.monotonic() + _REPORT_S
    while True:
        now_s = time.monotonic()
        if now_s > deadline:
            hint = "are all started, with this meeting point and run?"
            if not table.world:
                hint += " at least one of them must give world_size"
            raise LinkTimeout(f"{table.missing()} in {where}", timeout_s, hint=hint)
        if now_s > report_s:
            report_s = now_s + _REPORT_S
            left_s = deadline - now_s
            log.warning("%s: waiting for %s, %.0f s more", where, table.missing(), left_s)
        members: tuple[int, ...] | None = None
        look_s = math.inf if called_off is None else now_s + _LOOK_S
        try:
            event = link.receive(min(deadline, report_s, table.refusal_s, look_s) - now_s + 0.01)
        except LinkTimeout:
            event = None
        match event:
            case View():
                table.see(event)
            case Delivery():
                members = _heard(table, event)
            case _:
                pass
        decided = table.decide()
        if not isinstance(decided, tuple) and members is None and called_off is not None:
            decided = called_off() or decided
        if isinstance(decided, str):
            if table.has_to_wait(time.monotonic()):
                continue
            link.send(None, words.encode(words.Refusal(decided)))
            link.flush(5.0)
            raise Refused("seats", decided, hint=_HINT)
        table.refusal_s = math.inf  # or whoever was wrong has gone
        if decided is not None:
            link.send(None, words.encode(words.Seats(decided)))
            members = decided
        if members is not None:
            return _seated(table, members)


def _heard(table: _Table, delivery: Delivery) -> tuple[int, ...] | None:
    try:
        word = words.decode(delivery.message)
    except WireError:
        return None  # another kind of run; the seats will not be filled, and the error says so
    match word:
        case words.Hello():
            table.hellos[delivery.sender.incarnation] = word
        case words.Seats() if delivery.sender == table.lead:
            return word.members
        case words.Refusal():
            raise Refused("seats", word.reason, hint=_HINT)
        case _:
            pass
    return None


def _seated(table: _Table, members: tuple[int, ...]) -> Seating:
    assert table.view is not None
    names = {m.peer.incarnation: m.peer for m in table.view.roster}
    if table.link.me.incarnation not in members:
        raise Refused("seats", f"all {len(members)} ranks are taken", hint=_HINT)
    if any(member not in names for member in members):
        raise Refused("seats", "a member left while the ranks were given out")
    return Seating(tuple(names[member] for member in members), table.view)
