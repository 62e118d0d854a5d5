"""What agents and the coordinator say to each other, as JSON over HTTP.

Both directions carry the whole truth, not news: an agent says what it holds (`Status`), the
coordinator what it wants held (`Wants`). A lost or repeated message, a restart on either side
change nothing: each compares, and does what is missing.

    agent                                   coordinator
      Hello ───────────────────────────────►  a host, with slots and a lease
      ◄─────────────────────────────── Welcome
      Status (on every change, and a few times a lease) ─►
      ◄─────────────────────────────── Wants (held back until there is something new)

An attempt is begun once in all: the agent makes a folder for it before it starts a process, and
never starts what has one. It forgets an attempt when the coordinator does not want it any more and
its processes are gone.
"""

from __future__ import annotations

import enum

import msgspec

from manyhands.cluster.job import Failure, Spec

PROTOCOL = 1


class Kind(enum.StrEnum):
    """What a slot is."""

    GPU = "gpu"
    CPU = "cpu"


class Slot(msgspec.Struct, frozen=True):
    """One device, or a share of the CPUs."""

    index: int
    """Of this host's slots, from 0."""
    kind: Kind
    device: str
    """A GPU's number or UUID for CUDA_VISIBLE_DEVICES; the cores of a share, such as `0-3`."""
    name: str = ""


class Origin(enum.StrEnum):
    """Who started an agent: what the coordinator started, it also ends."""

    UP = "up"
    USER = "user"


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """An agent comes, or comes back."""

    protocol: int = PROTOCOL
    version: str
    host: str
    """The name of the host in this cluster; one agent holds it at a time."""
    agent: str
    """Drawn anew by every agent process: who has it now."""
    address: str
    """Where processes of other hosts reach this one, for MASTER_ADDR."""
    slots: tuple[Slot, ...]
    pid: int
    origin: Origin = Origin.USER
    terms: str = ""
    """What an `up` drew from the options that it started this agent with. One that comes to a later
    `up`, with other options, would run jobs as another user, say: it is told to leave."""
    folder: str = ""
    """Drawn once for the folder in which the agent keeps its state, which one agent holds at a
    time. Another agent of the same folder has ended what the one before it left; another agent of
    another folder may be on another machine, and knows nothing of it.
    """


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """The terms. An agent that has not been answered for `lease_s` (counted from when it asked)
    ends its processes; the coordinator gives their slots to nobody before that time is over.
    """

    protocol: int = PROTOCOL
    lease_s: float
    cluster: str
    """The identity of the store: attempts of another cluster are none of this one's."""


class Phase(enum.StrEnum):
    """How far an attempt is on one host."""

    READY = "ready"
    """It has a port for rank 0 (where that is here); no process yet."""
    RUNNING = "running"
    ENDED = "ended"
    """No process of it is left."""


class RankEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank ended. `exit_code` is the shell's: 128 + number for a signal."""

    rank: int
    exit_code: int
    at_s: float


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt, as the agent has it."""

    job: int
    attempt: int
    phase: Phase
    port: int = 0
    """Free at this host when it was chosen; for MASTER_PORT, where rank 0 is here."""
    ended: tuple[RankEnd, ...] = ()
    """In the order in which they ended."""
    failure: Failure | None = None
    """Of the first that failed here by itself, not because it was told to end."""
    lost: str = ""
    """Why the agent cannot tell how it ended (it was killed itself, say): a node failure."""
    free: bool = False
    """That it is lost is not to be counted among its restarts: no process of it was ever started,
    or somebody stopped the agent on purpose."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an agent holds."""

    agent: str
    holdings: tuple[Holding, ...] = ()
    number: int = 0
    """Grows with every one that this agent sends, where it is not 0: an older one that arrives
    late says what was true once."""
    rests: bool = False
    """It can begin nothing now (its disk is full, say, or it is about to leave): give it nothing
    new."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What to run: one process a slot."""

    spec: Spec
    ranks: tuple[tuple[int, int], ...]
    """(rank, index of the slot) of those on this host, by rank."""
    world_size: int
    num_hosts: int
    rank_of_host: int
    master_addr: str
    master_port: int
    """0 while it is not known: the attempt is prepared, not started."""
    hub: str = ""
    """Join code of the cluster's hub for this job's run; MANYHANDS_URL."""
    run: str = ""


class Want(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that the coordinator wants this agent to hold."""

    job: int
    attempt: int
    task: Task
    stop: bool = False
    """End it: SIGTERM to every process, SIGKILL after the spec's grace."""


class Wants(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the coordinator wants of one agent. What is held and not in it is ended and
    forgotten.
    """

    version: int
    """Grows; an agent asks for more than the one it has."""
    wants: tuple[Want, ...] = ()
    leave: bool = False
    """The cluster goes down, or has another agent for this host: end everything, report it, and go
    (those that `up` started)."""
