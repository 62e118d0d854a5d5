"""Jobs: what was asked for, where it is, and the only ways from one state to another.

    PENDING ─► STARTING ─► RUNNING ─► SUCCEEDED | FAILED | TIMEOUT | CANCELLED
       ▲           │           │
       └ PREEMPTED ◄───────────┤
       └ NODE_FAIL ◄───────────┘   (within max_restarts; then FAILED)

Values, and one function that makes a new value of an old one: `moved`. Nothing here has a clock.
A job that is to end stays what it is, with `ending` set, until the last of its processes is gone:
its slots are not free before.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec

from manyhands.core.errors import ManyhandsError

MAX_SLOTS = 4096
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
KEY = r"^[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}$"
VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"
"""Patterns: names of jobs and hosts, keys of submissions, names of environment variables."""


class State(enum.StrEnum):
    """Where a job is in its life."""

    PENDING = "PENDING"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"
    CANCELLED = "CANCELLED"
    PREEMPTED = "PREEMPTED"
    NODE_FAIL = "NODE_FAIL"


_STARTED_ENDS = frozenset(
    {State.FAILED, State.TIMEOUT, State.CANCELLED, State.PREEMPTED, State.NODE_FAIL}
)
NEXT: Mapping[State, frozenset[State]] = {
    State.PENDING: frozenset({State.STARTING, State.CANCELLED}),
    State.STARTING: _STARTED_ENDS | {State.RUNNING},
    State.RUNNING: _STARTED_ENDS | {State.SUCCEEDED},
    State.PREEMPTED: frozenset({State.PENDING}),
    State.NODE_FAIL: frozenset({State.PENDING, State.FAILED}),
    State.SUCCEEDED: frozenset(),
    State.FAILED: frozenset(),
    State.TIMEOUT: frozenset(),
    State.CANCELLED: frozenset(),
}
"""Every legal step. A state that leads nowhere is terminal."""
TERMINAL = frozenset(state for state, after in NEXT.items() if not after)
PLACED = frozenset({State.STARTING, State.RUNNING})
"""States in which a job has slots."""


class Priority(enum.StrEnum):
    """Who goes first. `rank` is larger for whoever does."""

    HIGH = "high"
    NORMAL = "normal"
    BEST_EFFORT = "best-effort"

    @property
    def rank(self) -> int:
        """A number to compare by."""
        return {Priority.HIGH: 2, Priority.NORMAL: 1, Priority.BEST_EFFORT: 0}[self]


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user submits. Checked for what can be seen without hosts by `checked`."""

    command: tuple[str, ...]
    """Run once for each slot, with torchrun's variables. No shell."""
    name: str = ""
    """For people; need not be unique. Empty: the last part of the command's program."""
    gpus: int = 1
    """Slots: GPUs, or CPU shares on hosts that have none."""
    batch: int | None = None
    """The global batch, in MANYHANDS_BATCH: its program has to read it."""
    priority: Priority = Priority.NORMAL
    max_restarts: int = 3
    """How often the job may begin again after a host was lost. Preemptions do not count."""
    time_s: float | None = None
    """How long one attempt may run."""
    grace_s: float = 30.0
    """Between SIGTERM and SIGKILL, when it is made to end."""
    env: dict[str, str] = {}
    workdir: str = ""
    """Absolute, on every host that runs a part. Empty: a folder of the agent's for this job."""


class Place(msgspec.Struct, frozen=True):
    """The slots that a job has on one host, by their index there. Ranks follow this order."""

    host: str
    slots: tuple[int, ...]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The rank that failed first, and its last words."""

    rank: int
    host: str
    exit_code: int
    """As the shell says it: 128 + the signal's number for a death by signal."""
    words: str = ""
    """The last lines of its stderr (its traceback, if there is one)."""


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """A job is being made to end: what it will be when its last process is gone, and why."""

    into: State
    reason: str
    since_s: float


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A job as it is now. `seq` counts its changes; times are seconds of the epoch (UTC)."""

    id: int
    spec: Spec
    state: State = State.PENDING
    reason: str = ""
    seq: int = 0
    key: str = ""
    attempt: int = 0
    """Counts from 0; a new one for every way into STARTING after the first."""
    node_failures: int = 0
    preemptions: int = 0
    submitted_s: float
    started_s: float | None = None
    """When the attempt was placed."""
    ended_s: float | None = None
    places: tuple[Place, ...] = ()
    ending: Ending | None = None
    exit_code: int | None = None
    """Of the whole, once it is terminal: 0, the first failing rank's, 124 for TIMEOUT, 143 for
    CANCELLED."""
    failure: Failure | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more can happen to it."""
        return self.state in TERMINAL


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a job's history."""

    job: int
    seq: int
    state: State
    reason: str
    at_s: float


class IllegalStep(ManyhandsError):
    """A bug of ours: a job was to go where no way leads. Carries both states."""

    def __init__(self, job: Job, to: State) -> None:
        super().__init__(f"job {job.id} cannot go from {job.state} to {to} (change {job.seq})")
        self.job = job
        self.to = to


def moved(job: Job, to: State, reason: str, **changes: object) -> Job:
    """The job in its next state. Raises IllegalStep; nothing else makes a state."""
    if to not in NEXT[job.state]:
        raise IllegalStep(job, to)
    return msgspec.structs.replace(job, state=to, reason=reason, seq=job.seq + 1, **changes)


def noted(job: Job, **changes: object) -> Job:
    """The job with other facts in the same state (why it waits, that it is to end)."""
    if job.is_over or "state" in changes:
        raise IllegalStep(job, job.state)
    return msgspec.structs.replace(job, seq=job.seq + 1, **changes)
