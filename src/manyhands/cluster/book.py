"""The book: all jobs that are not over, all hosts, and what follows from what is said of them.

    submit, cancel, leave   users ─┐
    hello, status           agents ┼─► facts ─► settle: each job's next steps ─► drain: to the store
    watch                   time ──┘
    ask ─► decide ─► adopt             placements, preemptions, why the rest waits
    refresh ─► tell                    what each agent hears

Pure: no I/O and no clock. What a job does next is a function of the job and of what its hosts hold
now, never of the order in which that was said; so every fact may come twice, or late, and a step
that could not be stored (`undo`) is found again by the next `watch`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import msgspec

from manyhands.cluster import part
from manyhands.cluster.errors import BadReport, HostTaken, KeyTaken, NoSuchJob, NotAHost
from manyhands.cluster.hosts import Host, Key, Node, check_hello, check_slots, check_status
from manyhands.cluster.job import (
    PLACED,
    Ending,
    Failure,
    IllegalStep,
    Job,
    Place,
    Spec,
    State,
    moved,
    noted,
)
from manyhands.cluster.jobs import Changes, HostRow, Jobs
from manyhands.cluster.messages import Hello, Status, Wants
from manyhands.cluster.question import is_free, question
from manyhands.cluster.schedule import Decisions, Entry
from manyhands.cluster.schedule import Host as Offer
from manyhands.cluster.submission import checked, checked_key
from manyhands.cluster.task import Hub, no_hub, want_of

MAX_HOSTS = 10_000

Decide = Callable[[float, Sequence[Offer], Sequence[Entry]], Decisions]


class Book:
    """See the module. Not thread-safe; times are seconds of one clock that does not go back."""

    def __init__(
        self,
        decide: Decide,
        *,
        now_s: float,
        lease_s: float,
        margin_s: float,
        jobs: Iterable[Job] = (),
        hosts: Iterable[HostRow] = (),
        next_id: int = 1,
        version: int = 0,
        hub: Hub = no_hub,
        terms: Mapping[str, str] | None = None,
        asked: Mapping[str, int | None] | None = None,
    ) -> None:
        self.decide = decide
        self.lease_s = lease_s
        self.margin_s = margin_s
        self.waits: Mapping[int, str] = {}
        self.is_leaving = False
        self.is_stale = True
        """Whether anything happened that the schedule should look at."""
        self.poisoned: dict[int, Exception] = {}
        """Jobs that cannot go on, and why: a bug of ours each."""
        self._asked_s = now_s
        self._promised_s = self._tell_s = math.inf
        self._again_s = math.inf
        self._hub, self._terms = hub, terms
        self._asked = asked
        self._version = version
        self._jobs = Jobs(jobs, next_id)
        self._hosts = {
            row.hello.host: Host(row.hello, now_s, row.lease_s, terms, inherited=set(row.inherited))
            for row in hosts
        }
        self._stirred: set[str] = set(self._hosts)
        self._hosts_before: dict[str, tuple[Host, Hello, float] | None] = {}

    # -- what is asked ---------------------------------------------------------------------------

    @property
    def live(self) -> Collection[Job]:
        """All jobs that are not over."""
        return self._jobs.live.values()

    @property
    def placed(self) -> Sequence[Job]:
        """All jobs that have slots."""
        return self._jobs.placed

    def job(self, id: int) -> Job | None:
        """A job that is not over, and why it waits, or whose end is yet to be stored; else None."""
        job = self._jobs.live.get(id) or self._jobs.changed.get(id)
        if job is None or job.state is not State.PENDING or job.id not in self.waits:
            return job
        return msgspec.structs.replace(job, reason=self.waits[job.id])

    def nodes(self) -> Sequence[Node]:
        """All hosts, by name."""
        return [
            host.node(self._jobs.busy(name), leaving=self.is_leaving)
            for name, host in sorted(self._hosts.items())
        ]

    def lingering(self) -> tuple[Sequence[int], Sequence[str]]:
        """Jobs that still have slots, and hosts that have not been told to leave."""
        hosts = [name for name, host in sorted(self._hosts.items()) if host.lingers]
        return [job.id for job in self.placed], hosts

    def next_due_s(self) -> float | None:
        """When there is something to do, if nothing happens before."""
        due = [self._until_s(host) for host in self._hosts.values() if host.silent_since_s is None]
        due += [at_s for name in self._hosts if (at_s := self._forget_s(name)) < math.inf]
        due += [
            job.started_s + job.spec.time_s
            for job in self.placed
            if job.ending is None and job.spec.time_s is not None and job.started_s is not None
        ]
        due += [due_s for due_s, name, _ in self._overdue() if not self._hosts[name].evicted]
        asked = (self._promised_s, self._tell_s, self._again_s)
        due += [at_s for at_s in asked if self._asked_s < at_s < math.inf]
        return min(due, default=None)

    # -- users -----------------------------------------------------------------------------------

    def submit(
        self, spec: Spec, key: str, now_s: float, *, known: Job | None = None
    ) -> tuple[Job, bool]:
        """A new job and True, or the one that has this key (`known`, if that is over) and False.

        Raises BadJob, Unplaceable, KeyTaken, QueueFull; nothing has changed then.
        """
        spec = checked(spec)
        if checked_key(key) and (known := self._jobs.by_key(key) or known) is not None:
            if known.spec != spec:
                raise KeyTaken(key, known.id)
            return self._jobs.changed.get(known.id, known), False
        check_slots(spec.gpus, self._hosts, self._asked)
        self._jobs.check_room(spec)
        job = Job(id=self._jobs.next_id, spec=spec, key=key, reason="submitted", submitted_s=now_s)
        self._jobs.next_id += 1
        return self._put(job, now_s), True

    def cancel(self, id: int, now_s: float) -> Job:
        """End it; what has ended first stays as it ended. Raises NoSuchJob if that is stored."""
        job = self._jobs.live.get(id) or self._jobs.changed.get(id)
        if job is None:
            raise NoSuchJob(id)
        if job.state is State.PENDING:
            return self._close(job, State.CANCELLED, "cancelled while it waited", now_s)
        if not job.is_over and (job.ending is None or job.ending.into is not State.CANCELLED):
            self._end(job, State.CANCELLED, "cancelled", now_s)
            self._settle(id, now_s)
        return self._jobs.changed.get(id, job)

    def leave(self, now_s: float) -> None:
        """The cluster goes down: nothing new is placed, and everything that runs is to end."""
        self.is_leaving = True
        self._stirred.update(self._hosts)
        self.watch(now_s)

    def forget_hosts(self) -> None:
        """All have left: who comes next is the cluster's hosts."""
        for name in list(self._hosts):
            self._forget(name)

    # -- agents ----------------------------------------------------------------------------------

    def hello(self, hello: Hello, now_s: float) -> None:
        """An agent comes, or comes back. Raises BadReport, HostTaken."""
        check_hello(hello)
        name, old = hello.host, self._hosts.get(hello.host)
        if old is None and len(self._hosts) >= MAX_HOSTS:
            raise BadReport(f"the cluster has {MAX_HOSTS} hosts, and takes no more")
        if old is not None and old.hello.agent == hello.agent:
            if old.evicted and old.silent_since_s is None:
                raise HostTaken(name, why=f"was given up: it {old.evicted}")
            if old.hello != hello or old.lease_s < self.lease_s:
                self._remember(name)
                old.hello, old.lease_s = hello, max(old.lease_s, self.lease_s)
            self._hear(old, now_s)
        else:
            host = Host(hello, now_s, self.lease_s, self._terms)
            host.check_terms()
            if old is not None and not self._is_left(old, hello, now_s):
                raise HostTaken(name)
            self._remember(name)
            self._hosts[name] = host
            if old is not None:
                # It has ended what an agent before it left; of some it may still know how.
                host.fresh = set(old.fresh)
                host.inherited = set(self._wanted(name)) - host.fresh
        self._stirred.add(name)
        # Others dial this host for rank 0: its address may be another now.
        self._stirred.update(place.host for job in self._jobs.on(name) for place in job.places)
        self.is_stale = True

    def status(self, name: str, status: Status, now_s: float) -> None:
        """An agent says all that it holds. Raises BadReport, NotAHost."""
        check_status(status)
        host = self._held_by(name, status.agent)
        self._hear(host, now_s)
        was_usable, ports, wanted = host.is_usable, host.ports(), self._wanted(name)
        changed = host.take(status, wanted)
        self.is_stale = self.is_stale or host.is_usable != was_usable or host.has_left
        has_new_port = host.ports() != ports
        for key in changed:  # most say what was said before: a gang's hosts are many
            job = wanted[key]
            if has_new_port and job.places[0].host == name:  # it is what all of them wait for
                self._stirred.update(place.host for place in job.places)
            self._settle(job.id, now_s)

    def host(self, name: str, agent: str, now_s: float) -> Host:
        """The host, which this agent holds and has just asked for. Raises NotAHost."""
        host = self._held_by(name, agent)
        was_usable = host.is_usable
        host.polled()
        self._hear(host, now_s)
        self.is_stale = self.is_stale or host.is_usable != was_usable
        return host

    def _hear(self, host: Host, now_s: float) -> None:
        before = (host.is_usable, host.silent_since_s is None)
        host.heard(now_s)
        self.is_stale = self.is_stale or before != (host.is_usable, True)

    def broke(self, name: str, agent: str) -> None:
        """The line to this agent has ended: another may come for its host, which is given nothing
        new before it is heard again.
        """
        host = self._hosts.get(name)
        if host is not None and host.hello.agent == agent:
            host.has_hung_up = True
            self.is_stale = self.is_stale or host.has_left

    def wants(self, name: str, agent: str) -> Wants:
        """What this agent is to hold, without telling it. Raises NotAHost."""
        return self._held_by(name, agent).wants

    def tell(self, name: str, seen: int | None = None) -> Wants:
        """What the agent is to hold; from now on it may act on it."""
        return self._hosts[name].tell(seen)

    def refresh(self) -> Collection[str]:
        """Work out what is wanted of the hosts that something changed for, when that is stored.

        Returns those of them that have something new to hear.
        """
        stirred = self._stirred | self._jobs.stirred
        self._stirred, self._jobs.stirred = set(), set()
        return [name for name in stirred if name in self._hosts and self._refresh(name)]

    # -- time, and the schedule ------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """`watch`, then everything that the schedule decides."""
        self.watch(now_s)
        self.adopt(self.decide(now_s, *self.ask(now_s)), now_s)

    def watch(self, now_s: float) -> None:
        """Find who has been silent for too long, and what has run for too long."""
        for name, host in list(self._hosts.items()):
            if now_s >= self._forget_s(name):
                self._forget(name)
            elif host.silent_since_s is None and now_s >= self._until_s(host):
                host.fall_silent(now_s)
                self.is_stale = True
        for due_s, name, why in self._overdue():
            if now_s >= due_s and not self._hosts[name].evicted:
                self._hosts[name].evict(why)
                self.is_stale = True
        for job in self.placed:
            if self.is_leaving and job.ending is None:
                self._end(job, State.PREEMPTED, "the cluster was taken down", now_s)
            elif job.ending is None and (name := self._outdated(job)):
                why = f"host {name} is to be another: `up` was started with other options"
                self._end(job, State.PREEMPTED, why, now_s)
            self._settle(job.id, now_s)

    def ask(self, now_s: float) -> tuple[Sequence[Offer], Sequence[Entry]]:
        """What the schedule is to decide on."""
        self.is_stale, self._asked_s = False, now_s
        asked = question(
            {} if self.is_leaving else self._hosts,
            self.live,
            self._jobs.busy,
            now_s=now_s,
            patience_s=self.lease_s + self.margin_s,
        )
        self._again_s = asked.again_s
        return asked.hosts, asked.entries

    def adopt(self, decisions: Decisions, now_s: float) -> None:
        """Do what was decided, as far as it still holds: things may have changed meanwhile."""
        for victim, winner in decisions.preempt:
            job, other = self._jobs.live.get(victim), self._jobs.live.get(winner)
            if other is None or other.state is not State.PENDING:
                continue  # it is over, or has found room: nobody has to end for it
            if job is not None and job.state in PLACED and job.ending is None:
                self._end(job, State.PREEMPTED, f"makes room for job {winner}", now_s)
                self._settle(victim, now_s)
        was_stale = self.is_stale
        for id, places in () if self.is_leaving else decisions.place:
            job = self._jobs.live.get(id)
            if job is None or job.state is not State.PENDING:
                continue
            if is_free(job, places, self._hosts, self._jobs.busy):
                self._place(job, places, now_s)
        self.waits = dict(decisions.waits)
        self._promised_s = math.inf if decisions.promise is None else decisions.promise.by_s
        self._tell_s = decisions.again_s
        self.is_stale = was_stale  # what the schedule placed is nothing new to it

    # -- changes ---------------------------------------------------------------------------------

    def drain(self) -> Changes:
        """All that changed since `keep` or `undo`, to be stored as one."""
        there = [(name, self._hosts.get(name)) for name in self._hosts_before]
        return Changes(
            jobs=tuple(self._jobs.changed.values()),
            steps=tuple(self._jobs.steps),
            hosts=tuple(host.row() for _, host in there if host is not None),
            gone=tuple(name for name, host in there if host is None),
        )

    def keep(self) -> None:
        """What was drained is stored."""
        self._jobs.keep()
        self._hosts_before = {}

    def undo(self) -> None:
        """What was drained could not be stored: nothing has changed."""
        self._jobs.undo()
        for name, before in self._hosts_before.items():
            if before is None:
                self._hosts.pop(name, None)
            else:
                host, host.hello, host.lease_s = before
                self._hosts[name] = host
            self._stirred.add(name)
        self._hosts_before = {}
        self.is_stale = True

    def _put(self, job: Job, now_s: float) -> Job:
        self.is_stale = True
        return self._jobs.put(job, now_s)

    def _remember(self, name: str) -> None:
        host = self._hosts.get(name)
        before = None if host is None else (host, host.hello, host.lease_s)
        self._hosts_before.setdefault(name, before)

    def _forget(self, name: str) -> None:
        if not self._jobs.on(name):
            self._remember(name)
            del self._hosts[name]

    # -- the life of a job -----------------------------------------------------------------------

    def _place(self, job: Job, places: tuple[Place, ...], now_s: float) -> None:
        # Every way back to PENDING counts in one of the two: no attempt has its number twice.
        attempt = job.node_failures + job.preemptions
        for place in places:
            self._hosts[place.host].fresh.add((job.id, attempt))
        reason = "placed on " + ", ".join(place.host for place in places)
        changes: dict[str, object] = {"attempt": attempt, "places": places, "started_s": now_s}
        self._put(moved(job, State.STARTING, reason, failure=None, **changes), now_s)

    def _end(
        self, job: Job, into: State, reason: str, now_s: float, failure: Failure | None = None
    ) -> None:
        """Ask all hosts to end it; it is `into` when the last process is gone."""
        for place in job.places if job.ending is None else ():
            if (host := self._hosts.get(place.host)) is not None:
                host.untold.add((job.id, job.attempt))
        since_s = now_s if job.ending is None else job.ending.since_s
        ending = Ending(into=into, reason=reason, since_s=since_s)
        self._put(noted(job, ending=ending, failure=failure or job.failure), now_s)

    def _settle(self, id: int, now_s: float) -> None:
        """Every step of a placed job that follows from what its hosts hold. A job that a bug of
        ours does not let go on is left alone, or it would take the others with it.
        """
        if id not in self.poisoned:
            try:
                self._settle_sound(id, now_s)
            except (IllegalStep, AssertionError) as error:
                self.poisoned[id] = error

    def _settle_sound(self, id: int, now_s: float) -> None:
        job = self._jobs.live.get(id)
        if job is None or job.state not in PLACED:
            return
        parts = self._parts(job)
        if job.state is State.STARTING and all(one.has_begun for one in parts):
            job = self._put(moved(job, State.RUNNING, "all ranks run"), now_s)
        verdict = part.verdict(job, parts, now_s)
        if verdict is not None:
            self._end(job, verdict.into, verdict.reason, now_s, verdict.failure)
            job = self._jobs.live[id]
            parts = self._parts(job)  # what nobody has been told of is gone at once
        if part.all_gone(parts):
            self._finish(job, parts, now_s)

    def _finish(self, job: Job, parts: Sequence[part.Part], now_s: float) -> None:
        """All its processes are gone."""
        ended_first = all(one.has_ended and one.is_untold for one in parts)
        ending, failure = job.ending, part.first_failure(parts) or job.failure
        if (ending is None or ended_first) and all(one.is_clean for one in parts):
            self._close(job, State.SUCCEEDED, "all ranks ended with exit code 0", now_s)
            return
        assert ending is not None, "what is gone without an end of its own was judged before"
        if ended_first and failure is not None and ending.into is not State.NODE_FAIL:
            self._close(job, State.FAILED, part.describe(failure), now_s, failure)
        elif ending.into is State.PREEMPTED:
            self._requeue(job, ending, now_s, preemptions=job.preemptions + 1)
        elif ending.into is State.NODE_FAIL:
            self._requeue(job, ending, now_s, node_failures=job.node_failures + 1)
        else:
            self._close(job, ending.into, ending.reason, now_s)

    def _requeue(self, job: Job, ending: Ending, now_s: float, **count: int) -> None:
        out: dict[str, object] = {"places": (), "ending": None, "started_s": None}
        job = self._put(moved(job, ending.into, ending.reason, **out, **count), now_s)
        most = job.spec.max_restarts
        if ending.into is State.NODE_FAIL and job.node_failures > most:
            self._close(job, State.FAILED, part.worn_out(ending.reason, most), now_s)
        else:
            self._put(moved(job, State.PENDING, f"to run again: {ending.reason}"), now_s)

    def _close(
        self, job: Job, into: State, reason: str, now_s: float, failure: Failure | None = None
    ) -> Job:
        failure = failure or job.failure
        end: dict[str, object] = {"ending": None, "ended_s": now_s, "failure": failure}
        code = part.exit_code(into, failure)
        return self._put(moved(job, into, reason, exit_code=code, **end), now_s)

    # -- slots, and what is wanted of hosts --------------------------------------------------------

    def _held_by(self, name: str, agent: str) -> Host:
        host = self._hosts.get(name)
        if host is None or host.hello.agent != agent or host.evicted:
            raise NotAHost(name)
        return host

    def _until_s(self, host: Host) -> float:
        """Until when its agent may have processes, if it is not heard again."""
        return host.heard_s + max(host.lease_s, self.lease_s) + self.margin_s

    def _forget_s(self, name: str) -> float:
        host = self._hosts[name]
        return math.inf if self._jobs.on(name) else host.forget_s(self._until_s(host))

    def _overdue(self) -> Iterator[tuple[float, str, str]]:
        """When a host is late, which, and with what: see part.overdue."""
        lease_s = self.lease_s + self.margin_s
        for job in self.placed:
            if job.ending is not None or job.state is State.STARTING:
                yield from part.overdue(job, self._parts(job), self._hosts, lease_s)

    def _is_left(self, host: Host, hello: Hello, now_s: float) -> bool:
        has_left = host.has_left and not self._jobs.on(host.name)
        return now_s >= self._until_s(host) or has_left or host.is_left_to(hello)

    def _outdated(self, job: Job) -> str:
        """A host of it whose agent is to leave, if there is one."""
        hosts = [self._hosts.get(place.host) for place in job.places]
        return next((host.name for host in hosts if host is not None and host.is_outdated), "")

    def _parts(self, job: Job) -> Sequence[part.Part]:
        return [part.part_of(job, place, self._hosts.get(place.host)) for place in job.places]

    def _wanted(self, name: str) -> dict[Key, Job]:
        return {(job.id, job.attempt): job for job in self._jobs.on(name)}

    def _refresh(self, name: str) -> bool:
        host, wanted = self._hosts[name], self._wanted(name)
        host.prune(wanted)
        wants = [
            want_of(job, host, self._hosts.get(job.places[0].host), self._hub)
            for key, job in wanted.items()
            if not host.never(key, job)
        ]
        self._version += 1
        # Before it is stored that its jobs are to end, an end of theirs would be their own.
        is_free = all(job.ending is not None for job in wanted.values())
        leave = is_free and (self.is_leaving or host.is_outdated)
        return host.want(tuple(wants), leave=leave, version=self._version)
