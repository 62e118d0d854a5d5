"""Tasks: a host's part of a placed job, as its agent is told. Pure."""

from __future__ import annotations

from collections.abc import Callable

from manyhands.cluster.hosts import Host, ranks_of
from manyhands.cluster.job import Job
from manyhands.cluster.messages import Task, Want

Hub = Callable[[int, int], tuple[str, str]]
"""From a job and its attempt to a join code and the name of a run."""


def no_hub(job: int, attempt: int) -> tuple[str, str]:
    """A cluster without a hub: jobs get neither join code nor run."""
    return "", ""


def want_of(job: Job, host: Host, first: Host | None, hub: Hub) -> Want:
    """What is wanted of this host, whose part of the job it is; `first` is the host of rank 0."""
    key = (job.id, job.attempt)
    names = [place.host for place in job.places]
    slots = job.places[names.index(host.name)].slots
    held = None if first is None else first.held.get(key)
    join_code, run = hub(*key)
    task = Task(
        spec=job.spec,
        ranks=tuple(zip(ranks_of(job, host.name), slots, strict=True)),
        world_size=job.spec.gpus,
        num_hosts=len(names),
        rank_of_host=names.index(host.name),
        master_addr="" if first is None else first.hello.address,
        master_port=0 if held is None else held.port,
        hub=join_code,
        run=run,
    )
    return Want(job=job.id, attempt=job.attempt, task=task, stop=host.stops(key, job))
