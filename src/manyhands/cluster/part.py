"""Parts: what the hosts of a job say of it, and what that means for the whole. Pure.

    a host's part of an attempt is gone   when its agent says that it has ended
                                          when its lease is over, or another agent has its host
                                          when it was never told of it

A host that is lost makes the ranks of the others fail. Their failures come first, because a
connection breaks sooner than a lease ends. So a failure is the job's own only if no other host of
the job turns out to be lost before all is gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from manyhands.cluster.hosts import Host
from manyhands.cluster.job import Failure, Job, Place, State
from manyhands.cluster.messages import Holding, Phase

START_S = 60.0
"""An agent has this long, beyond a lease, to begin what it was given; ranks that wait for the port
of rank 0, as long again."""
STOP_S = 60.0
"""And this long, beyond the grace and a lease, to be rid of what it was told to end."""


class Part(NamedTuple):
    """One host's part of a placed job."""

    host: str
    num_ranks: int
    holding: Holding | None = None
    is_gone: bool = False
    """No process of it is left, and none will be."""
    loss: str = ""
    """Why it is gone, if that is the host's doing and not the program's."""
    is_unsaid: bool = False
    """No agent was ever told of it."""
    is_untold: bool = False
    """Its agent has not been told to stop it, or only after it had ended."""

    @property
    def has_ended(self) -> bool:
        """Its agent says so."""
        return self.holding is not None and self.holding.phase is Phase.ENDED

    @property
    def is_let_go(self) -> bool:
        """Its agent says that its loss does not count."""
        return self.holding is not None and self.holding.free

    @property
    def is_clean(self) -> bool:
        """Every rank has ended, with exit code 0."""
        held = self.holding
        return (
            held is not None
            and held.phase is Phase.ENDED
            and not held.lost
            and held.failure is None
            and len(held.ended) == self.num_ranks
            and all(end.exit_code == 0 for end in held.ended)
        )

    @property
    def has_begun(self) -> bool:
        """Its ranks run, or have run."""
        return self.is_clean or (self.holding is not None and self.holding.phase is Phase.RUNNING)


class Verdict(NamedTuple):
    """A job is to end, or to end otherwise than was thought."""

    into: State
    reason: str
    failure: Failure | None = None


def part_of(job: Job, place: Place, host: Host | None) -> Part:
    """What is known of this host's part."""
    name, num_ranks = place.host, len(place.slots)
    if host is None:
        return Part(name, num_ranks, is_gone=True, loss=f"host {name} is not known any more")
    key = (job.id, job.attempt)
    held = host.held.get(key)
    is_unsaid = held is None and key in host.fresh
    part = Part(name, num_ranks, held, is_unsaid=is_unsaid, is_untold=key in host.untold)
    if part.has_ended:
        return part._replace(is_gone=True, loss=_loss_of_ended(job, part))
    if host.silent_since_s is not None:
        why = host.evicted or "has not been heard for its lease"
        return part._replace(is_gone=True, loss=f"host {name} {why}")
    if held is None and key in host.inherited and host.has_reported:
        why = f"the agent of host {name} was replaced, and the new one knows nothing of it"
        return part._replace(is_gone=True, loss=why)
    if is_unsaid and job.ending is not None:
        return part._replace(is_gone=True)
    return part


def _loss_of_ended(job: Job, part: Part) -> str:
    held = part.holding
    assert held is not None
    if held.lost:
        return f"host {part.host}: {held.lost}"
    if held.failure is None and not part.is_clean and job.ending is None:
        return f"host {part.host} ended it without being asked to"
    return ""


def verdict(job: Job, parts: Sequence[Part], now_s: float) -> Verdict | None:
    """How the job is to end, if that is new."""
    failure = first_failure(parts)
    if job.ending is None:
        lost = [part for part in parts if part.loss]
        if lost:
            # A host that was gone before it heard of the job, had no room for it, or is stopped by
            # its owner costs it nothing but the wait.
            is_free = all(part.is_unsaid or part.is_let_go for part in lost)
            return Verdict(State.PREEMPTED if is_free else State.NODE_FAIL, lost[0].loss)
        if failure is not None:
            return Verdict(State.FAILED, describe(failure), failure)
        if _is_late(job, now_s) and not all(part.is_clean for part in parts):
            return Verdict(State.TIMEOUT, f"it ran for its limit of {job.spec.time_s:g} s")
    elif job.ending.into is State.FAILED:
        failed_on = None if job.failure is None else job.failure.host
        loss = next((part.loss for part in parts if part.loss and part.host != failed_on), "")
        if loss:
            return Verdict(State.NODE_FAIL, f"{loss} ({job.ending.reason})")
        if failure is not None and failure != job.failure:
            return Verdict(State.FAILED, describe(failure), failure)
    return None


def all_gone(parts: Sequence[Part]) -> bool:
    """Whether nothing of the job is left anywhere: only then is it over, or placed again."""
    return all(part.is_gone for part in parts)


def overdue(
    job: Job, parts: Sequence[Part], hosts: Mapping[str, Host], lease_s: float
) -> Sequence[tuple[float, str, str]]:
    """When each host that has to do something for this job is late with it: that time, the host,
    and what it has not done. An agent that hangs may talk on: only what it does not do shows it.
    """
    found: list[tuple[float, str, str]] = []
    if not parts or (job.ending is None and job.state is not State.STARTING):
        return found
    has_port = parts[0].holding is not None and parts[0].holding.port > 0
    for one in parts:
        host = hosts.get(one.host)
        if host is None or one.is_gone:
            continue
        if job.ending is not None:
            since_s, limit_s = job.ending.since_s, job.spec.grace_s + lease_s + STOP_S
            why = f"did not end job {job.id}"
        elif one.has_begun or job.started_s is None:
            continue
        elif one.holding is not None and not has_port and one is not parts[0]:
            continue  # it waits for rank 0, as it should
        else:
            is_first = one.holding is None or not has_port
            since_s, limit_s = job.started_s, lease_s + START_S * (1 if is_first else 2)
            why = f"did not begin job {job.id}"
        due_s = max(since_s, host.since_s) + limit_s
        found.append((due_s, one.host, f"{why} within {limit_s:g} s"))
    return found


def first_failure(parts: Sequence[Part]) -> Failure | None:
    """Of the rank that failed first, by the clocks of the hosts."""
    failures = [
        (_ended_s(part.holding, part.holding.failure.rank), part.holding.failure)
        for part in parts
        if part.holding is not None and part.holding.failure is not None
    ]
    return min(failures, key=lambda one: (one[0], one[1].rank), default=(0.0, None))[1]


def describe(failure: Failure) -> str:
    """In one line."""
    how = f"exit code {failure.exit_code}"
    if failure.exit_code > 128:
        how += f" (signal {failure.exit_code - 128})"
    return f"rank {failure.rank} on {failure.host} failed with {how}"


def worn_out(reason: str, max_restarts: int) -> str:
    """Why a job that has lost its host, for this reason, does not begin again."""
    if max_restarts == 0:
        return f"{reason}; it may not begin again: --max-restarts 0"
    times = "once" if max_restarts == 1 else f"{max_restarts} times"
    return f"{reason}; it has begun again {times}, and may not more often: --max-restarts"


def exit_code(into: State, failure: Failure | None) -> int:
    """Of the whole job."""
    match into:
        case State.SUCCEEDED:
            return 0
        case State.TIMEOUT:
            return 124
        case State.CANCELLED:
            return 143
        case _:
            return 1 if failure is None else failure.exit_code


def _ended_s(holding: Holding, rank: int) -> float:
    return next((end.at_s for end in holding.ended if end.rank == rank), float("inf"))


def _is_late(job: Job, now_s: float) -> bool:
    limit_s, started_s = job.spec.time_s, job.started_s
    return limit_s is not None and started_s is not None and now_s >= started_s + limit_s
