"""Clusters that never were: random lives of jobs and hosts, run through a scheduler by a clock of
their own, with everything that must hold checked at every tick.

`run(world, scheduler)` raises Broken at the first thing that does not hold. Time is counted in
halves of seconds, so that sums are exact.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Sequence

from manyhands.cluster.job import Place, Priority
from manyhands.cluster.schedule import Decisions, Entry, Host, decide

Scheduler = Callable[..., Decisions]
MAX_TICKS = 20_000


class Broken(AssertionError):
    """Something that must hold does not."""


def must(holds: bool, what: str, *facts: object) -> None:
    if not holds:
        raise Broken(": ".join([what, *map(str, facts)]))


@dataclasses.dataclass
class Job:
    """A job, what will become of it, and where it is. `runs_s` is nobody's to know."""

    id: int
    slots: int
    priority: Priority
    arrives_s: float
    limit_s: float | None
    grace_s: float
    runs_s: float
    stops_s: float  # from SIGTERM to its last process; at most its grace
    cancelled_s: float = math.inf
    state: str = "new"  # then waiting, running, over
    places: tuple[Place, ...] = ()
    started_s: float | None = None
    ending_s: float | None = None
    into: str = "over"
    preemptions: int = 0
    starts: int = 0

    def entry(self) -> Entry:
        ending = self.ending_s is not None
        return Entry(
            self.id,
            self.slots,
            self.priority,
            self.arrives_s,
            self.limit_s,
            self.grace_s,
            self.places,
            self.started_s,
            ending,
            self.ending_s,
        )

    def next_s(self) -> float:
        """When something happens to it by itself."""
        if self.state == "new":
            return self.arrives_s
        if self.state == "over":
            return math.inf
        if self.state == "waiting" or self.started_s is None:
            return self.cancelled_s
        if self.ending_s is not None:
            return self.ending_s + self.stops_s
        limit_s = math.inf if self.limit_s is None else self.limit_s
        return min(self.started_s + min(self.runs_s, limit_s), self.cancelled_s)

    def happen(self, now_s: float) -> None:
        """Let that be."""
        if self.state == "new":
            self.state = "waiting"
        elif self.state == "waiting":
            self.state, self.cancelled_s = "over", math.inf
        elif self.ending_s is not None:
            self.leave(self.into)
        elif self.cancelled_s <= now_s:
            self.cancelled_s = math.inf
            self.end(now_s, "over")
        elif self.started_s is not None and self.started_s + self.runs_s <= now_s:
            self.leave("over")
        else:
            self.end(now_s, "over")

    def end(self, now_s: float, into: str) -> None:
        self.ending_s, self.into = now_s, into

    def leave(self, into: str) -> None:
        self.state, self.places, self.started_s, self.ending_s = into, (), None, None


@dataclasses.dataclass
class World:
    """Hosts and jobs at one moment."""

    hosts: dict[str, Host]
    jobs: dict[int, Job]
    outages: list[tuple[float, str, bool]]
    """(when, which host, whether it is there afterwards), in order of time."""
    down: set[str] = dataclasses.field(default_factory=set)
    now_s: float = 0.0

    def copied(self) -> World:
        jobs = {id_: copy.copy(job) for id_, job in self.jobs.items()}
        return World(self.hosts, jobs, [*self.outages], {*self.down}, self.now_s)

    def next_s(self) -> float:
        first_s = self.outages[0][0] if self.outages else math.inf
        return min([first_s, *(job.next_s() for job in self.jobs.values())])

    def go_on(self, to_s: float) -> None:
        self.now_s = to_s
        while self.outages and self.outages[0][0] <= to_s:
            _, name, is_there = self.outages.pop(0)
            (self.down.discard if is_there else self.down.add)(name)
            for job in self.held_by(name) if not is_there else ():
                if job.ending_s is None:
                    job.end(to_s, "waiting")
        for job in self.jobs.values():
            while job.next_s() <= to_s:
                job.happen(to_s)

    def held_by(self, name: str) -> Iterator[Job]:
        return (job for job in self.jobs.values() if any(p.host == name for p in job.places))

    def here(self) -> list[Host]:
        return [host for name, host in self.hosts.items() if name not in self.down]

    def entries(self) -> list[Entry]:
        live = (job for job in self.jobs.values() if job.state in ("waiting", "running"))
        return [job.entry() for job in live]

    def line(self) -> list[Job]:
        """Who waits and could run on the hosts that are there, by right of way."""
        total = sum(len(host.slots) for host in self.here())
        waiting = (j for j in self.jobs.values() if j.state == "waiting" and j.slots <= total)
        return sorted(waiting, key=lambda job: (-job.priority.rank, job.arrives_s, job.id))

    def free(self) -> dict[str, set[int]]:
        free = {host.name: set(host.slots) for host in self.here()}
        for job in self.jobs.values():
            for place in job.places:
                if place.host in free:
                    must(place.slots and free[place.host] >= set(place.slots), "a slot twice", job)
                    free[place.host] -= set(place.slots)
        return free

    def held(self, job: Job) -> int:
        names = {host.name for host in self.here()}
        return sum(len(place.slots) for place in job.places if place.host in names)

    def lower(self, first: Job) -> list[Job]:
        """Who has slots that are there, and a lower priority."""
        rank = first.priority.rank
        return [j for j in self.jobs.values() if j.priority.rank < rank and self.held(j)]

    def room(self, first: Job) -> tuple[int, int]:
        """(free slots, slots of jobs that are ending, and surely gone as soon as any lower one)"""
        free = sum(map(len, self.free().values()))
        soon_s = self.now_s + max((job.grace_s for job in self.lower(first)), default=0.0)
        ending = (
            self.held(job)
            for job in self.jobs.values()
            if job.ending_s is not None and job.ending_s + job.grace_s <= soon_s
        )
        return free, sum(ending)

    def gone_by(self, first: Job, by_s: float) -> int:
        """Slots of those that it cannot tell to end, and that are surely gone by then."""
        slots = 0
        for job in self.jobs.values():
            ends_s = math.inf if job.ending_s is None else job.ending_s
            if job.ending_s is not None or job.priority.rank >= first.priority.rank:
                if job.limit_s is not None and job.started_s is not None:
                    ends_s = min(ends_s, job.started_s + job.limit_s)
                slots += self.held(job) if ends_s + job.grace_s <= by_s else 0
        return slots

    def start(self, job: Job, places: tuple[Place, ...]) -> None:
        job.state, job.places, job.started_s = "running", places, self.now_s
        job.starts += 1


def apply(world: World, decisions: Decisions) -> None:
    """Do what was decided, and check each piece on its own."""
    for victim, whom in decisions.preempt:
        job, other = world.jobs[victim], world.jobs[whom]
        must(job.state == "running" and job.ending_s is None, "preempts who does not run", job)
        must(job.priority.rank < other.priority.rank, "preempts no lower one", job, other)
        must(other.state == "waiting" and world.held(job) > 0, "preempts for nothing", job, other)
        job.end(world.now_s, "waiting")
        job.preemptions += 1
    for id_, places in decisions.place:
        job, free = world.jobs[id_], world.free()
        must(job.state == "waiting", "starts who does not wait", job)
        names = [place.host for place in places]
        must(len(set(names)) == len(names), "one host in two places", places)
        for place in places:
            must(len(set(place.slots)) == len(place.slots) > 0, "a slot twice", places)
            must(free.get(place.host, set()) >= set(place.slots), "takes what is not free", places)
        must(sum(len(p.slots) for p in places) == job.slots, "not the whole gang", job, places)
        most = sorted(map(len, free.values()), reverse=True)
        must(sum(most[: len(names) - 1]) < job.slots, "not the fewest hosts", places, free)
        world.start(job, places)
    waiting = {job.id for job in world.jobs.values() if job.state == "waiting"}
    must(set(decisions.waits) == waiting, "not a reason for each", decisions.waits, waiting)
    must(all(decisions.waits.values()), "an empty reason", decisions.waits)


def check_preemptions(before: World, decisions: Decisions) -> None:
    """In front of a head, no victim more than it takes, for all who wait for room together: what
    is soon enough for the first of them is so for the others, too.
    """
    if not decisions.preempt or decisions.promise is not None:
        return
    started = {id_ for id_, _ in decisions.place}
    ahead = [
        job for job in before.line() if job.id in started or "ending" in decisions.waits[job.id]
    ]
    room = sum(before.room(next(job for job in ahead if job.id not in started)))
    for job in ahead:
        sizes = [before.held(before.jobs[v]) for v, whom in decisions.preempt if whom == job.id]
        needed = job.slots - room
        must(not sizes or needed > 0, "preempts though room is coming", decisions)
        must(sum(sizes) - min(sizes, default=0) < max(1, needed), "preempts too many", decisions)
        room += sum(sizes) - job.slots


def check_order(world: World, decisions: Decisions) -> None:
    """After the decisions: whoever is first got all it may have."""
    line = world.line()
    if not line:
        return
    first = line[0]
    free, ending = world.room(first)
    must(first.slots > free, "the first waits though it fits", first, free)
    lower = sum(world.held(job) for job in world.lower(first) if job.ending_s is None)
    can = free + ending < first.slots <= free + ending + lower
    must(not can, "lower ones run on while the first waits", first, free, ending, lower)
    promise = decisions.promise
    if promise is None or any(job.ending_s is not None for job in world.jobs.values()):
        return
    left_s = promise.by_s - world.now_s
    graces = [job.grace_s for job in world.lower(first)]
    for job in line[1:]:
        if job.slots <= free and job.priority.rank < first.priority.rank:
            longest_s = max([job.grace_s, *graces])
            lazy = longest_s < left_s if left_s < math.inf else longest_s == 0.0
            must(not lazy, "slots stay empty that a lower one could fill", job, promise)


def check_left_over(world: World, decisions: Decisions) -> None:
    """What the head leaves at the promised time, though nobody else were told, is used at once."""
    promise = decisions.promise
    if promise is None or promise.by_s == math.inf:
        return
    first, *others = world.line()
    if any("ending" in decisions.waits[job.id] for job in others):
        return  # free slots are held for these
    free = sum(map(len, world.free().values()))
    left = free + world.gone_by(first, promise.by_s) - first.slots
    longest_s = max((job.grace_s for job in world.lower(first)), default=-1.0)
    for job in others:
        lower = job.priority.rank < first.priority.rank
        could = job.slots <= min(free, left) and not (lower and job.grace_s > longest_s)
        must(not could, "nobody uses what the head leaves", job, promise, left)


def start_of(head: int, world: World, scheduler: Scheduler) -> float:
    """When the head starts if nobody else comes and nobody is put in front of it from now on."""
    world.jobs = {
        j.id: j for j in world.jobs.values() if j.id == head or j.state in ("waiting", "running")
    }
    world.outages = []
    for _ in range(MAX_TICKS):
        entries, hosts = world.entries(), world.here()
        # Those behind the head cannot matter, since nobody is put in front of it.
        entries = [one for one in entries if one.places or one.id == head]
        decisions = scheduler(world.now_s, hosts, entries, backfill=False)
        for victim, _ in decisions.preempt:
            world.jobs[victim].end(world.now_s, "over")
        if any(id_ == head for id_, _ in decisions.place):
            return world.now_s
        next_s = min(world.next_s(), decisions.again_s)
        if next_s == math.inf:
            return math.inf
        world.go_on(next_s)
    raise Broken(f"no end of ticks for job {head}")


def check_head(before: World, after: World, decisions: Decisions, draw: random.Random) -> None:
    """Who was put in front of the head does not delay it: it starts as soon as if nobody had been,
    if all others use all their time, and (if no end is known) in any other course of things too.
    """
    line = after.line()
    if not line:
        return
    head = line[0]
    ahead = {j.id for j in before.line() if _right_of_way(j) < _right_of_way(head)}
    filled = {id_ for id_, _ in decisions.place if id_ not in ahead}
    made_room = {v for v, whom in decisions.preempt if whom not in ahead | {head.id}}
    if not filled and not made_room:
        return
    without = after.copied()
    for id_ in filled:
        without.jobs[id_].leave("waiting")
    for id_ in made_room:
        without.jobs[id_].ending_s = None
    endless = _start_if(head.id, without, {}), _start_if(head.id, after, {})
    must(endless[1] <= endless[0], "backfill delays the head", endless, head, decisions)
    for _ in range(2) if endless[0] == math.inf else ():
        runs = {id_: after.now_s + draw.randint(1, 20) / 2 for id_ in after.jobs}
        starts = _start_if(head.id, without, runs), _start_if(head.id, after, runs)
        must(starts[1] <= starts[0], "backfill delays the head", starts, head)


def _right_of_way(job: Job) -> tuple[int, float, int]:
    return -job.priority.rank, job.arrives_s, job.id


def _start_if(head: int, world: World, until_s: dict[int, float]) -> float:
    """When the head starts, if the others end then. Always asked of the true scheduler: it is the
    yardstick.
    """
    return start_of(head, slow(world, until_s), decide)


def slow(world: World, until_s: dict[int, float]) -> World:
    """A copy in which each job that runs ends by itself then (or never), and dies slowly."""
    world = world.copied()
    for job in world.jobs.values():
        job.stops_s, job.into, job.cancelled_s = job.grace_s, "over", math.inf
        job.runs_s = until_s.get(job.id, math.inf) - (job.started_s or 0.0)
    return world


def check_use(after: World, decisions: Decisions, scheduler: Scheduler) -> None:
    """For whom others were told to end, starts when they are gone, if nothing else happens."""
    if not decisions.preempt:
        return
    world = slow(after, {})
    gone_s = max(j.ending_s + j.grace_s for j in world.jobs.values() if j.ending_s is not None)
    if decisions.promise is not None and decisions.promise.by_s < math.inf:
        gone_s = max(gone_s, decisions.promise.by_s)  # the last of its room comes then
    world.outages = []
    world.jobs = {j.id: j for j in world.jobs.values() if j.state in ("waiting", "running")}
    ends = (j.next_s() for j in world.jobs.values() if j.places and j.ending_s is None)
    if min(ends, default=math.inf) <= gone_s:
        return
    whom = {job for _, job in decisions.preempt}
    again_s = decisions.again_s
    while (next_s := min(world.next_s(), again_s)) <= gone_s:
        world.go_on(next_s)
        later = scheduler(world.now_s, world.here(), world.entries())
        apply(world, later)
        again_s = later.again_s
    left = [job for job in whom if world.jobs[job].state == "waiting"]
    must(not left, "preempts in vain", left, decisions)


def check_overtaken(before: World, decisions: Decisions) -> None:
    """Nobody starts in front of one that is first and wants no more of anything."""
    started = {id_ for id_, _ in decisions.place}
    line = before.line()
    for at, later in enumerate(line):
        for first in line[:at] if later.id in started else ():
            less = (
                first.id not in started
                and first.priority == later.priority
                and first.slots <= later.slots
                and first.grace_s <= later.grace_s
                and (first.limit_s or math.inf) <= (later.limit_s or math.inf)
            )
            must(not less, "overtaken for nothing", first, later)


class Promises:
    """The promises that were made, and whether they are kept."""

    def __init__(self) -> None:
        self._made: tuple[int, float, list[Host]] | None = None

    def check(self, before: World, after: World, decisions: Decisions) -> None:
        if self._made is not None:
            head, by_s, hosts = self._made
            line = [job.id for job in before.line()]
            if hosts != before.here() or line[:1] != [head]:
                self._made = None  # it is gone, or somebody came in front of it, or a host went
            else:
                self._check_kept(after.jobs[head], by_s, after)
        if decisions.promise is None:
            return
        head, by_s = decisions.promise
        must(after.line()[0].id == head, "a promise to another", head)
        if self._made is not None:
            must(by_s <= self._made[1], "a promise moves", head, by_s, self._made)
        self._made = head, by_s, before.here()

    def _check_kept(self, head: Job, by_s: float, after: World) -> None:
        must(after.now_s <= by_s, "a promise is broken", head, by_s, after.now_s)
        if head.state != "waiting":
            self._made = None


def run(world: World, scheduler: Scheduler = decide, *, seed: int = 0) -> World:
    """Run a trace to its end. Takes the world over. Raises Broken."""
    draw, promises, num_outages = random.Random(seed), Promises(), len(world.outages)
    too_large = {
        job.id
        for job in world.jobs.values()
        if job.slots > sum(len(host.slots) for host in world.hosts.values())
    }
    decisions = Decisions()
    for _ in range(MAX_TICKS):
        next_s = min(world.next_s(), decisions.again_s)
        if next_s == math.inf:
            break
        world.go_on(next_s)
        before, decisions = world.copied(), asked(scheduler, world, draw)
        apply(world, decisions)
        check_preemptions(before, decisions)
        check_order(world, decisions)
        check_left_over(world, decisions)
        check_overtaken(before, decisions)
        check_head(before, world, decisions, draw)
        check_use(world, decisions, scheduler)
        promises.check(before, world, decisions)
        again = scheduler(world.now_s, world.here(), world.entries())
        must(not again.place and not again.preempt, "it changes its mind", decisions, again)
    else:
        raise Broken("no end of ticks")
    disturbed = len(world.jobs) + num_outages
    for job in world.jobs.values():
        higher = (j.starts for j in world.jobs.values() if j.priority.rank > job.priority.rank)
        must(job.preemptions <= sum(higher) + disturbed, "preempted again and again", job)
    left = {job.id for job in world.jobs.values() if job.state != "over"}
    must(left <= too_large, "jobs are left", left - too_large)
    return world


def asked(scheduler: Scheduler, world: World, draw: random.Random) -> Decisions:
    """What it decides, which must not hang on the order of what it is told."""
    hosts, entries = world.here(), world.entries()
    decisions = scheduler(world.now_s, hosts, entries)
    draw.shuffle(hosts)
    draw.shuffle(entries)
    must(decisions == scheduler(world.now_s, hosts, entries), "the order of arguments matters")
    return decisions


def halves(draw: random.Random, low: float, high: float) -> float:
    return draw.randint(round(2 * low), round(2 * high)) / 2


def random_world(seed: int) -> World:
    """A small cluster with more work than room, and a life of jobs and hosts to come."""
    draw = random.Random(seed)
    sizes = [draw.randint(1, 4) for _ in range(draw.randint(1, 4))]
    hosts = {f"h{n}": Host(f"h{n}", tuple(range(size))) for n, size in enumerate(sizes)}
    total, busy_s = sum(sizes), draw.choice([4.0, 12.0, 30.0])
    limited = draw.choice([0.0, 0.5, 0.8, 1.0])
    weights = draw.choice([(1, 1, 1), (0, 1, 1), (0, 1, 0), (1, 2, 4)])
    jobs: dict[int, Job] = {}
    for id_ in range(1, draw.randint(4, 12)):
        grace_s = draw.choice([0.0, 0.5, 2.0, 5.0])
        arrives_s = halves(draw, 0, busy_s)
        jobs[id_] = Job(
            id=id_,
            slots=draw.randint(1, total if draw.random() < 0.5 else (total + 1) // 2),
            priority=draw.choices(list(Priority), weights)[0],
            arrives_s=arrives_s,
            limit_s=halves(draw, 1, 12) if draw.random() < limited else None,
            grace_s=grace_s,
            runs_s=halves(draw, 0.5, 10),
            stops_s=min(grace_s, halves(draw, 0, 5)),
            cancelled_s=arrives_s + halves(draw, 0, 12) if draw.random() < 0.1 else math.inf,
        )
    if draw.random() < 0.1:
        jobs[1].slots = total + 1
    if seed % 4 == 3:  # what fills a cluster: jobs with a limit, and best-effort ones without
        for job in jobs.values():
            filler = job.id % 2 == 1
            job.priority = Priority.BEST_EFFORT if filler else Priority.NORMAL
            job.limit_s = None if filler else job.limit_s or halves(draw, 1, 12)
    return World(hosts, jobs, _outages(draw, list(hosts), busy_s))


def _outages(draw: random.Random, names: Sequence[str], busy_s: float) -> list:
    outages: list[tuple[float, str, bool]] = []
    for name in names:
        if draw.random() < 0.2:
            gone_s = halves(draw, 0, busy_s)
            outages += [(gone_s, name, False), (gone_s + halves(draw, 0.5, 10), name, True)]
    return sorted(outages)
