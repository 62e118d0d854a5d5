"""What the peers of a run say to each other about rounds, as bytes for `Link.send`.

    Part      member -> owner      a contribution to one part of the tensor      values beside it
    Sum       owner  -> all        the result of one part; part 0 has the record values beside it,
                                   but for the mean of nothing
    Status    each   -> each       what a peer holds when a cut comes
    Fill      holder -> all        after a cut: a Sum that somebody lacks        values beside it
    Ask, Snapshot, Want, RoundGone: joining                                      Snapshot: state
    Taken     owner  -> member     how much of its Parts is put to use: between data planes only

Values travel as buffers beside the message, never in it. Peers are named by their incarnation.
What the round machine does not need (weights, norms, scalars, digests of the state) it carries
for the data plane without looking at it. docs/rounds.md is the protocol. No torch.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec

from manyhands.collectives.ranges import EMPTY, Ranges
from manyhands.core.errors import Malformed, Oversized
from manyhands.core.peers import NO_VIEW, ViewNumber
from manyhands.links.messages import MESSAGE_BYTES, Incarnation
from manyhands.wire.frames import Buffer

MAX_MEMBERS = 1024
MAX_PARTS = 1 << 18
MAX_SPEED = 1 << 40
MOST_DEATHS = 3  # of peers that were to compute a sample: then it is the sample that kills them
NOTES_BYTES = 16 << 10  # of each opaque field: three of them fit into one message
FORM_CHARS = 300

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
PartIndex = Annotated[int, msgspec.Meta(ge=0, lt=MAX_PARTS)]
Speed = Annotated[int, msgspec.Meta(ge=0, le=MAX_SPEED)]  # 0: not known yet
Digest = Annotated[bytes, msgspec.Meta(max_length=64)]
_Notes = Annotated[bytes, msgspec.Meta(max_length=NOTES_BYTES)]
_Place = Annotated[int, msgspec.Meta(ge=0, lt=MAX_MEMBERS)]
_PartSet = Annotated[bytes, msgspec.Meta(max_length=MAX_PARTS // 8)]
_Weight = Annotated[float, msgspec.Meta(ge=0, le=1e300)]
_Tensor = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
_Form = Annotated[str, msgspec.Meta(max_length=FORM_CHARS)]


class Tag(NamedTuple):
    """Names one attempt at a round: the cut it was made after, and how often it was tried since.

    Tags are ordered; an attempt of a later cut is the newer one.
    """

    cut: ViewNumber
    attempt: _Number

    def __str__(self) -> str:
        return f"{self.cut}/{self.attempt}"


NO_TAG = Tag(NO_VIEW, 0)  # older than every attempt: the first one follows the first cut


class _Piece(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A part of a message."""


class Share(_Piece, frozen=True):
    """Which samples of a round a peer computes, or has computed. May be none."""

    peer: Incarnation
    ranges: Ranges = EMPTY


class Newcomer(NamedTuple):
    """A peer that asked for the state, and the number of its Ask."""

    peer: Incarnation
    number: _Number


class Fault(_Piece, frozen=True):
    """Why a contribution to a part was refused."""

    peer: Incarnation
    tensor: _Tensor | None = None  # the first that is not finite; None: not the bytes of a part


_Faults = Annotated[tuple[Fault, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
_Losses = Annotated[tuple[Ranges, ...], msgspec.Meta(max_length=MOST_DEATHS - 1)]
_Newcomers = Annotated[tuple[Newcomer, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
_Peers = Annotated[tuple[Incarnation, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
_Shares = Annotated[tuple[Share, ...], msgspec.Meta(max_length=MAX_MEMBERS)]


class Record(_Piece, frozen=True):
    """What the lead of a round decides about the next one. Rides on the result of part 0.

    Together with the Statuses of a cut it is all that the members of a round know in common, so
    everything that they must agree on follows from it.
    """

    prev: Digest  # the chain before the round that this record closes
    view: ViewNumber  # the view it was made from
    generation: ViewNumber  # the cut at which followers last took over; NO_VIEW if never
    shares: _Shares  # the members of the next round, in roster order, and their samples
    quarantine: Ranges = EMPTY  # samples of the closed round that were refused for their values
    closing: bool = False  # the next round has no samples; whoever commits it may exit
    snapshot_for: _Newcomers = ()  # newcomers that get the state after this round
    speeds: Annotated[tuple[Speed, ...], msgspec.Meta(max_length=MAX_MEMBERS)] = ()
    sync: Annotated[int, msgspec.Meta(ge=0, le=255)] = 0  # how rounds synchronise; carried along
    form: _Form = ""  # the tensors of the run and how they travel: newcomers compare it with theirs
    classes: Digest = b""  # of those who closed the round; empty if all were of one
    anchors: _Peers = ()  # those of one class that speak for all; none if there is only one
    resync: bool = False  # the next round is one: all adopt what the first anchor of it gives
    num_resyncs: _Count = 0  # so far, that one among them

    @property
    def members(self) -> tuple[int, ...]:
        """The members of the next round."""
        return tuple(share.peer for share in self.shares)

    def share_of(self, peer: int) -> Ranges:
        """The samples of the next round that a peer shall compute; none if it is no member."""
        return next((share.ranges for share in self.shares if share.peer == peer), EMPTY)


class SelfReport(_Piece, frozen=True):
    """What a member says about itself with its contribution to part 0.

    `speed` and `asks` are for the lead's record. The rest is opaque here.
    """

    speed: Speed
    asks: _Newcomers = ()  # newcomers that asked this member for the state
    fingerprint: _Notes = b""  # of states that this member has had lately
    settings: Digest = b""  # digest of the hyper-parameters
    scalars: _Notes = b""
    used: _Notes = b""  # one bit a tensor: this member's passes gave it a gradient


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What every message has in common: nothing but being one."""


class Part(Message, frozen=True, tag=1):
    """A contribution to part k, with its values: the weighted sum over `ranges`.

    The machine makes it without `weight` and with a report of `speed` and `asks` only; the data
    plane fills in the rest before it is sent.
    """

    round: _Count
    attempt: Tag
    k: PartIndex
    ranges: Ranges
    weight: _Weight = 0.0
    report: SelfReport | None = None  # with k = 0
    exact: bool = False  # of a re-sync: the values travel as they are, whatever the codec

    def __post_init__(self) -> None:
        if (self.k == 0) != (self.report is not None):
            raise ValueError("a report comes with part 0, and only with it")


class Sum(Message, frozen=True, tag=2):
    """The result of part k, with its values, encoded once by the owner; of weight 0 it has none.

    `contributions` are all that went into it, in roster order. If `refused` is not empty (some
    contribution was not finite, or of the wrong shape), the attempt is void for everybody.
    `weight`, `squared_norm`, `notes` and `faults` are filled in by the owner's data plane.
    """

    round: _Count
    attempt: Tag
    k: PartIndex
    contributions: _Shares
    refused: Ranges = EMPTY
    record: Record | None = None  # with k = 0
    weight: _Weight = 0.0
    squared_norm: float = 0.0
    notes: _Notes = b""  # of part 0: what the reports of the members come to
    faults: _Faults = ()  # none, and yet refused: too much together, and nobody's fault alone
    exact: bool = False  # as in its Parts

    def __post_init__(self) -> None:
        if (self.k == 0) != (self.record is not None):
            raise ValueError("a record comes with part 0, and only with it")


class Status(Message, frozen=True, tag=3):
    """What a peer held when it saw the cut: its word that it takes nothing older from then on."""

    cut: ViewNumber
    applied: _Count  # rounds committed
    chain: Digest
    previous: Digest  # the chain one round before; empty at the first round this peer has seen
    generation: ViewNumber  # of that history
    newest: Tag  # attempt at round `applied` it holds results of; NO_TAG if none
    held: _PartSet  # the parts of that attempt it holds: bit k, lowest first
    refused: Ranges  # samples refused in those parts
    kept: Tag  # attempt whose result of the last committed round it keeps; NO_TAG if none
    member: bool
    claims: Ranges
    quarantine: Ranges
    speed: Speed
    begun: Tag = NO_TAG  # its newest attempt, or the newest cut before it was active (`since`)
    losses: _Losses = ()  # samples of the round whose claimants have died once, twice
    doubted: Ranges = EMPTY  # refused in this round: this peer knows where its claims have moved


class Fill(Message, frozen=True, tag=4):
    """A Sum that some peer lacks, from one that holds it. `cut` is None in answer to a Want."""

    cut: ViewNumber | None
    sum: Sum


class Ask(Message, frozen=True, tag=5):
    """A newcomer that receives fan-outs asks one peer for the state.

    `number` grows whenever it has to start over: an answer to an Ask before that may be a state
    whose following rounds this peer has missed.
    """

    number: _Number


class Snapshot(Message, frozen=True, tag=6):
    """The head of the state after `applied` rounds; a donor's piece of it comes beside it.

    Every peer that took part in the last of these rounds is a donor, or of several classes the
    anchors: `place` of so many.
    """

    number: _Number  # of the Ask it answers
    applied: _Count
    chain: Digest
    record: Record  # of the last of those rounds
    place: _Place = 0
    num_donors: Annotated[int, msgspec.Meta(ge=1, le=MAX_MEMBERS)] = 1

    def __post_init__(self) -> None:
        if self.place >= self.num_donors:
            raise ValueError(f"donor {self.place} of {self.num_donors}")


class Want(Message, frozen=True, tag=7):
    """A follower knows that a round was committed and asks for its result."""

    round: _Count


class RoundGone(Message, frozen=True, tag=8):
    """The answer to a Want that comes too late."""

    round: _Count


class Taken(Message, frozen=True, tag=9):
    """Bytes of the reader's Parts since this cut that the sender has put to use, in all."""

    cut: ViewNumber
    total: _Count


AnyMessage = Part | Sum | Status | Fill | Ask | Snapshot | Want | RoundGone | Taken

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
_SHOWN_CHARACTERS = 200  # of an error's text: the sender may have written most of it


def record_of(message: AnyMessage) -> Record | None:
    """The record that a message brings, if it does."""
    match message:
        case Sum() | Snapshot():
            return message.record
        case Fill():
            return message.sum.record
        case _:
            return None


def encode(message: AnyMessage) -> bytes:
    """The message as bytes, at most what a link carries. Raises Oversized."""
    data = _ENCODER.encode(message)
    if len(data) > MESSAGE_BYTES:
        raise Oversized(
            f"a {type(message).__name__} of {len(data)} bytes; a link carries {MESSAGE_BYTES}",
            hint="fewer members, or shorter scalars",
        )
    return data


def decode(data: Buffer) -> AnyMessage:
    """The message that these bytes are. Raises Malformed for whatever breaks the schema."""
    if len(data) > MESSAGE_BYTES:
        raise Malformed(f"a message of {len(data)} bytes; at most {MESSAGE_BYTES} are taken")
    try:
        return _DECODER.decode(data)
    # RecursionError: msgpack may nest deeper than the interpreter's stack allows.
    except (msgspec.DecodeError, UnicodeDecodeError, OverflowError, RecursionError) as error:
        text = str(error)[:_SHOWN_CHARACTERS].encode("unicode_escape").decode("ascii")
        raise Malformed(f"a message about rounds breaks its schema: {text}") from None
