"""AMQP 0-9-1 frames: the few methods a data path needs, to bytes and back.

    frame                                   a message is three kinds of frame in a row
    ┌────┬─────────┬──────┬─────────┬────┐  METHOD  publish / deliver / return: whereto, wherefrom
    │kind│ channel │ size │ payload │ CE │  HEADER  body size, and the properties
    └────┴─────────┴──────┴─────────┴────┘  BODY    as many as the body needs, none for no body
      u8    u16      u32

Our own header travels in the properties (table `headers`, entry `h`, a long string), so a receiver
knows what a body is, and where it goes, before the first byte of it. Everything here is pure: bytes
and values, no sockets. Decoders raise Truncated or Malformed and allocate no size they read.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from manyhands.core.errors import Malformed, Oversized, Truncated

if TYPE_CHECKING:
    from manyhands.wire.frames import Buffer

METHOD, HEADER, BODY, HEARTBEAT = 1, 2, 3, 8
CHANNEL = 1  # the one channel of a connection; channel 0 is the connection itself
HEAD_BYTES = 7
FRAME_BYTES = 8  # what a frame costs around its payload
FRAME_END = b"\xce"
MIN_FRAME_MAX = 4096  # the specification's own lower bound

_HEAD = struct.Struct(">BHI")
_CONTENT = struct.Struct(">HHQH")  # class, weight, body bytes, property flags
_U8, _U16, _U32 = struct.Struct(">B"), struct.Struct(">H"), struct.Struct(">I")
_U64 = struct.Struct(">Q")
_TAG = struct.Struct(">QB")  # a tag and its bits
_BASIC = 60
_HAS_TYPE, _HAS_ENCODING, _HAS_HEADERS, _MORE_FLAGS = 1 << 15, 1 << 14, 1 << 13, 1
_ENTRY = b"\x01hS"  # key "h", a long string
# Bytes of a table value by its type; those not listed carry their length in four bytes.
_FIXED = {**dict.fromkeys(b"tbB", 1), **dict.fromkeys(b"sUu", 2), **dict.fromkeys(b"Iif", 4),
          **dict.fromkeys(b"LldT", 8), ord("D"): 5, ord("V"): 0}  # fmt: skip
_COUNTED = b"SxFA"


class Method(IntEnum):
    """Class number << 16 | method number."""

    CONNECTION_CLOSE = 10 << 16 | 50
    CONNECTION_CLOSE_OK = 10 << 16 | 51
    CONNECTION_BLOCKED = 10 << 16 | 60
    CONNECTION_UNBLOCKED = 10 << 16 | 61
    CHANNEL_CLOSE = 20 << 16 | 40
    CHANNEL_CLOSE_OK = 20 << 16 | 41
    EXCHANGE_DELETE = 40 << 16 | 20
    EXCHANGE_DELETE_OK = 40 << 16 | 21
    EXCHANGE_BIND = 40 << 16 | 30
    EXCHANGE_BIND_OK = 40 << 16 | 31
    QUEUE_BIND = 50 << 16 | 20
    QUEUE_BIND_OK = 50 << 16 | 21
    QUEUE_DELETE = 50 << 16 | 40
    QUEUE_DELETE_OK = 50 << 16 | 41
    QUEUE_UNBIND = 50 << 16 | 50
    QUEUE_UNBIND_OK = 50 << 16 | 51
    BASIC_CONSUME = 60 << 16 | 20
    BASIC_CONSUME_OK = 60 << 16 | 21
    BASIC_CANCEL = 60 << 16 | 30
    BASIC_CANCEL_OK = 60 << 16 | 31
    BASIC_PUBLISH = 60 << 16 | 40
    BASIC_RETURN = 60 << 16 | 50
    BASIC_DELIVER = 60 << 16 | 60
    BASIC_ACK = 60 << 16 | 80
    BASIC_NACK = 60 << 16 | 120


# -- what the broker says -------------------------------------------------------------------------


class Deliver(NamedTuple):
    """A message for one of our consumers; its header and body follow."""

    consumer_tag: str
    delivery_tag: int
    redelivered: bool


class Return(NamedTuple):
    """A mandatory message of ours that no queue took; its header and body follow."""

    reply_code: int
    reply_text: str
    routing_key: str


class Confirm(NamedTuple):
    """The broker took (`ok`) or refused a message of ours, or all up to it (`multiple`)."""

    tag: int
    multiple: bool
    ok: bool


class Cancelled(NamedTuple):
    """The broker ended a consumer: its queue is gone."""

    consumer_tag: str


class Blocked(NamedTuple):
    """The broker reads no more from this connection until it says Unblocked."""

    reason: str


class Unblocked(NamedTuple):
    """The broker reads again."""


class Closed(NamedTuple):
    """The broker closes the channel or the whole connection; `answer` is our close-ok."""

    reply_code: int
    reply_text: str
    answer: bytes


class Ok(NamedTuple):
    """The answer to a method of ours that has one."""

    method: Method


Incoming = Deliver | Return | Confirm | Cancelled | Blocked | Unblocked | Closed | Ok
_OKS = frozenset(method for method in Method if method.name.endswith("_OK"))


def decode_head(data: Buffer, offset: int, frame_max: int) -> tuple[int, int, int]:
    """Kind, channel and payload bytes of the frame at `offset`; Oversized above `frame_max`."""
    kind, channel, size = _HEAD.unpack_from(data, offset)
    if kind not in (METHOD, HEADER, BODY, HEARTBEAT) or channel > CHANNEL:
        raise Malformed(f"not a frame of this connection: kind {kind}, channel {channel}")
    if size > frame_max - FRAME_BYTES:
        raise Oversized(f"a frame of {size + FRAME_BYTES} bytes; {frame_max} were agreed on")
    return kind, channel, size


def decode_method(payload: bytes) -> Incoming:
    """The method in a METHOD frame's payload; bytes after the fields we use are ignored."""
    fields = _Fields(payload)
    number = fields.take(_U32)
    match number:
        case Method.BASIC_DELIVER:
            return Deliver(fields.name(), *_tagged(fields))
        case Method.BASIC_ACK | Method.BASIC_NACK:
            return Confirm(*_tagged(fields), ok=number == Method.BASIC_ACK)
        case Method.BASIC_RETURN:
            code, text, _exchange = fields.take(_U16), fields.name(), fields.name()
            return Return(code, text, fields.name())
        case Method.BASIC_CANCEL:
            return Cancelled(fields.name())
        case Method.CONNECTION_BLOCKED:
            return Blocked(fields.name())
        case Method.CONNECTION_UNBLOCKED:
            return Unblocked()
        case Method.CONNECTION_CLOSE:
            return Closed(fields.take(_U16), fields.name(), CONNECTION_CLOSE_OK)
        case Method.CHANNEL_CLOSE:
            return Closed(fields.take(_U16), fields.name(), CHANNEL_CLOSE_OK)
        case _ if number in _OKS:
            return Ok(Method(number))
        case _:
            raise Malformed(f"method {number >> 16}.{number & 0xFFFF} was not expected here")


def decode_content(payload: bytes) -> tuple[int, int]:
    """Body bytes and property flags of a HEADER frame; `decode_header` reads the rest."""
    if len(payload) < _CONTENT.size:
        raise Truncated("a content header that ends before its body size")
    class_number, _weight, body_bytes, flags = _CONTENT.unpack_from(payload)
    if class_number != _BASIC:
        raise Malformed(f"a content header of class {class_number}")
    return body_bytes, flags


def decode_header(payload: bytes, flags: int) -> bytes:
    """Our own header out of a HEADER frame; empty when the message carries none."""
    if flags & _MORE_FLAGS:
        raise Malformed("unknown properties in a content header")
    fields = _Fields(payload, _CONTENT.size)
    for _ in range(bool(flags & _HAS_TYPE) + bool(flags & _HAS_ENCODING)):
        fields.name()
    if not flags & _HAS_HEADERS:
        return b""
    table = _Fields(fields.counted())
    while not table.at_end():  # brokers may add entries of their own, before or after ours
        ours = table.starts_with(_ENTRY)
        table.skip(table.take(_U8))
        kind = table.take(_U8)
        if ours:
            return table.counted()
        if kind in _COUNTED:
            table.skip(table.take(_U32))
        elif kind in _FIXED:
            table.skip(_FIXED[kind])
        else:
            raise Malformed(f"a header table with a value of unknown type {chr(kind)!r}")
    return b""


class _Fields:
    """A cursor over a payload that never runs past its end."""

    def __init__(self, data: bytes, at: int = 0) -> None:
        self._data = data
        self._at = at

    def take(self, number: struct.Struct) -> int:
        start = self._at
        self.skip(number.size)
        return int(number.unpack_from(self._data, start)[0])

    def skip(self, size: int) -> None:
        if self._at + size > len(self._data):
            raise Truncated("a method or header that ends in the middle of a field")
        self._at += size

    def counted(self) -> bytes:
        return self._bytes(self.take(_U32))

    def name(self) -> str:
        return self._bytes(self.take(_U8)).decode("utf-8", "replace")

    def at_end(self) -> bool:
        return self._at == len(self._data)

    def starts_with(self, prefix: bytes) -> bool:
        return self._data.startswith(prefix, self._at)

    def _bytes(self, size: int) -> bytes:
        self.skip(size)
        return self._data[self._at - size : self._at]


def _tagged(fields: _Fields) -> tuple[int, bool]:
    return fields.take(_U64), bool(fields.take(_U8) & 1)


# -- what we say ----------------------------------------------------------------------------------


def frame(kind: int, channel: int, payload: bytes) -> bytes:
    """One whole frame."""
    return b"%b%b%b" % (_HEAD.pack(kind, channel, len(payload)), payload, FRAME_END)


def method(number: Method, arguments: bytes = b"", *, channel: int = CHANNEL) -> bytes:
    """A METHOD frame."""
    return frame(METHOD, channel, _U32.pack(number) + arguments)


def name(text: str) -> bytes:
    """A short string. Raises Oversized above its 255 bytes."""
    data = text.encode()
    if len(data) > 255:
        raise Oversized(f"an AMQP name of {len(data)} bytes; at most 255 are possible")
    return _U8.pack(len(data)) + data


def bind(queue: str, exchange: str, routing_key: str) -> bytes:
    """queue.bind, with an answer."""
    return method(Method.QUEUE_BIND, _binding(queue, exchange, routing_key) + b"\0" + _NO_TABLE)


def unbind(queue: str, exchange: str, routing_key: str) -> bytes:
    """queue.unbind, which always has an answer."""
    return method(Method.QUEUE_UNBIND, _binding(queue, exchange, routing_key) + _NO_TABLE)


def delete_exchange(exchange: str) -> bytes:
    """exchange.delete, with an answer, also when there is no such exchange."""
    return method(Method.EXCHANGE_DELETE, _RESERVED + name(exchange) + b"\0")


def bind_exchange(destination: str, source: str, routing_key: str) -> bytes:
    """exchange.bind: what `source` routes by that key goes to `destination` too; with an answer."""
    arguments = _binding(destination, source, routing_key) + b"\0" + _NO_TABLE
    return method(Method.EXCHANGE_BIND, arguments)


def delete_queue(queue: str) -> bytes:
    """queue.delete, with an answer, also when there is no such queue."""
    return method(Method.QUEUE_DELETE, _RESERVED + name(queue) + b"\0")


def consume(queue: str, consumer_tag: str, *, no_ack: bool, exclusive: bool) -> bytes:
    """basic.consume, with an answer."""
    bits = _U8.pack(no_ack << 1 | exclusive << 2)
    arguments = _RESERVED + name(queue) + name(consumer_tag) + bits + _NO_TABLE
    return method(Method.BASIC_CONSUME, arguments)


def cancel(consumer_tag: str) -> bytes:
    """basic.cancel, with an answer."""
    return method(Method.BASIC_CANCEL, name(consumer_tag) + b"\0")


def ack(delivery_tag: int, multiple: bool) -> bytes:
    """basic.ack of a delivery."""
    return method(Method.BASIC_ACK, _TAG.pack(delivery_tag, multiple))


def publish(
    exchange: str,
    routing_key: str,
    header: bytes,
    buffers: Sequence[Buffer],
    *,
    mandatory: bool,
    frame_max: int,
) -> list[Buffer]:
    """A whole message as pieces to write in order; the body's are views of `buffers`, not copies.

    Raises Oversized when `header` does not fit into one frame, which is all AMQP allows it.
    """
    views = [view.cast("B") for view in map(memoryview, buffers) if view.nbytes]
    body_bytes = sum(map(len, views))
    table = b"%b%b%b" % (_ENTRY, _U32.pack(len(header)), header)
    content = _CONTENT.pack(_BASIC, 0, body_bytes, _HAS_HEADERS) + _U32.pack(len(table)) + table
    if len(content) > frame_max - FRAME_BYTES:
        raise Oversized(
            f"a header of {len(header)} bytes does not fit the broker's frames of {frame_max}",
            hint="raise frame_max in rabbitmq.conf (its default is 131072)",
        )
    target = _RESERVED + name(exchange) + name(routing_key) + _U8.pack(mandatory)
    head = method(Method.BASIC_PUBLISH, target) + frame(HEADER, CHANNEL, content)
    if not body_bytes:
        return [head]
    cut = cut_body(frame_max - FRAME_BYTES, body_bytes)
    first = head + _body_head(min(cut.size, body_bytes))
    return [first, *cut.lay_out(views, memoryview(cut.seams))]


class Cut(NamedTuple):
    """A body as frames of one size, and perhaps a shorter last one: all but the first head."""

    size: int
    body_bytes: int
    seams: bytes  # what stands between two frames, for each two, and the end mark of the last
    ends: Sequence[int]  # where each seam ends
    num_bytes: int

    def lay_out(self, body: Sequence[memoryview], seams: memoryview) -> list[memoryview]:
        """The pieces of body and seams in the order of the wire."""
        pieces: list[memoryview] = []
        for i in range(len(self.ends)):
            start = i * self.size
            pieces += part(body, start, min(self.size, self.body_bytes - start))
            pieces.append(seams[i * FRAME_BYTES : (i + 1) * FRAME_BYTES])
        return pieces


@lru_cache(maxsize=64)  # the parts of a run have one size, or a few
def cut_body(size: int, body_bytes: int) -> Cut:
    """The cut of a body, which is not empty, into frames of this size."""
    starts = range(0, body_bytes, size)
    heads = (_body_head(min(size, body_bytes - start)) for start in starts[1:])
    seams = b"".join(FRAME_END + head for head in heads) + FRAME_END
    ends = [(i + 1) * (size + FRAME_BYTES) for i in range(len(starts) - 1)]
    num_bytes = body_bytes + len(seams)
    return Cut(size, body_bytes, seams, (*ends, num_bytes), num_bytes)


def part(views: Sequence[memoryview], start: int, size: int) -> list[memoryview]:
    """`size` bytes of what `views` are together, from `start` on."""
    if len(views) == 1:
        return [views[0][start : start + size]] if size else []
    taken: list[memoryview] = []
    for view in views:
        if start >= len(view):
            start -= len(view)
            continue
        if not size:
            break
        taken.append(view[start : start + size])
        size -= len(taken[-1])
        start = 0
    return taken


def _body_head(size: int) -> bytes:
    return _HEAD.pack(BODY, CHANNEL, size)


_RESERVED = b"\0\0"  # a field of every old method; RabbitMQ ignores it
_NO_TABLE = b"\0\0\0\0"


def _binding(queue: str, exchange: str, routing_key: str) -> bytes:
    return _RESERVED + name(queue) + name(exchange) + name(routing_key)


HEARTBEAT_FRAME = frame(HEARTBEAT, 0, b"")
CONNECTION_CLOSE = method(
    Method.CONNECTION_CLOSE, _U16.pack(200) + name("closed") + b"\0\0\0\0", channel=0
)
CONNECTION_CLOSE_OK = method(Method.CONNECTION_CLOSE_OK, channel=0)
CHANNEL_CLOSE_OK = method(Method.CHANNEL_CLOSE_OK)
