"""Events: everything that can happen to a round machine.

The runtime turns what a link delivers, and what the user's passes and the data plane have done,
into these, and hands them to `RoundMachine.handle` one after the other. An event is a plain value;
tensors stay with the runtime, filed under (round, attempt, k, sender) for the contributions and
(round, attempt, k) for the results.
"""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.collectives.messages import Fill, Part, Record, Snapshot, Status, Sum, Tag
from manyhands.collectives.ranges import Ranges
from manyhands.core.peers import View


@dataclass(frozen=True, slots=True)
class ViewSeen:
    """The link delivered a view. Views must be handed in in their order, none left out."""

    view: View


@dataclass(frozen=True, slots=True)
class PartArrived:
    """A contribution is here, with its values; also one's own, for parts that one owns oneself.

    `refused`: its values cannot be used (not finite, wrong shape). A contribution without samples
    has weight 0, adds nothing whatever its values, and is never refused. Tell it only when all of
    its values are here. It is answered by `Discard` if nothing will ask for the values.
    """

    sender: int
    part: Part
    refused: bool = False


@dataclass(frozen=True, slots=True)
class SumArrived:
    """A result is here, with its values. `digest` is over the encoded values. May be discarded."""

    sender: int
    sum: Sum
    digest: bytes


@dataclass(frozen=True, slots=True)
class FillArrived:
    """A result that somebody lacked is here, with its values. May be discarded."""

    sender: int
    fill: Fill
    digest: bytes


@dataclass(frozen=True, slots=True)
class RecordSeen:
    """A record is here, with a result or a state. Tell it before the values are looked at.

    To a peer whose tensors have another form they are only bytes of the wrong size.
    """

    record: Record


@dataclass(frozen=True, slots=True)
class StatusArrived:
    """A peer has told what it holds at a cut."""

    sender: int
    status: Status


@dataclass(frozen=True, slots=True)
class AskArrived:
    """A newcomer asks this peer for the state."""

    sender: int
    number: int


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """The user has put to use all that was committed so far. Only while the machine is `behind`."""


@dataclass(frozen=True, slots=True)
class SnapshotArrived:
    """The state that this peer asked for is here, all of it, and its chain is the head's.

    How many peers its bytes came from is the runtime's matter; `sender` is the peer asked. It is
    answered by `TakeState`, or not wanted any more.
    """

    sender: int
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class WantArrived:
    """A follower asks for the result of a round."""

    sender: int
    round: int


@dataclass(frozen=True, slots=True)
class RoundGoneArrived:
    """The answer to a Want: that result is not kept any more."""

    sender: int
    round: int


@dataclass(frozen=True, slots=True)
class Computed:
    """A pass over these samples of `round` is done and its gradient is in the bank.

    `fit`: all that is in the bank would do as the result, if there is nobody else.
    """

    round: int
    ranges: Ranges
    fit: bool = False


@dataclass(frozen=True, slots=True)
class Summed:
    """An `AddUp` is done: `sum` is its head with weight, norm and notes filled in.

    The values are encoded, and this peer has the decoded ones. May be discarded, if a cut came.
    """

    sum: Sum
    digest: bytes


@dataclass(frozen=True, slots=True)
class Concluded:
    """A `Conclude` is done: its head with weight and notes filled in, and in place of a digest what
    no other round has.
    """

    sum: Sum
    digest: bytes


@dataclass(frozen=True, slots=True)
class SpeedMeasured:
    """This peer's speed, an integer of at least 1; it counts from its next Part 0 or Status on."""

    speed: int


@dataclass(frozen=True, slots=True)
class LeaseConfirmed:
    """The arbiter has answered a beat that was sent after the `ConfirmLease` of this attempt."""

    round: int
    attempt: Tag


@dataclass(frozen=True, slots=True)
class GapSeen:
    """Results are missing from here on: the link said so, or the runtime had no room for them."""


@dataclass(frozen=True, slots=True)
class LeaveAsked:
    """The user wants this peer to leave the run in good order.

    `finished`: since there is nothing left to do, and not only for this peer.
    """

    finished: bool = True


@dataclass(frozen=True, slots=True)
class StateOffered:
    """This peer has a state of its own: fresh, or from a checkpoint. Handed in once, at the start.

    If the run has nobody with state and this peer is the first of the roster, the run starts from
    it. Otherwise it serves as a snapshot would, if a record confirms its chain. `record` is that
    of the last committed round, saved with the state; None for a state before any round.
    """

    applied: int
    chain: bytes
    record: Record | None = None


Event = (
    ViewSeen
    | PartArrived
    | SumArrived
    | FillArrived
    | RecordSeen
    | StatusArrived
    | AskArrived
    | SnapshotArrived
    | CaughtUp
    | WantArrived
    | RoundGoneArrived
    | Computed
    | Summed
    | Concluded
    | SpeedMeasured
    | LeaseConfirmed
    | GapSeen
    | LeaveAsked
    | StateOffered
)

Arrival = PartArrived | SumArrived | FillArrived | Summed
"""The events that come with values the runtime has filed."""
