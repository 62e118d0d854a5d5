"""The scheduler: which jobs start, which must end for them, and why the others wait.

A pure function of the hosts, the jobs and the time. It keeps nothing: what it decided before is
seen in the jobs (they run, or are `ending`).

    the line: high, normal, best-effort; then who was queued first
       fits into what is free            ─► placed
       fits with what ends soon, or what ─► its room is coming: it claims all that is free and
       lower ones could be made to give     what it needs of the rest; lower ones are told to end
       neither                           ─► it is the head: it gets a promise
    behind the head: only who does not break the promise

Slots are alike, so a job fits if there are as many as it wants. A job that wants more than all
hosts have is passed over: nothing that runs could end for it.

The promise
-----------
A job that runs is surely gone at started + limit + grace, one that is ending at ending + grace; one
without a limit never is. `by_s` is the first moment at which there is room for the head: what is
free or surely gone by then, and what lower ones hold. These are told the longest grace of any of
them before by_s, so that they are gone by then too. Behind the head a job that would start at s is
started, or gets room made for it, if

  limit   it is an equal, and s + limit + grace <= by_s: it is gone by then.
  spare   it is an equal, and takes no more slots than the head leaves of the room at by_s.
  lower   the head can preempt it, and s + the longest grace (of it, and of the other lower ones)
          < by_s: it is told in time. Or it starts at once, takes no more than what is left, as in
          `spare`, and one with a grace no shorter than its own is there already (see below).

Claim: while hosts stay, limits are kept and nobody comes in front of the head, by_s never moves to
a later time, and the head starts at by_s or before. Proof: what `limit` and `spare` let in leaves
as much room at by_s as the head wants, and what `lower` lets in is room itself, since there is time
for its grace; jobs that end early only add to it. So when the longest grace is left, there is
enough, and whoever has to go is told; then all that the head needs is surely gone by by_s. Lower
ones that start later have what it leaves, so nobody need be told for them. And by_s is the first
moment with room in any case, so it is also when the head would have started without backfill, if
every job used all its time. Hence backfill never delays the head: neither equals nor lower ones do.
A job in front of it that ends early may give room sooner than was promised; to that the head has no
right (the terms of EASY backfill).

If by_s is unknown (jobs without limits hold what the head needs), there is no time to tell anybody
before, and no course of things may find another in the head's way. So only these go first:

  spare   what is left over in the worst case: of all sets of jobs, lower ones among them, whose
          ends would make room for the head, the one that gives the least. So whoever ends or is
          told to, the head needs nothing of what these have.
  lower   those with a grace of 0, if all lower ones have that: they are gone when they are told.

And no lower one with a longer grace than those that are there: how long the head waits for others
who are ending before it tells lower ones hangs on the longest. Nor is anybody told to end for one
of these: to use its grace might take longer than to end by itself, at a time when the head has room
otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from manyhands.cluster.job import Place, Priority
from manyhands.cluster.room import Candidate, Floor, Victims, least_above, taken_from

RANK: Mapping[Priority, int] = {priority: priority.rank for priority in Priority}
RANKS = sorted(RANK.values())


class Host(NamedTuple):
    """A host that is there, with its usable slots, free or not."""

    name: str
    slots: tuple[int, ...]


class Entry(msgspec.Struct, frozen=True):
    """A job that waits (no places) or holds slots. `ending`: it was told to end at `ending_s`
    (None: not known, which may make a promise later from one tick to the next).
    """

    id: int
    slots: int
    priority: Priority
    queued_s: float
    """Its place in the line among its equals; keep it over preemptions and lost hosts."""
    limit_s: float | None
    """From `started_s`; at its end the job is told to end, and has its grace."""
    grace_s: float
    places: tuple[Place, ...] = ()
    started_s: float | None = None
    ending: bool = False
    ending_s: float | None = None

    @property
    def rank(self) -> int:
        """Of its priority."""
        return RANK[self.priority]


class Promise(NamedTuple):
    """What the first job in the line that has no room coming can count on."""

    job: int
    by_s: float
    """It starts then, or before. Infinite while jobs without a limit are in its way."""


class Decisions(msgspec.Struct, frozen=True):
    """What to do, in this order: tell `preempt` to end, start `place`, show `waits`."""

    place: tuple[tuple[int, tuple[Place, ...]], ...] = ()
    preempt: tuple[tuple[int, int], ...] = ()
    """(who ends, for whom)"""
    waits: Mapping[int, str] = {}
    """For every job that still waits: why."""
    promise: Promise | None = None
    again_s: float = math.inf
    """When to ask again, if nothing happens before: lower ones have to be told for the head."""


def decide(
    now_s: float, hosts: Sequence[Host], entries: Sequence[Entry], *, backfill: bool = True
) -> Decisions:
    """What to do now; to be asked after every change. Pure, total, and the same for any order of
    its arguments. Names of hosts and ids of jobs must be unique. Asked again when that was done and
    nothing else happened, it wants nothing more. Without `backfill` nobody is started behind the
    head.
    """
    return Tick(now_s, hosts, entries, backfill=backfill).decided()


class Running(NamedTuple):
    """A job that has slots, as far as room goes."""

    entry: Entry
    num_slots: int
    """Of hosts that are there: what comes free when it ends."""
    gone_s: float
    """When it is surely gone, if nobody tells it to end."""
    told: bool
    """Whether it has been told to end."""


class Tick:
    """One call of `decide`."""

    def __init__(
        self, now_s: float, hosts: Sequence[Host], entries: Sequence[Entry], *, backfill: bool
    ) -> None:
        self._now_s = now_s
        self._backfill = backfill
        usable = {host.name: set(host.slots) for host in hosts}
        self._total = sum(map(len, usable.values()))
        self._line = sorted(
            (one for one in entries if not one.places and not one.ending),
            key=lambda one: (-one.rank, one.queued_s, one.id),
        )
        self._running = {
            one.id: self._held(one, usable)
            for one in sorted(entries, key=lambda one: one.id)
            if one.places
        }
        for one in entries:
            for place in one.places:
                usable.get(place.host, set[int]()).difference_update(place.slots)
        self._floor = Floor({name: sorted(slots) for name, slots in usable.items()})
        self._free = self._floor.count
        """Free slots that nobody in front has claimed."""
        self._longest_s = [self._longest_below(rank) for rank in RANKS]
        """By rank: how long it may take until a job of it has what it can have others end for."""
        self._soon = [
            sum(self._given_soon(one, rank) for one in self._running.values()) for rank in RANKS
        ]
        """By rank: slots of those who were told, and are surely gone by then."""
        self._told = sum(one.num_slots for one in self._running.values() if one.told)
        """Of all who were told."""
        self._owed = 0
        """How many of these those in front have claimed."""
        self._jobs_end = any(one.told and one.entry.id > 0 for one in self._running.values())
        """Whether any job is ending; what has a number below 1 is none: see question.py."""
        self._told_by_s = max(
            (one.gone_s for one in self._running.values() if one.told), default=now_s
        )
        self._victims = [self._victims_of(rank) for rank in RANKS]
        self._head: Entry | None = None
        self._by_s = math.inf
        self._graces: set[float] = set()
        """Of those that the head can preempt, told or not."""
        self._is_telling = False
        """Whether the longest of these is left until by_s, or less."""
        self._spare: int | None = None
        """Slots that the head leaves; None: not yet counted."""
        self._first: int | None = None
        """The rank of the first who waits for room that is coming."""
        self._claimed = False
        """Whether somebody waits for room that is coming: all that is free is held for him."""
        self._place: list[tuple[int, tuple[Place, ...]]] = []
        self._preempt: list[tuple[int, int]] = []
        self._waits: dict[int, str] = {}

    # What there is

    def _held(self, entry: Entry, usable: Mapping[str, set[int]]) -> Running:
        num_slots = sum(
            len(usable[place.host].intersection(place.slots))
            for place in entry.places
            if place.host in usable
        )
        return Running(entry, num_slots, self._gone_s(entry), entry.ending)

    def _gone_s(self, entry: Entry) -> float:
        """When a job that holds slots is surely gone; at once, if that time is over."""
        ends_s = math.inf
        if entry.limit_s is not None and entry.started_s is not None:
            ends_s = entry.started_s + entry.limit_s
        if entry.ending:
            ends_s = min(ends_s, self._now_s if entry.ending_s is None else entry.ending_s)
        return max(self._now_s, ends_s + entry.grace_s)

    def _victims_of(self, rank: int) -> Victims:
        return Victims(
            self._candidate(one)
            for one in self._running.values()
            if not one.told and one.entry.rank == rank
        )

    def _candidate(self, one: Running) -> Candidate:
        entry = one.entry
        return Candidate(entry.started_s or 0.0, entry.id, one.num_slots, entry.grace_s)

    def _longest_below(self, rank: int) -> float:
        """The longest grace of lower ones, told or not. Hosts that are about to be ready count as
        well: nobody is told to end for what they bring.
        """
        graces = (
            one.entry.grace_s
            for one in self._running.values()
            if one.num_slots and (one.entry.rank < rank or one.entry.id < 1)
        )
        return max(graces, default=0.0)

    def _given_soon(self, one: Running, rank: int) -> int:
        """What comes of it within that time."""
        soon = one.told and one.gone_s <= self._now_s + self._longest_s[rank]
        return one.num_slots if soon else 0

    def _coming(self, rank: int) -> int:
        """What nobody in front has claimed of what comes, within that time, or within that of the
        first who waits for it: nobody behind him has slots before he has. Behind the head, where
        nobody is in a hurry, in whatever time it takes.
        """
        if self._head is not None:
            return self._told - self._owed
        return self._soon[rank if self._first is None else self._first] - self._owed

    def _lower(self, rank: int) -> list[Victims]:
        """Whom this rank may preempt: never its equals."""
        return self._victims[:rank]

    def _below(self, rank: int) -> int:
        """The slots that those have."""
        return sum(victims.count for victims in self._lower(rank))

    # The line

    def decided(self) -> Decisions:
        """Go through the line. Once only."""
        for entry in self._line:
            if entry.slots > self._total:
                have = f"the hosts have {self._total}" if self._total else "there are no hosts"
                self._waits[entry.id] = f"wants {_slots(entry.slots)}, {have}"
            elif self._head is not None:
                self._follow(entry)
            elif not self._begin(entry):
                self._promise(entry)
        promise = None
        if self._head is not None and not self._claimed:
            promise = Promise(self._head.id, self._by_s)
        again_s = math.inf
        if promise is not None and self._graces and not self._is_telling:
            again_s = self._tell_s(promise.by_s)
        place, preempt = tuple(self._place), tuple(self._preempt)
        return Decisions(place, preempt, self._waits, promise, again_s)

    def _begin(self, entry: Entry) -> bool:
        """Place it, or claim the room that comes for it. False: there is neither."""
        if entry.slots <= self._free:
            self._start(entry)
            return True
        needed = entry.slots - self._free - self._coming(entry.rank)
        if needed > self._below(entry.rank):
            return False
        self._make_room(needed, entry)
        # All that is free is held for it, even what it might not need if much comes at once:
        # who starts with the last of its slots must not wait for a second one to end.
        self._owed += entry.slots - self._free
        self._free = 0
        self._claimed = self._head is None
        if self._first is None:
            self._first = entry.rank
        coming = "hosts that have room for it are about to be ready"
        if self._jobs_end or self._preempt:
            coming = "jobs are ending to make room for it"
        self._waits[entry.id] = f"wants {_slots(entry.slots)}; {coming}"
        return True

    def _start(self, entry: Entry) -> None:
        places = self._floor.take(entry.slots)
        self._free -= entry.slots
        self._place.append((entry.id, places))
        self._waits.pop(entry.id, None)
        started = msgspec.structs.replace(entry, places=places, started_s=self._now_s)
        self._running[entry.id] = Running(started, entry.slots, self._gone_s(started), False)

    def _make_room(self, needed: int, whom: Entry) -> None:
        for victim in taken_from(self._lower(whom.rank), needed):
            self._tell(victim.id, whom)

    def _tell(self, job: int, whom: Entry) -> None:
        self._preempt.append((job, whom.id))
        one = self._running[job]
        self._told_by_s = max(self._told_by_s, self._now_s + one.entry.grace_s)
        gone_s = min(one.gone_s, self._now_s + one.entry.grace_s)
        self._running[job] = one = one._replace(told=True, gone_s=gone_s)
        self._told += one.num_slots
        for rank in RANKS:
            self._soon[rank] += self._given_soon(one, rank)

    # The head

    def _promise(self, entry: Entry) -> None:
        """Make it the head: the first moment with room for it, and what is left over then."""
        self._head = entry
        free = f"{self._free} of {self._total} are free"
        self._waits[entry.id] = f"is next: wants {_slots(entry.slots)}, {free}"
        if self._claimed:
            return  # nothing is free behind those in front, so there is nothing to give away
        lower = [one for one in self._running.values() if one.entry.rank < entry.rank]
        self._graces = {one.entry.grace_s for one in lower if one.num_slots}
        self._by_s, room = self._room_for(entry, lower_ones=True)
        if self._by_s == math.inf:
            self._waits[entry.id] += "; jobs without a time limit have the others"
            return
        self._is_telling = self._now_s >= self._tell_s(self._by_s)
        if self._is_telling:
            gone_s = max(self._by_s, self._now_s + max(self._graces, default=0.0))
            self._make_room(entry.slots - self._free - self._gone_by(entry, gone_s), entry)
            self._by_s, room = self._room_for(entry, lower_ones=False)
        self._spare = room - entry.slots

    def _tell_s(self, by_s: float) -> float:
        """When lower ones have to be told, for all of them to be gone by then."""
        return by_s - max(self._graces, default=0.0)

    def _room_for(self, head: Entry, *, lower_ones: bool) -> tuple[float, int]:
        """The first moment with room for it, and how much that is: with what lower ones hold that
        were not told, or without.
        """
        room, by_s = self._free, math.inf
        for gone_s, num_slots in sorted(
            (
                self._now_s if one.entry.rank < head.rank and not one.told else one.gone_s,
                one.num_slots,
            )
            for one in self._running.values()
            if lower_ones or one.told or one.entry.rank >= head.rank
        ):
            if room >= head.slots and gone_s > by_s:
                break
            room += num_slots
            by_s = gone_s
        return (by_s, room) if room >= head.slots else (math.inf, room)

    def _gone_by(self, head: Entry, by_s: float) -> int:
        """What is surely gone by then, of those that it cannot tell any more, or never could."""
        return sum(
            one.num_slots
            for one in self._running.values()
            if one.gone_s <= by_s and (one.told or one.entry.rank >= head.rank)
        )

    def _spare_slots(self, head: Entry) -> int:
        """What whoever stays may take, if nobody knows when: see above. Jobs that are ending are
        among those that may be gone first or last.
        """
        if self._spare is None:
            held = [one.num_slots for one in self._running.values()]
            least = least_above(held, head.slots - self._free)
            self._spare = 0 if least is None else self._free + least - head.slots
        return self._spare

    # Behind the head

    def _follow(self, entry: Entry) -> None:
        head = self._head
        assert head is not None
        starts_s = self._now_s
        if entry.slots > self._free:
            room = 0 if self._claimed else self._free + self._coming(entry.rank)
            if not self._claimed and self._by_s < math.inf:
                room += self._below(entry.rank)
            if entry.slots > room:
                self._waits[entry.id] = f"wants {_slots(entry.slots)}; others are first"
                return
            starts_s = self._room_by_s(entry)
        if self._backfill and self._may_follow(head, entry, starts_s):
            self._begin(entry)
        else:
            self._waits[entry.id] = f"wants {_slots(entry.slots)}; would delay job {head.id}"

    def _room_by_s(self, entry: Entry) -> float:
        """When room that has to be made for it is surely there."""
        if entry.slots <= self._free + self._coming(entry.rank):
            return self._told_by_s
        longest_s = max(victims.longest_s for victims in self._lower(entry.rank))
        return max(self._told_by_s, self._now_s + longest_s)

    def _may_follow(self, head: Entry, entry: Entry, starts_s: float) -> bool:
        """Whether it may start then, in front of the head. Counts what it takes of the spare."""
        if entry.rank < head.rank:
            may = self._may_fill(head, entry, starts_s)
            if may:
                self._graces.add(entry.grace_s)
            return may
        ends_s = math.inf if entry.limit_s is None else starts_s + entry.limit_s + entry.grace_s
        return ends_s <= self._by_s < math.inf or self._takes_spare(head, entry)

    def _may_fill(self, head: Entry, entry: Entry, starts_s: float) -> bool:
        """The same of one that the head can preempt."""
        longest_s = max(self._graces, default=entry.grace_s)
        waits = starts_s > self._now_s  # for others, whose grace may be the longest
        if self._by_s < math.inf:
            if not self._is_telling and starts_s + max(longest_s, entry.grace_s) < self._by_s:
                return True
            longer = not self._graces or entry.grace_s > longest_s
            return not waits and not longer and self._takes_spare(head, entry)
        if entry.grace_s > (min(self._graces, default=math.inf) if waits else longest_s):
            return False
        return longest_s == 0 or self._takes_spare(head, entry)

    def _takes_spare(self, head: Entry, entry: Entry) -> bool:
        spare = self._spare_slots(head)
        if entry.slots > spare:
            return False
        self._spare = spare - entry.slots
        return True


def _slots(count: int) -> str:
    return "1 slot" if count == 1 else f"{count} slots"
