"""Small stand-ins: a schedule that is first come, first served, and an agent without processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from manyhands.cluster.job import Failure, Place
from manyhands.cluster.messages import Hello, Holding, Kind, Phase, RankEnd, Slot, Status, Wants
from manyhands.cluster.schedule import Decisions

LEASE_S, MARGIN_S = 10.0, 3.0


def hello(host="a", *, agent="agent-1", slots=2, **changes):
    """Of an agent in the one state folder of this host, unless `folder` names another."""
    made = tuple(Slot(i, Kind.CPU, f"{i}") for i in range(slots))
    given = {"address": f"{host}.test", "folder": f"{host}-folder", **changes}
    return Hello(version="0", host=host, agent=agent, slots=made, pid=1, **given)


def first_come(now_s, hosts, entries):
    """Gang placement in the order of ids: the next job is placed if there is room for all of it."""
    taken = {(p.host, slot) for e in entries for p in e.places for slot in p.slots}
    free = {h.name: [s for s in h.slots if (h.name, s) not in taken] for h in hosts}
    place, waits = [], {}
    for entry in sorted((e for e in entries if not e.places), key=lambda e: e.id):
        if sum(map(len, free.values())) < entry.slots:
            waits[entry.id] = f"waits for {entry.slots} slots"
            continue
        places, missing = [], entry.slots
        for name, slots in free.items():
            if taken_here := slots[:missing]:
                places.append(Place(name, tuple(taken_here)))
                missing -= len(taken_here)
                del slots[: len(taken_here)]
        place.append((entry.id, tuple(places)))
    return Decisions(place=tuple(place), waits=waits)


@dataclass
class Part:
    """One attempt on one host, as its agent has it."""

    ranks: dict[int, int]
    phase: Phase = Phase.READY
    port: int = 0
    ends: dict[int, RankEnd] = field(default_factory=dict)
    failure: Failure | None = None
    lost: str = ""
    stopping: bool = False


@dataclass
class Agent:
    """The daemon of a host, in the model."""

    host: str
    name: str
    num_slots: int
    machine: str
    """Where it is: two may have the same name of a host."""
    parts: dict[tuple[int, int], Part] = field(default_factory=dict)
    wants: Wants | None = None
    is_welcome: bool = False
    lease_s: float = LEASE_S
    until_s: float | None = None
    kill_s: float | None = None
    is_hung: bool = False
    """It does nothing any more; its other threads talk on, and repeat `frozen`."""
    frozen: Status | None = None
    is_deaf: bool = False
    """It does not ask any more what is wanted; it says what it holds."""

    def holds_lease(self, now_s):
        return self.until_s is not None and now_s < self.until_s

    def answered(self, sent_s, now_s):
        if self.is_hung:
            return  # its keepers hear nothing of it
        until_s = sent_s + self.lease_s
        lapsed = self.until_s is not None and now_s >= self.until_s
        if now_s < until_s and not lapsed:
            self.until_s = max(until_s, self.until_s or 0.0)

    def status(self):
        return Status(
            agent=self.name,
            holdings=tuple(
                Holding(
                    job=job,
                    attempt=attempt,
                    phase=part.phase,
                    port=part.port,
                    ended=tuple(part.ends.values()),
                    failure=part.failure,
                    lost=part.lost,
                )
                for (job, attempt), part in self.parts.items()
            ),
        )
