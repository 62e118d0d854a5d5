"""Outcomes: what the user of a round engine is told, as values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from manyhands.collectives.instructions import (
    DropState,
    Generation,
    Lost,
    Retry,
    Settled,
    Stable,
    StopReason,
    TakeState,
)
from manyhands.collectives.messages import Record, Snapshot, Sum
from manyhands.collectives.ranges import Ranges
from manyhands.core.errors import ManyhandsError
from manyhands.core.peers import PeerId

if TYPE_CHECKING:
    from manyhands.collectives.results import Result


@dataclass(frozen=True, slots=True)
class Task:
    """Samples of a round to compute. `generation` tells whether they still count."""

    round: int
    ranges: Ranges
    generation: int


@dataclass(frozen=True, slots=True)
class Committed:
    """A round is committed. `result` is the mean of its samples; `close` it once it is read.

    A `closing` one had none, and is the last: there is nothing to apply.
    `sums` are the heads of its parts, or one for all of them if `result.alone`.
    Whoever saves the state after it saves `chain` and `record` too: `Rounds.offer_state`.
    """

    round: int
    result: Result
    sums: tuple[Sum, ...]
    record: Record
    chain: bytes
    member: bool
    closing: bool

    @property
    def weight(self) -> float:
        """Of all samples together."""
        return self.sums[0].weight

    @property
    def squared_norm(self) -> float:
        """Of the mean of the tensors that are measured, in fp64, in the order of the parts.

        The same bits everywhere."""
        return sum(head.squared_norm for head in self.sums)


@dataclass(frozen=True, slots=True)
class Stopped:
    """The last word. `error` is what ended the link, if that was the reason."""

    reason: StopReason | None
    text: str
    error: ManyhandsError | None = None


Outcome = (
    Task
    | Committed
    | TakeState
    | DropState
    | Stable
    | Retry
    | Lost
    | Settled
    | Generation
    | Stopped
)
"""In the order in which they count: a state that was taken is the base of the next commit."""


class State(Protocol):
    """The training state, for peers that join. What it is made of is the trainer's matter.

    The engine calls it between two events, with its lock held: nothing here may block.
    """

    def give(self, head: Snapshot, to: PeerId) -> None:
        """Send the state after `head.applied` rounds to a newcomer, as buffers beside `head`.

        Not yet: the user's thread has still to step. Remember it, and send it from there, with
        `Rounds.send_snapshot`.
        """
        ...

    def arrived(self, sender: PeerId, head: Snapshot, buffers: Sequence[memoryview]) -> None:
        """A piece of a state came. `Rounds.snapshot_arrived` takes the head once all are here.

        A `TakeState` tells the user's thread when it becomes the base, and a `DropState` that it
        is none any more.
        """
        ...
