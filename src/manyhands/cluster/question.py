"""The question: hosts and jobs, as the schedule is asked about them. Pure.

    a host that may be given something      an offer
    one that is about to be one of those    an offer, and an entry that ends and has all that is
                                            free there: room that is coming
    one that is silent, or given up, or     nothing
    is sent away

After a restart of the coordinator hosts come back one by one. If only those that are back were
offered, a large job in front would have no room for a moment, and be passed by small ones that
never end; or one that may preempt would, for slots that are free a moment later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import inf
from typing import NamedTuple

from manyhands.cluster.hosts import Host
from manyhands.cluster.job import Job, Place, Priority
from manyhands.cluster.schedule import Entry
from manyhands.cluster.schedule import Host as Offer


class Question(NamedTuple):
    """What the schedule is to decide on."""

    hosts: list[Offer]
    entries: list[Entry]
    again_s: float
    """When it is another one, if nothing happens before: room has not come."""


def question(
    hosts: Mapping[str, Host],
    jobs: Iterable[Job],
    busy: Callable[[str], Collection[int]],
    *,
    now_s: float,
    patience_s: float,
) -> Question:
    """`busy` says which slots of a host jobs have. A host may get ready for `patience_s`, counted
    from when it was first asked about: who never does must not keep free slots from others.
    """
    offers: list[Offer] = []
    entries = [_entry(job) for job in jobs]
    again_s = inf
    for number, (name, host) in enumerate(sorted(hosts.items())):
        if host.is_usable:
            host.unready_s = None
        elif host.unready_s is None:
            host.unready_s = now_s
        if host.silent_since_s is not None or host.evicted or host.is_outdated:
            continue
        slots = tuple(slot.index for slot in host.hello.slots)
        if host.unready_s is not None:
            if now_s >= host.unready_s + patience_s:
                continue
            again_s = min(again_s, host.unready_s + patience_s)
            taken = busy(name)
            free = tuple(slot for slot in slots if slot not in taken)
            if free:
                entries.append(_coming(-1 - number, Place(name, free), host.unready_s, patience_s))
        offers.append(Offer(name, slots))
    return Question(offers, entries, again_s)


def is_free(
    job: Job,
    places: Sequence[Place],
    hosts: Mapping[str, Host],
    busy: Callable[[str], Collection[int]],
) -> bool:
    """Whether an answer still holds: so many slots, on hosts that may be given something."""
    if len({place.host for place in places}) != len(places):
        return False
    if sum(len(set(place.slots)) for place in places) != job.spec.gpus:
        return False
    for place in places:
        host = hosts.get(place.host)
        if host is None or not host.is_usable or not place.slots:
            return False
        free = {slot.index for slot in host.hello.slots}.difference(busy(place.host))
        if not free.issuperset(place.slots):
            return False
    return True


def _entry(job: Job) -> Entry:
    return Entry(
        id=job.id,
        slots=job.spec.gpus,
        priority=job.spec.priority,
        # The order of submission, which no clock can change.
        queued_s=float(job.id),
        limit_s=job.spec.time_s,
        grace_s=job.spec.grace_s,
        places=job.places,
        started_s=job.started_s,
        ending=job.ending is not None,
        ending_s=None if job.ending is None else job.ending.since_s,
    )


def _coming(id: int, place: Place, since_s: float, patience_s: float) -> Entry:
    return Entry(
        id=id,
        slots=len(place.slots),
        priority=Priority.HIGH,  # nobody can make it end sooner
        queued_s=0.0,
        limit_s=None,
        grace_s=patience_s,
        places=(place,),
        ending=True,
        ending_s=since_s,
    )
