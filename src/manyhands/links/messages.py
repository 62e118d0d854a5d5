"""The frames that peers, hubs and arbiters exchange: one header schema a kind.

`Data` carries what the layers above say to each other (opaque here) and its buffers. All others
keep the link itself going. docs/wire.md lists them.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from manyhands.core.errors import Malformed, SettingsError
from manyhands.core.peers import PeerId, PeerState, View, ViewNumber
from manyhands.wire.frames import PREFIX_BYTES, Buffer, Limits, Schema, decode_prefix

MESSAGE_BYTES = 60 << 10  # of Data.message; with the rest of the header it stays under 64 KiB
HEADER_BYTES = 64 << 10
MAX_BUFFERS = 4096  # of one message

_Count = Annotated[int, msgspec.Meta(ge=0)]
REASON_CHARS = 1000
_Text = Annotated[str, msgspec.Meta(max_length=REASON_CHARS)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]
Incarnation = Annotated[int, msgspec.Meta(gt=0, le=(1 << 63) - 1)]


def cost_of(message_bytes: int, buffer_bytes: int) -> int:
    """What a message of that size is counted as."""
    return 128 + message_bytes + buffer_bytes


class Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What every frame header has in common: nothing but being one."""


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What all peers of a run agree on. Set by the peer that opens the run, told to the others."""

    beat_s: _Seconds = 1.0
    lease_s: _Seconds = 10.0
    grace_s: _Seconds = 1.0  # for a peer whose connection has closed
    window_bytes: Annotated[int, msgspec.Meta(gt=0, le=1 << 40)] = 8 << 20
    part_bytes: Annotated[int, msgspec.Meta(gt=0, le=16 << 20)] = 2 << 20
    watch_bytes: Annotated[int, msgspec.Meta(gt=0, le=1 << 40)] = 64 << 20

    def __post_init__(self) -> None:
        """The same limits for terms that are made here as for those that come by wire."""
        for name in ("beat_s", "lease_s", "grace_s"):
            check_range(name, getattr(self, name), 86400)
        for name in ("window_bytes", "watch_bytes"):
            check_range(name, getattr(self, name), 1 << 40)
        check_range("part_bytes", self.part_bytes, 16 << 20)
        if self.beat_s > self.lease_s / 2:
            raise SettingsError(
                f"beats of {self.beat_s:g} s are too rare for leases of {self.lease_s:g} s",
                hint="at least two beats a lease",
            )


def check_range(name: str, value: float, most: float) -> None:
    """Raise SettingsError unless 0 < value <= most."""
    if not 0 < value <= most:
        raise SettingsError(f"{name} = {value:g} is out of range", hint=f"above 0, up to {most:g}")


class Return(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A peer that was here before comes back: to its session, or to a restarted hub."""

    session: bytes
    received: _Count  # frames of that session it holds
    view: ViewNumber
    state: PeerState


class Hello(Header, frozen=True):
    """A peer asks to come in; the first frame on a connection."""

    run: _Name
    peer: PeerId
    token: _Text
    terms: Terms
    release: _Text
    back: Return | None = None


class Welcome(Header, frozen=True):
    """The hub lets the peer in. `received`: frames of the resumed session that the hub holds."""

    terms: Terms
    session: bytes
    release: _Text
    resumed: bool
    received: _Count = 0
    clock_s: float = 0.0  # the hub's wall clock: for diagnosis, nothing is decided by it


class Refusal(Header, frozen=True):
    """The hub does not let the peer in, or the peer does not trust the hub."""

    code: _Name
    message: _Text
    hint: _Text = ""


class Dismissal(Header, frozen=True):
    """The peer is no longer part of the run."""

    reason: _Text


class Data(Header, frozen=True):
    """A message between peers. `to` is None for a fan-out. `sizes` are those of its buffers.

    `seq` counts the sender's messages in this stream (fan-outs, or those to this one peer) from 1,
    so that a receiver knows doubles and holes.
    """

    sender: Incarnation
    to: Incarnation | None
    seq: _Count
    sizes: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=MAX_BUFFERS)]
    message: Annotated[bytes, msgspec.Meta(max_length=MESSAGE_BYTES)]

    @property
    def cost(self) -> int:
        """Bytes it is counted as wherever memory is bounded; a message without buffers has some."""
        return cost_of(len(self.message), sum(self.sizes))


class Credit(Header, frozen=True):
    """The reader of `sender`'s messages has taken all up to these sequence numbers."""

    sender: Incarnation  # who returns the credit
    to: Incarnation  # who may send again
    direct_seq: _Count
    fanout_seq: _Count


class NewView(Header, frozen=True):
    """The arbiter's word on who takes part. Over a broker it also tells newcomers the terms."""

    view: View
    terms: Terms | None = None


class Beat(Header, frozen=True):
    """A peer is alive. `received`, `consumed`: frames and payload bytes of this session so far."""

    n: _Count
    received: _Count = 0
    consumed: _Count = 0


class Receipt(Header, frozen=True):
    """What a peer holds, as in a Beat; nobody waits for an answer."""

    received: _Count
    consumed: _Count


class BeatBack(Header, frozen=True):
    """The meeting point has heard beat `n`, and holds `received` frames of this session."""

    n: _Count
    received: _Count = 0


class Ready(Header, frozen=True):
    """A watching peer is now active. `gaps`: how many Gaps it knew of when it said so."""

    gaps: _Count = 0


class Leaving(Header, frozen=True):
    """An active peer is going to leave."""


class Gone(Header, frozen=True):
    """A leaving peer has finished; quiet if `cut` is still the newest cut."""

    cut: ViewNumber


class Resign(Header, frozen=True):
    """The peer leaves at once: it cannot go on (`finished`: because the run is over)."""

    finished: bool
    reason: _Text


class Lost(Header, frozen=True):
    """An active peer found a hole in what `sender` sent it."""

    sender: Incarnation


class Gap(Header, frozen=True):
    """To a watching peer: fan-outs for it were dropped at this place."""

    dropped: _Count


class Bye(Header, frozen=True):
    """The peer closes its link."""


class Missing(Header, frozen=True):
    """Over a broker: a message to this peer came back, its inbox is gone."""

    peer: Incarnation


class Call(Header, frozen=True):
    """Over a broker: what a peer tells the arbiter with every beat, and whenever it has a word.

    Beats may be lost with a broker, so they say how things *are*, and once is as good as twice:
    `wants` is the state the peer asks for, `renewed_at` the newest view it had seen when its inbox
    was replaced (a cut later than that has told everybody).
    """

    peer: PeerId
    n: _Count
    view: ViewNumber
    state: PeerState
    wants: PeerState
    renewed_at: ViewNumber | None = None
    word: bytes = b""  # a frame without payload: what the peer says besides


class Fence(Header, frozen=True):
    """Over a broker: a new arbiter's mark; when it comes back, all earlier views have too."""

    token: _Count


class Marker(Header, frozen=True):
    """Over a broker: sent to oneself, to learn how far two queues have got."""

    token: _Count


SCHEMA: Schema[Header] = Schema(
    {
        1: Hello, 2: Welcome, 3: Refusal, 4: Dismissal, 5: Bye,
        10: Data, 11: Credit, 12: Gap, 13: Lost,
        20: NewView, 21: Beat, 22: BeatBack, 23: Ready, 24: Leaving, 25: Gone, 26: Resign,
        27: Receipt,
        30: Call, 31: Missing, 32: Fence, 33: Marker,
    }
)  # fmt: skip


def decode_head(data: Buffer, limits: Limits) -> tuple[Header, int]:
    """The header and payload size of a frame whose head, and nothing more, is `data`.

    For links that carry the head of a frame apart from its payload. Raises WireError.
    """
    prefix = decode_prefix(data, limits)
    if len(data) != PREFIX_BYTES + prefix.header_bytes:
        raise Malformed(f"a header of {prefix.header_bytes} bytes in {len(data)} bytes")
    return SCHEMA.decode(prefix.kind, memoryview(data)[PREFIX_BYTES:]), prefix.payload_bytes
