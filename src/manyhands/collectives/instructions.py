"""Instructions: everything that a round machine asks of its runtime.

They are carried out in the order given, before the next event that they cause is handed in. An
instruction is a plain value; the runtime has the tensors that it speaks of.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from manyhands.collectives.events import Arrival
from manyhands.collectives.messages import (
    AnyMessage,
    Fault,
    Part,
    Record,
    Share,
    Snapshot,
    Sum,
    Tag,
)
from manyhands.collectives.ranges import Ranges
from manyhands.core.peers import ViewNumber
from manyhands.links.messages import Gone, Leaving, Ready, Resign


@dataclass(frozen=True, slots=True)
class Begin:
    """An attempt at a round begins. A peer that is not among its members only follows.

    A follower need not have heard of the latest cut: then others may be members by now.

    Part k belongs to `members[k % len(members)]`. With what the last `Compute` of the round says,
    the runtime may send a Part as soon as its values are final, before the machine asks for it;
    it must then not send it again for the same attempt.
    """

    round: int
    attempt: Tag
    members: tuple[int, ...]
    claims: Ranges  # this peer's samples; those already in the bank stay there
    exact: bool = False  # a re-sync: values travel as they are


@dataclass(frozen=True, slots=True)
class Compute:
    """Run passes over these samples and add their gradients to the bank of the round.

    Each pass is reported by `Computed`; in which order, and in how many, is the runtime's choice.
    Never empty, and never asks twice for the same sample, unless the bank was dropped since.
    `risky`: somebody has died who was to compute some of them. Begin when all that was sent before
    has reached the meeting point: if they kill, others must be able to tell that they did.
    """

    round: int
    ranges: Ranges
    risky: bool = False


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to one peer, or to all others (None), with the values it speaks of.

    - Part: slice k of the whole bank; fill in the weight and, with k = 0, the report. When `to` is
      this peer itself, hand it back as `PartArrived` instead.
    - Sum: the encoded result of (round, attempt, k), as `Summed` has reported it.
    - Fill: the same result, held or kept.
    - Snapshot: the state after `applied` rounds, as it is once the user's thread has stepped.
    - the others have no values.
    """

    to: int | None
    message: AnyMessage


@dataclass(frozen=True, slots=True)
class AddUp:
    """Add up the contributions to part `sum.k` in the order given, encode, adopt what decodes.

    Refused contributions are added all the same: the attempt is void, but it must be seen to be.
    Report `Summed`. The contributions of other peers to this part are not needed afterwards.
    """

    sum: Sum


@dataclass(frozen=True, slots=True)
class Conclude:
    """This peer is alone, and its contribution, which `part` is the first part of, is the result.

    Report `Concluded`. Nobody will be sent the values, so `sum` is the head of all parts.
    """

    part: Part
    sum: Sum


@dataclass(frozen=True, slots=True)
class Commit:
    """The round is committed: its result is that of this attempt, and it must be applied.

    Keep the encoded result until `Stable` or the next Commit; one that was concluded `alone` nobody
    else will ask for. All contributions to the round, the bank, and results of other attempts at it
    are dropped with this. `sums` are its heads, in order of parts; `alone` has one for all.
    """

    round: int
    attempt: Tag
    sums: tuple[Sum, ...]
    chain: bytes  # after the round
    record: Record  # governs the next round
    member: bool  # this peer contributed; otherwise it follows
    closing: bool  # it had no samples, and none follow
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Stable:
    """The state after `applied` rounds cannot be lost or replaced any more, in this generation.

    The kept result of round `applied - 1` may go; checkpoints and reports may use the state.
    """

    applied: int
    chain: bytes


@dataclass(frozen=True, slots=True)
class Retry:
    """An attempt was void since these samples were refused.

    They are in quarantine from now on, or others compute them; or a Stop follows.
    """

    round: int
    attempt: Tag
    refused: Ranges
    contributions: tuple[Share, ...] = ()  # those that were refused
    faults: tuple[Fault, ...] = ()  # of them, as far as this peer knows


@dataclass(frozen=True, slots=True)
class Lost:
    """Whoever was to compute these samples has died, too often for chance. A Stop follows."""

    round: int
    ranges: Ranges


@dataclass(frozen=True, slots=True)
class DropBank:
    """Nothing of what this peer has computed for `round` counts, nor of what it is computing.

    A pass under way is not reported when it ends. Some of it may be asked for anew.
    """

    round: int


@dataclass(frozen=True, slots=True)
class DropParts:
    """Contributions to this attempt at a round are not needed any more."""

    round: int
    attempt: Tag


@dataclass(frozen=True, slots=True)
class DropSums:
    """Results of this attempt at a round are not needed any more."""

    round: int
    attempt: Tag


@dataclass(frozen=True, slots=True)
class Discard:
    """The values that came with the event just handled are not needed."""

    arrival: Arrival


@dataclass(frozen=True, slots=True)
class TakeState:
    """A snapshot is the base from here on: load its state. It may still turn out to be useless."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class DropState:
    """Start over as a newcomer: the state and everything received so far is of no use."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tell:
    """Say this to the arbiter."""

    word: Ready | Leaving | Gone | Resign


@dataclass(frozen=True, slots=True)
class ConfirmLease:
    """Report `LeaseConfirmed` once a beat sent after this was answered: a commit waits for it."""

    round: int
    attempt: Tag


@dataclass(frozen=True, slots=True)
class Settled:
    """A cut was answered: for the log. `stands`: the round that was under way was saved."""

    cut: ViewNumber
    stands: bool
    target: int  # rounds committed by everybody who goes on
    filled: bool  # somebody lacked something that others held
    sent_back: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Generation:
    """No member was left: this peer and other followers go on from `applied` rounds.

    What the members had committed after that is lost, at most the rounds this peer had not seen;
    or all of it, if it goes on from a state of its `own` that nobody has confirmed.
    """

    cut: ViewNumber
    applied: int
    own: bool = False


class StopReason(enum.Enum):
    """Why a machine takes part no longer."""

    FINISHED = "finished"  # the run is over, and this peer has its last state
    LEFT = "left"  # as the user wanted
    OVER = "over"  # others have finished the run; there was nothing left to do here
    EXCLUDED = "excluded"  # the run goes on without this incarnation: rejoin as a new one
    SENT_BACK = "sent back"  # this peer's state is of no use to the others: rejoin as a new one
    REFUSED = "refused"  # a contribution could not be used, and the run is to stop for that
    DEADLY = "deadly"  # peer after peer died that was to compute some samples
    MISFIT = "misfit"  # its tensors or codec are not those of the run: rejoining does not help


@dataclass(frozen=True, slots=True)
class Stop:
    """The last instruction. Every further event is ignored, and uncommitted work is discarded."""

    reason: StopReason
    text: str


Instruction = (
    Begin
    | Compute
    | Send
    | AddUp
    | Conclude
    | Commit
    | Stable
    | Retry
    | Lost
    | DropBank
    | DropParts
    | DropSums
    | Discard
    | TakeState
    | DropState
    | Tell
    | ConfirmLease
    | Settled
    | Generation
    | Stop
)
