"""Jobs: those that are not over, found by number, key and host; every change kept until stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from manyhands.cluster.errors import QueueFull
from manyhands.cluster.job import Job, Spec, Step
from manyhands.cluster.messages import Hello

MAX_BYTES = 256 << 20
"""Of the commands and variables of all jobs that are not over: they are kept in memory."""


class HostRow(msgspec.Struct, frozen=True, kw_only=True):
    """A host, as it is stored."""

    hello: Hello
    inherited: tuple[tuple[int, int], ...] = ()
    """Attempts that were given to an agent before this one. A coordinator that comes back must not
    give them to this one, which may never have seen them."""
    lease_s: float = 0.0
    """The longest that this agent was ever promised. A coordinator that comes back with a shorter
    one has to wait for this one all the same: the agent may not have heard of the change."""


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """What changed: to be stored as one, or not at all."""

    jobs: tuple[Job, ...] = ()
    """As they are now."""
    steps: tuple[Step, ...] = ()
    """Everything that happened to them, in order."""
    hosts: tuple[HostRow, ...] = ()
    """Hosts that are new, or not as they were."""
    gone: tuple[str, ...] = ()
    """Hosts that are none any more."""

    def __bool__(self) -> bool:
        return bool(self.jobs or self.hosts or self.gone)


class Jobs:
    """See the module. `put` is the only way in for a change, `undo` the only way back."""

    def __init__(self, jobs: Iterable[Job], next_id: int) -> None:
        self.live: dict[int, Job] = {}
        self.next_id = next_id
        self.stirred: set[str] = set()
        """Hosts that have, or had, a job which changed."""
        self._num_bytes = 0
        self._keys: dict[str, int] = {}
        self._on: dict[str, set[int]] = {}
        self._before: dict[int, Job | None] = {}
        self._next_id_before = next_id
        self._changed: dict[int, Job] = {}
        self._steps: list[Step] = []
        for job in jobs:
            self._set(job.id, job)

    @property
    def placed(self) -> Sequence[Job]:
        """Those that have slots, by number."""
        return [self.live[id] for id in sorted(set[int]().union(*self._on.values()))]

    @property
    def changed(self) -> Mapping[int, Job]:
        """As they are now, those that changed since `keep` or `undo`; also what is over."""
        return self._changed

    @property
    def steps(self) -> Sequence[Step]:
        """All that happened since `keep` or `undo`."""
        return self._steps

    def on(self, host: str) -> Sequence[Job]:
        """Those that have slots on this host, by number."""
        return [self.live[id] for id in sorted(self._on.get(host, ()))]

    def busy(self, host: str) -> dict[int, int]:
        """Which job has which slot of this host."""
        return {
            slot: job.id
            for job in self.on(host)
            for place in job.places
            if place.host == host
            for slot in place.slots
        }

    def by_key(self, key: str) -> Job | None:
        """The one that was submitted with this key."""
        return self.live.get(self._keys.get(key, 0))

    def put(self, job: Job, now_s: float) -> Job:
        """The job is this now."""
        self._before.setdefault(job.id, self.live.get(job.id))
        self._set(job.id, job)
        self._changed[job.id] = job
        reason = job.reason if job.ending is None else f"to end: {job.ending.reason}"
        self._steps.append(
            Step(job=job.id, seq=job.seq, state=job.state, reason=reason, at_s=now_s)
        )
        return job

    def check_room(self, spec: Spec) -> None:
        """Raises QueueFull if this one would be too much beside the others."""
        if self._num_bytes + _num_bytes(spec) > MAX_BYTES:
            raise QueueFull(len(self.live), MAX_BYTES)

    def keep(self) -> None:
        """What changed is stored."""
        self._before, self._changed, self._steps = {}, {}, []
        self._next_id_before = self.next_id

    def undo(self) -> None:
        """What changed could not be stored: nothing has changed."""
        for id, job in self._before.items():
            self._set(id, job)
        self.next_id = self._next_id_before
        self.keep()

    def _set(self, id: int, job: Job | None) -> None:
        """Make this the job of that number, or none; keeps the indexes true."""
        old = self.live.get(id)
        if old is not None:
            self._num_bytes -= _num_bytes(old.spec)
            self._keys.pop(old.key, None)
            for place in old.places:
                self._on[place.host].discard(id)
                if not self._on[place.host]:  # names of hosts come and go without end
                    del self._on[place.host]
                self.stirred.add(place.host)
        if job is None or job.is_over:
            self.live.pop(id, None)
            return
        self.live[id] = job
        self._num_bytes += _num_bytes(job.spec)
        if job.key:
            self._keys[job.key] = id
        for place in job.places:
            self._on.setdefault(place.host, set()).add(id)
            self.stirred.add(place.host)


def _num_bytes(spec: Spec) -> int:
    """About as many as it takes; a job without arguments is not for nothing either."""
    texts = (*spec.command, *spec.env.keys(), *spec.env.values(), spec.workdir)
    return 1024 + sum(map(len, texts))
