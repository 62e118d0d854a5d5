"""The office: the coordinator, as an agent sees it."""

from __future__ import annotations

from typing import Protocol

from manyhands.cluster.messages import Hello, Status, Wants, Welcome
from manyhands.core.errors import ManyhandsError

HOST_TAKEN = "host-taken"
"""The code of a refused Hello: another agent holds the host, and is alive. It may die."""
ANY_VERSION = -1
"""`seen` of an agent that has seen no Wants of this coordinator: it is answered at once."""


class OfficeUnreachable(ManyhandsError):
    """No answer: the network, a coordinator that is down, one that is too slow. Try again."""


class OfficeRefused(ManyhandsError):
    """The coordinator answered, and says no; `code` says why in one word."""

    def __init__(self, code: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.code = code


class Office(Protocol):
    """Where an agent asks. Each thread of an agent has one of its own.

    Every call blocks, with an end of its own: it raises OfficeUnreachable when there is no answer
    in time, and OfficeRefused. All may be repeated: nothing happens twice.
    """

    def hello(self, hello: Hello) -> Welcome:
        """Come, or come back."""
        ...

    def status(self, host: str, status: Status) -> None:
        """Say everything that is held. It has been written down when this returns."""
        ...

    def wants(self, host: str, agent: str, seen: int, wait_s: float) -> Wants:
        """Everything that is wanted: at once if its version is not `seen`, else after `wait_s`."""
        ...

    def send_log(
        self, host: str, agent: str, job: int, attempt: int, rank: int, offset: int, data: bytes
    ) -> int:
        """Bytes of a rank's log, from `offset` on. How many it has now: if that is not the sum,
        it has taken none, and wants those from there on.
        """
        ...
