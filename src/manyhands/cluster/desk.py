"""The desk: what the HTTP side needs of a coordinator, and the values that only HTTP has.

Every method is quick (a lock and a disk, never a wait) and may be called from any thread. Waiting
is done on the HTTP side, once for all who wait: `listen` says what has changed, and whoever waits
for it looks again. A thread for each long poll would do for a hundred of them and not for a
thousand, and would stay behind when its client is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from manyhands.cluster.hosts import Node
from manyhands.cluster.job import KEY, NAME, Job, Spec, State, Step
from manyhands.cluster.messages import PROTOCOL, Hello, Status, Wants, Welcome
from manyhands.core.errors import ManyhandsError

NO_SUCH_ATTEMPT = "no-such-attempt"
"""The code of the refusal, which a client that follows a job has to know."""
Changed = Collection[int | str] | None
"""The ids of jobs and the names of hosts that something is new about; None: look at everything."""


class Desk(Protocol):
    """A coordinator, as the HTTP side sees it. Errors are ManyhandsError kinds."""

    def submit(self, spec: Spec, key: str = "") -> tuple[Job, bool]:
        """The job and whether it is new: a known key gives the job that has it."""
        ...

    def job(self, id: int) -> Job:
        """Raises NoSuchJob."""
        ...

    def jobs(self, *, states: Collection[State] = (), limit: int | None = None) -> Sequence[Job]:
        """The newest first; with `states`, those in one of them."""
        ...

    def history(self, id: int) -> Sequence[Step]: ...

    def cancel(self, id: int) -> Job: ...

    def nodes(self) -> Sequence[Node]: ...

    def hello(self, hello: Hello) -> Welcome: ...

    def status(self, host: str, status: Status) -> None: ...

    def wants(
        self, host: str, agent: str, seen: int, timeout_s: float, *, again: bool = False
    ) -> Wants:
        """Asked with no time-out: what is wanted now, whether newer than `seen` or not. `again`:
        for a request that was asked about before. Only the first time is the agent's own word.
        """
        ...

    def check_sender(self, host: str, agent: str) -> None:
        """Raises NotAHost unless this agent holds the host."""
        ...

    def lost(self, host: str, agent: str) -> None:
        """The connection on which this agent waited has ended: a hint that it may be gone."""
        ...

    def listen(self, heard: Callable[[Changed], None]) -> Callable[[], None]:
        """Calls `heard` after every change, when it is on disk, from any thread, perhaps under a
        lock: it returns at once and asks nothing. What is returned ends it.
        """
        ...


class Info(msgspec.Struct, frozen=True, kw_only=True):
    """Who answers."""

    name: str = "manyhands"
    version: str
    protocol: int = PROTOCOL


class Submission(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to run, and a key by which the same submission is known again."""

    spec: Spec
    key: Annotated[str, Meta(pattern=f"{KEY}|^$")] = ""


class Down(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster has begun to go down."""

    state: str = "going down"


class LogPlace(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a log the coordinator has."""

    offset: int


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What went wrong, and what to do about it."""

    code: str
    """One word, for programs."""
    message: str
    hint: str | None = None
    offset: int | None = None
    """How much of a log the coordinator has, where the sender thought otherwise."""


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every answer that is an error."""

    error: Problem


# Parts of addresses. What does not fit is refused before anything looks at it.
Id = Annotated[int, Meta(ge=1, le=2**53)]
Attempt = Annotated[int, Meta(ge=0, le=1_000_000)]
Rank = Annotated[int, Meta(ge=0, le=4095)]
Offset = Annotated[int, Meta(ge=0, le=2**53)]
HostName = Annotated[str, Meta(pattern=NAME)]
AgentName = Annotated[str, Meta(pattern=NAME)]
WaitSeconds = Annotated[float, Meta(ge=0, le=60)]


class NoParts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """No parts, no options."""


class JobParts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """/v1/jobs/{id}"""

    id: Id


class HostParts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """/v1/agents/{host}"""

    host: HostName


class LogParts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """/v1/agents/{host}/logs/{job}/{attempt}/{rank}"""

    host: HostName
    job: Id
    attempt: Attempt
    rank: Rank


class JobsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which jobs."""

    state: State | None = None
    limit: Annotated[int, Meta(ge=1, le=100_000)] = 1000


class WaitQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long to hold the answer back."""

    timeout_s: WaitSeconds = 30.0


class LogQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which piece of which log."""

    rank: Rank = 0
    attempt: Attempt | None = None
    offset: Offset = 0
    limit: Annotated[int, Meta(ge=1, le=1 << 20)] = 1 << 18
    wait_s: WaitSeconds = 0.0


class WantsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who asks, and what it knows."""

    agent: AgentName
    seen: Annotated[int, Meta(ge=-1, le=2**53)] = -1
    wait_s: WaitSeconds = 0.0


class AppendQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who sends a piece of a log, and where it belongs."""

    agent: AgentName
    offset: Offset


class HttpError(ManyhandsError):
    """An answer that is an error; `status` is HTTP's."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        hint: str | None = None,
        offset: int | None = None,
        retry_after_s: float | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.code = code
        self.offset = offset
        self.retry_after_s = retry_after_s
        self.headers = headers
