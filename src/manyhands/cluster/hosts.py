"""Hosts: what the coordinator knows of each, and what it believes of what their agents say.

An agent may be wrong, old, or not ours. What it says about its own host is taken as far as it makes
sense; it can say nothing about another host's part of a job. Nothing here has a clock.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import inf, isfinite

import msgspec

from manyhands.cluster.errors import BadReport, Unplaceable
from manyhands.cluster.job import MAX_SLOTS, NAME, Job
from manyhands.cluster.jobs import HostRow
from manyhands.cluster.messages import (
    PROTOCOL,
    Hello,
    Holding,
    Origin,
    Phase,
    Slot,
    Status,
    Want,
    Wants,
)

FORGET_S = 3600.0
"""A host that has been silent for so long is not one of the cluster's any more."""
GONE_S = 30.0
"""So long after its last word, an agent that was told to leave, and has nothing more, has gone: it
would have asked again. While it is there it may have logs to send. Longer than a question waits.
"""
MAX_HOLDINGS = 4 * MAX_SLOTS
MAX_TEXT = 256
MAX_DEVICE = 4096  # the cores of a share need not be adjacent: 0,2,4,...
MAX_WORDS = 8192
_ORDER = {Phase.READY: 0, Phase.RUNNING: 1, Phase.ENDED: 2}

NOTHING = Wants(version=0)
Key = tuple[int, int]
"""A job and its attempt."""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A host, as users see it."""

    name: str
    address: str
    state: str
    """here; silent (beyond its lease); expected (known from before, not heard yet); clearing (it
    still has processes of an attempt that is over); resting (it could not begin something just
    now, or is about to leave); gone (it has left, and its lease is not over yet); stuck (it talks,
    and does not do what it is asked to: it is given up); leaving (the cluster goes down, or its
    agent has other options than are asked for now)."""
    slots: tuple[Slot, ...]
    origin: Origin
    heard_s: float
    """When its agent was last heard, in seconds of the epoch."""
    busy: dict[str, int] = {}
    """Index of a slot, as text -> the job that has it."""
    version: str = ""


@dataclass(eq=False)
class Host:
    """One host, as one agent holds it. Changed only by the book.

    The sets hold what is certain: an attempt that is in none of them may have been given out.
    """

    hello: Hello
    heard_s: float
    lease_s: float
    """The longest that this agent was ever promised: it may count by this one."""
    terms: Mapping[str, str] | None = None
    """Of the agents that are asked for, by host: see Hello. None: any will do."""
    held: dict[Key, Holding] = field(default_factory=dict[Key, Holding])
    """The newest that its agent said of each attempt that is wanted here."""
    inherited: set[Key] = field(default_factory=set[Key])
    """Attempts that were given to an agent before this one: if it does not hold them, nobody
    does."""
    fresh: set[Key] = field(default_factory=set[Key])
    """Attempts that no agent has been told of yet."""
    untold: set[Key] = field(default_factory=set[Key])
    """Attempts that are to stop, of which no agent has been told so yet."""
    has_reported: bool = False
    """Whether this agent has said what it holds since it came (back)."""
    number: int = 0
    """Of the newest Status of its agent."""
    has_debris: bool = False
    """Whether it holds processes of an attempt that nobody wants."""
    rests: bool = False
    """Whether its agent says that it can begin nothing."""
    has_polled: bool = False
    """Whether its agent has asked what is wanted, and waits for the answer."""
    has_hung_up: bool = False
    """Whether the line on which it asked has ended, and it has not asked on another."""
    silent_since_s: float | None = None
    is_dismissed: bool = False
    """Whether its agent has been told to leave."""
    evicted: str = ""
    """Why its agent, which talks, is not listened to any more until its lease is over."""
    unready_s: float | None = None
    """Since when it could not be given anything, as far as the schedule was asked."""
    is_deaf: bool = False
    """Whether it was given up, and its agent has not asked what is wanted since."""
    since_s: float = 0.0
    """Since when it has been there: its agent came, or was heard after a silence."""
    wants: Wants = NOTHING

    def __post_init__(self) -> None:
        self.since_s = self.heard_s

    @property
    def name(self) -> str:
        """Of the host, in this cluster."""
        return self.hello.host

    @property
    def is_outdated(self) -> bool:
        """Whether its agent is to leave: an `up` before this one started it, with other options
        than are asked for now, or for a host that is not.
        """
        if self.terms is None or self.hello.origin is Origin.USER:
            return False
        return self.terms.get(self.name) != self.hello.terms

    def check_terms(self) -> None:
        """For one that is new here, and so has nothing to report: it need not be let in to be sent
        away. Raises BadReport.
        """
        if self.is_outdated:
            raise BadReport(
                f"host {self.name}: this agent is of an earlier `up`, which had other options",
                hint="it leaves by itself; the `up` that runs now starts its own",
            )

    def is_left_to(self, hello: Hello) -> bool:
        """Whether nothing of what its agent was given runs any more, now that this one comes.

        One of the same folder has ended all of it. Another may be on another machine that has the
        same name.
        """
        is_same_folder = hello.folder != "" and hello.folder == self.hello.folder
        return is_same_folder and (self.is_broken or self.evicted != "")

    @property
    def has_left(self) -> bool:
        """Whether its agent, which was told to leave, has nothing more and has gone, or will."""
        return (
            self.is_outdated
            and self.is_dismissed
            and self.has_reported
            and self.rests
            and not self.has_debris
            and self.is_broken
        )

    def forget_s(self, until_s: float) -> float:
        """From when on it is none of the cluster's, if no job is on it and it is not heard again;
        `until_s`: the end of its lease.
        """
        if self.has_left:
            return 0.0 if self.has_hung_up else min(until_s, self.heard_s + GONE_S)
        return inf if self.silent_since_s is None else self.silent_since_s + FORGET_S

    @property
    def is_usable(self) -> bool:
        """Whether it may be given something new."""
        return (
            self.has_reported
            and not self.is_outdated
            and not self.has_debris
            and not self.rests
            and not self.has_hung_up
            and not self.is_deaf
            and self.silent_since_s is None
        )

    def state(self, *, leaving: bool) -> str:
        """In one word, for people: see Node."""
        if self.silent_since_s is not None:
            return "silent"
        if self.evicted:
            return "stuck"
        if leaving or self.is_outdated:
            return "leaving"
        if not self.has_reported:
            return "expected"
        if self.has_debris:
            return "clearing"
        if self.rests:  # an agent that leaves says so, and then hangs up
            return "gone" if self.has_hung_up else "resting"
        return "here"

    @property
    def is_broken(self) -> bool:
        """Whether the line to its agent is known to have ended, or has never been there."""
        return self.has_hung_up or not self.has_polled

    @property
    def lingers(self) -> bool:
        """Whether it has still to be told to leave. A user's agent that has hung up need not be:
        it is gone, or stays and dials anyway.
        """
        is_off = self.is_broken and self.hello.origin is Origin.USER
        return self.silent_since_s is None and not self.is_dismissed and not is_off

    def ports(self) -> dict[Key, int]:
        """Where rank 0 of each attempt is to listen, if that is here."""
        return {key: held.port for key, held in self.held.items()}

    def row(self) -> HostRow:
        """What has to outlive the coordinator."""
        return HostRow(
            hello=self.hello, inherited=tuple(sorted(self.inherited)), lease_s=self.lease_s
        )

    def node(self, busy: Mapping[int, int], *, leaving: bool) -> Node:
        """As users see it; `busy` says which job has which slot."""
        return Node(
            name=self.name,
            address=self.hello.address,
            state=self.state(leaving=leaving),
            slots=self.hello.slots,
            origin=self.hello.origin,
            heard_s=self.heard_s,
            busy={str(slot): id for slot, id in sorted(busy.items())},
            version=self.hello.version,
        )

    def heard(self, now_s: float) -> None:
        """Its agent has spoken."""
        self.heard_s = max(self.heard_s, now_s)
        if self.silent_since_s is not None:
            self.since_s, self.silent_since_s = now_s, None
            self.evicted, self.unready_s = "", None

    def polled(self) -> None:
        """Its agent asks what is wanted, and waits for the answer."""
        self.has_polled, self.has_hung_up, self.is_deaf = True, False, False

    def fall_silent(self, now_s: float) -> None:
        """Its lease is over: what it holds is over too, and what it says next is all we know."""
        self.silent_since_s = now_s
        self.has_reported = self.has_polled = self.has_hung_up = False

    def evict(self, why: str) -> None:
        """Listen to its agent no more: then its lease ends, and with that what it runs."""
        self.evicted = why
        self.has_reported = False
        self.is_deaf = True

    def prune(self, wanted: Mapping[Key, Job]) -> None:
        """Forget every attempt but these."""
        self.held = {key: held for key, held in self.held.items() if key in wanted}
        for keys in (self.inherited, self.fresh, self.untold):
            keys.intersection_update(wanted)

    def never(self, key: Key, job: Job) -> bool:
        """Whether its agent need never hear of this attempt: it is to end, and has not begun."""
        return job.ending is not None and key in self.fresh

    def stops(self, key: Key, job: Job) -> bool:
        """Whether its agent is to end this attempt. One that an agent before it was given is never
        begun by this one, whatever it knows of it.
        """
        return job.ending is not None or key in self.inherited

    def take(self, status: Status, wanted: Mapping[Key, Job]) -> Collection[Key]:
        """Believe what the agent says it holds, as far as it is wanted. Returns the attempts of
        which something is known that was not: all, if it is its first word. Raises BadReport, and
        believes nothing, if something that is wanted makes no sense.

        Messages may overtake each other: an attempt never goes backwards, and one that the agent
        has had does not vanish while it is wanted.
        """
        if 0 < status.number < self.number:
            return ()
        told: dict[Key, Holding] = {}
        for holding in status.holdings:
            key = (holding.job, holding.attempt)
            if (job := wanted.get(key)) is not None:
                told[key] = sane(holding, job, self.name)
        self.number = status.number
        before = dict(self.held) if self.has_reported else {}
        changed = set[Key]() if self.has_reported else set(wanted)
        self.has_reported = True
        self.rests = status.rests
        self.has_debris = any(
            holding.phase is not Phase.ENDED and (holding.job, holding.attempt) not in wanted
            for holding in status.holdings
        )
        for key, believed in told.items():
            self.fresh.discard(key)
            self.held[key] = newer(self.held.get(key), believed)
            if self.held[key] != before.get(key):
                changed.add(key)
        return sorted(changed)

    def tell(self, seen: int | None = None) -> Wants:
        """What to answer its agent; from here on it may have heard it. If that is another than it
        has seen, it is answered now, and there is no line before it asks again.
        """
        self.has_polled = self.has_polled and seen in (None, self.wants.version)
        for want in self.wants.wants:
            key = (want.job, want.attempt)
            self.fresh.discard(key)
            held = self.held.get(key)
            if want.stop and (held is None or held.phase is not Phase.ENDED):
                self.untold.discard(key)
        self.is_dismissed = self.is_dismissed or self.wants.leave
        return self.wants

    def want(self, wants: tuple[Want, ...], *, leave: bool, version: int) -> bool:
        """Set what is wanted of it; returns whether that is something new."""
        if wants == self.wants.wants and leave == self.wants.leave and self.wants.version:
            return False
        self.wants = Wants(version=version, wants=wants, leave=leave)
        return True


def ranks_of(job: Job, host: str) -> range:
    """The ranks that run on this host."""
    first = 0
    for place in job.places:
        if place.host == host:
            return range(first, first + len(place.slots))
        first += len(place.slots)
    return range(0)


def sane(holding: Holding, job: Job, host: str) -> Holding:
    """What an agent says of its part of a job, cut to size. Raises BadReport if it cannot be."""
    ranks, failure = ranks_of(job, host), holding.failure
    ended = [end.rank for end in holding.ended]
    if (
        len(set(ended)) != len(ended)
        or any(rank not in ranks for rank in ended)
        or any(not 0 <= end.exit_code <= 255 or not isfinite(end.at_s) for end in holding.ended)
        or (failure is not None and failure.rank not in ranks)
        or (failure is not None and not 1 <= failure.exit_code <= 255)
        or not 0 <= holding.port <= 65535
    ):
        raise BadReport(
            f"what host {host} says of job {job.id} cannot be: it has ranks {ranks.start} to "
            f"{ranks.stop - 1} of it, exit codes are from 0 to 255",
            hint="install the same version of manyhands on both machines",
        )
    if failure is not None:
        words = _writable(failure.words[-MAX_WORDS:])
        failure = msgspec.structs.replace(failure, host=host, words=words)
    lost = _writable(holding.lost[:MAX_TEXT])
    return msgspec.structs.replace(holding, failure=failure, lost=lost)


def _writable(text: str) -> str:
    """What an agent says may contain halves of characters, which cannot be stored."""
    return text.encode(errors="replace").decode()


def newer(old: Holding | None, new: Holding) -> Holding:
    """Of two things that one agent said of one attempt, the one that it said last."""
    if old is None:
        return new
    if old.phase is Phase.ENDED:
        return old
    return new if _progress(new) >= _progress(old) else old


def _progress(holding: Holding) -> tuple[int, bool, int]:
    return _ORDER[holding.phase], holding.failure is not None, len(holding.ended)


def check_hello(hello: Hello) -> None:
    """Raises BadReport, and says what is wrong with it."""
    if hello.protocol != PROTOCOL:
        raise BadReport(
            f"the agent speaks version {hello.protocol} of the protocol, and we {PROTOCOL}",
            hint="install the same version of manyhands on both machines",
        )
    for what, name in (
        ("host", hello.host),
        ("agent", hello.agent),
        ("folder", hello.folder or "none"),
    ):
        if re.fullmatch(NAME, name) is None:
            raise BadReport(
                f"{name[:80]!r} cannot be the name of {'an' if what == 'agent' else 'a'} {what}",
                hint="at most 64 letters, digits, '.', '_' and '-'; the first a letter or a digit",
            )
    if re.fullmatch(r"[A-Za-z0-9:._%-]{1,255}", hello.address) is None:
        raise BadReport(f"{hello.address[:80]!r} is not an address")
    indexes = [slot.index for slot in hello.slots]
    if indexes != list(range(len(indexes))) or len(indexes) > MAX_SLOTS:
        raise BadReport(f"slots have to be numbered from 0, and at most {MAX_SLOTS}")
    texts = [hello.version, hello.terms, *(slot.name for slot in hello.slots)]
    devices = [slot.device for slot in hello.slots]
    too_long = [*(text[MAX_TEXT:] for text in texts), *(text[MAX_DEVICE:] for text in devices)]
    if any(too_long) or any(_writable(text) != text for text in (*texts, *devices)):
        raise BadReport(f"a text of more than {MAX_TEXT} characters, or one that cannot be stored")
    if not 0 <= hello.pid < 2**31:
        raise BadReport(f"{hello.pid} cannot be the number of a process")


def check_slots(
    wanted: int, hosts: Mapping[str, Host], asked: Mapping[str, int | None] | None
) -> None:
    """Raises Unplaceable if all of them together do not have so many. `asked`: hosts that agents
    are started on, which may not have come yet, and how many each is to have; None: all it has.
    While nobody knows what there will be, nothing is too much. Without `asked`, those that have
    come are all there are.
    """
    has = {name: len(host.hello.slots) for name, host in hosts.items() if not host.is_outdated}
    awaited = {name: count for name, count in (asked or {}).items() if name not in has}
    coming = {name: count for name, count in awaited.items() if count is not None}
    there_are = sum(has.values()) + sum(coming.values())
    is_open = asked is not None and not has and not awaited
    if wanted <= there_are or len(coming) < len(awaited) or is_open:
        return
    texts = [f"{name} has {count}" for name, count in has.items()]
    texts += [f"{name} has {count} (not here yet)" for name, count in coming.items()]
    shown = sorted(texts)[:8]
    if len(texts) > len(shown):
        shown.append(f"{len(texts) - len(shown)} more hosts")
    raise Unplaceable(wanted, there_are, ", ".join(shown) or "no host has joined it")


def check_status(status: Status) -> None:
    """Raises BadReport for one that is too large to be looked at."""
    if len(status.holdings) > MAX_HOLDINGS:
        raise BadReport(f"{len(status.holdings)} holdings; {MAX_HOLDINGS} is the most")
