"""Every error of the cluster's coordinator, in one tree.

ManyhandsError
├── UsageError
│   ├── BadJob               a submission that can never be run
│   │   └── Unplaceable      it asks for more slots than all hosts have
│   └── BadReport            an agent says what no agent of ours would say
└── ClusterError
    ├── NoSuchJob            nobody submitted a job of this number
    ├── KeyTaken             the key belongs to another submission
    ├── QueueFull            what waits and runs is as much as the coordinator keeps
    ├── HostTaken            another agent, which is alive, holds this host
    ├── NotAHost             this agent does not hold this host: it has to say Hello
    ├── StillThere           the cluster was taken down, and some did not leave in time
    ├── CoordinatorClosed    it takes nothing any more
    └── StoreError           the store of jobs cannot be read or written
        ├── StoreHeld        another coordinator has it
        ├── StoreFull        no room on the disk: nothing of this change was kept
        ├── StoreBusy        somebody else has the file locked: nothing was kept either
        ├── StoreRefused     the change contradicts what is stored
        └── Fenced           another coordinator took the store over; this one must end
"""

from __future__ import annotations

from collections.abc import Sequence

from manyhands.core.errors import ManyhandsError, UsageError


class BadJob(UsageError):
    """A submission that cannot be run, and what is wrong with it."""


class Unplaceable(BadJob):
    """More slots than all known hosts have together."""

    def __init__(self, wanted: int, there_are: int, what: str) -> None:
        super().__init__(
            f"the job asks for {_slots(wanted)}, and the cluster has {there_are}: {what}",
            hint="ask for fewer with --gpus, or add a host with `manyhands agent`",
        )
        self.wanted = wanted
        self.there_are = there_are


class BadReport(UsageError):
    """What an agent said breaks the protocol; nothing of it was taken."""


class ClusterError(ManyhandsError):
    """The coordinator cannot do what was asked of it."""


class NoSuchJob(ClusterError):
    """There is no job of this number."""

    def __init__(self, job: int) -> None:
        super().__init__(f"there is no job {job}", hint="`manyhands jobs` lists those there are")
        self.job = job


class KeyTaken(ClusterError):
    """One key, two different submissions; `job` is the one that has it."""

    def __init__(self, key: str, job: int) -> None:
        super().__init__(
            f"the key {key!r} belongs to job {job}, which asks for something else",
            hint="a key stands for one submission: draw a new one for another job",
        )
        self.key = key
        self.job = job


class QueueFull(ClusterError):
    """What is not over is kept in memory; there is no room for this one beside it."""

    def __init__(self, num_jobs: int, most_bytes: int) -> None:
        super().__init__(
            f"{num_jobs} jobs wait or run, and their commands and variables take all of the "
            f"{most_bytes >> 20} MiB that there are for them",
            hint="submit it when some have ended, or put large arguments in a file",
        )


class HostTaken(ClusterError):
    """Another agent holds this host, and is alive; or this one was given up, which `why` says."""

    def __init__(self, host: str, why: str = "") -> None:
        super().__init__(
            f"host {host} {why or 'is held by another agent'}",
            hint="it may come back when its lease is over"
            if why
            else "end that agent first, or give this one another name with --name",
        )
        self.host = host


class NotAHost(ClusterError):
    """The agent does not hold this host (any more): it has to say Hello."""

    def __init__(self, host: str) -> None:
        super().__init__(f"this agent does not hold host {host}: it has to say hello first")
        self.host = host


class StillThere(ClusterError, TimeoutError):
    """The cluster was to go down; `jobs` and `hosts` had not ended when the time was up."""

    def __init__(self, limit_s: float, jobs: Sequence[int], hosts: Sequence[str]) -> None:
        what = [f"job {job}" for job in jobs] + [f"host {host}" for host in hosts]
        super().__init__(f"not ended within {limit_s:g} s: {', '.join(what)}")
        self.jobs = tuple(jobs)
        self.hosts = tuple(hosts)


class CoordinatorClosed(ClusterError):
    """The coordinator has been closed."""


class StoreError(ClusterError):
    """The store of jobs cannot be read or written; what was to be written was not."""


class StoreHeld(StoreError):
    """Another coordinator has the store; `pid` if it said who it is."""

    def __init__(self, path: object, pid: int | None) -> None:
        super().__init__(
            f"{path} is held by " + ("another coordinator" if pid is None else f"pid {pid}"),
            hint="end that one (`manyhands down`), or use another folder with --state",
        )
        self.pid = pid


class StoreFull(StoreError):
    """No room on the store's disk. Nothing of the change was kept; it may be tried again. `why`
    is what the system said where it was not that: a quota is used up, say.
    """

    def __init__(self, path: object, why: str = "") -> None:
        if why:
            super().__init__(
                f"{path} cannot be written ({why}): the change was not made",
                hint="is a quota used up? Free some space, then try again; is the disk well?",
            )
        else:
            super().__init__(
                f"no room for {path}: the change was not made",
                hint="free some space on that disk, then try again",
            )


class StoreBusy(StoreError):
    """Somebody else has the file locked. Nothing of the change was kept; it may be tried again."""

    def __init__(self, path: object) -> None:
        super().__init__(
            f"{path} is locked by another program: the change was not made",
            hint="end what has it open (a database shell, a backup), then try again",
        )


class StoreRefused(StoreError):
    """The change contradicts what is stored; nothing of it was kept."""


class Fenced(StoreError):
    """Another coordinator has taken the store over. This one must end."""

    def __init__(self, path: object, *, own: int, found: int) -> None:
        super().__init__(
            f"another coordinator has taken {path} over (generation {found}, this one is {own})"
        )
        self.own = own
        self.found = found


def _slots(count: int) -> str:
    return "1 slot" if count == 1 else f"{count} slots"
