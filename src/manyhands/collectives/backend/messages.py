"""What the members of a fixed team say to each other: the `message` of a link's Delivery."""

from __future__ import annotations

from typing import Annotated

import msgspec

from manyhands.core.errors import Malformed
from manyhands.links.messages import Incarnation

MAX_WORLD = 4096
MAX_KEY = 4096  # characters of a key of the store

_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Rank = Annotated[int, msgspec.Meta(ge=0, lt=MAX_WORLD)]
_World = Annotated[int, msgspec.Meta(ge=1, le=MAX_WORLD)]
_Short = Annotated[str, msgspec.Meta(max_length=200)]
_Key = Annotated[str, msgspec.Meta(max_length=MAX_KEY)]


class Word(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What they have in common."""


class Hello(Word, frozen=True, tag=1):
    """To the first peer of the roster: seat me. None: any rank; as many as the others say."""

    rank: _Rank | None
    world: _World | None


class Seats(Word, frozen=True, tag=2):
    """From the first peer of the roster to all: the members in rank order."""

    members: Annotated[tuple[Incarnation, ...], msgspec.Meta(max_length=MAX_WORLD)]


class Refusal(Word, frozen=True, tag=3):
    """The team cannot be seated, or has no seat for the reader."""

    reason: Annotated[str, msgspec.Meta(max_length=1000)]


class Piece(Word, frozen=True, tag=10):
    """Some values of operation `seq` of `stream`; they are its one buffer.

    `form` says what the sender takes the operation for; `step` and `k` which values these are.
    """

    stream: _Count
    seq: _Count
    form: _Short
    step: Annotated[int, msgspec.Meta(ge=0, le=1)]
    k: _Count


class Here(Word, frozen=True, tag=11):
    """The sender is at work on this operation and waits for the reader's data."""

    stream: _Count
    seq: _Count


class Taken(Word, frozen=True, tag=12):
    """Bytes of the reader's pieces that the sender has put to use, in all."""

    total: _Count


class Goodbye(Word, frozen=True, tag=13):
    """The sender has finished all its operations and leaves."""


class Failed(Word, frozen=True, tag=14):
    """The sender cannot go on, and with it the team."""

    reason: Annotated[str, msgspec.Meta(max_length=1000)]


class Ask(Word, frozen=True, tag=20):
    """To the keeper of the store. The value, if any, is the one buffer."""

    id: _Count
    verb: Annotated[str, msgspec.Meta(max_length=20)]
    keys: Annotated[tuple[_Key, ...], msgspec.Meta(max_length=1024)]
    amount: int = 0
    expected: bytes = b""


class Answer(Word, frozen=True, tag=21):
    """From the keeper of the store. The value, if any, is the one buffer."""

    id: _Count
    number: int = 0
    error: Annotated[str, msgspec.Meta(max_length=1000)] = ""


Any = Hello | Seats | Refusal | Piece | Here | Taken | Goodbye | Failed | Ask | Answer
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Any)


def encode(word: Word) -> bytes:
    """As the bytes of a message."""
    return _encoder.encode(word)


def decode(message: bytes) -> Any:
    """Raises Malformed for anything but a message of a team."""
    try:
        return _decoder.decode(message)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"a message that no member of a team sends: {error}") from None
