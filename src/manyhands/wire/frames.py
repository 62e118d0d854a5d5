"""Frames: what travels on every link, as bytes.

    prefix, 16 bytes           header                     payload
    ┌────┬───┬────┬─────┬─────┬──────────────────────────┬──────────────────────────────┐
    │ MH │ v │kind│ u32 │ u64 │ msgpack, one schema/kind │ raw buffers, end to end      │
    └────┴───┴────┴─────┴─────┴──────────────────────────┴──────────────────────────────┘
                    │     └─ payload bytes
                    └─ header bytes

Sending gathers: the prefix and header are one small `bytes`, the payload is the caller's own
memory. Receiving scatters: the header is read and checked first, then whoever knows what it means
says where the payload goes. Nothing here allocates a size that only the sender has named: both
sizes are compared with `Limits` before a byte of them is read. No torch, no sockets.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import msgspec

from manyhands.core.errors import Malformed, Oversized, Truncated, UsageError, WrongVersion

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

MAGIC = b"MH"
VERSION = 1
_PREFIX = struct.Struct("<2sBBIQ")
PREFIX_BYTES = _PREFIX.size

# How much of an error's text goes into ours: the sender may have written most of it.
_SHOWN_CHARACTERS = 200

Buffer = bytes | bytearray | memoryview


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The largest header and payload that a receiver takes."""

    header_bytes: int = 64 << 10
    payload_bytes: int = 1 << 20


class Prefix(NamedTuple):
    """What the first 16 bytes of a frame say, already within limits."""

    kind: int
    header_bytes: int
    payload_bytes: int


def encode_prefix(kind: int, header_bytes: int, payload_bytes: int) -> bytes:
    """The 16 bytes that open a frame."""
    return _PREFIX.pack(MAGIC, VERSION, kind, header_bytes, payload_bytes)


def decode_prefix(data: Buffer, limits: Limits) -> Prefix:
    """Read the first 16 bytes of `data`.

    Raises Truncated, Malformed (not our magic), WrongVersion or Oversized; the version is judged
    before the sizes, since another version may mean something else by them.
    """
    data = as_bytes(data)
    if len(data) < PREFIX_BYTES:
        raise Truncated(f"a frame starts with {PREFIX_BYTES} bytes, only {len(data)} came")
    magic, version, kind, header_bytes, payload_bytes = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise Malformed(
            f"expected a manyhands frame, got bytes that start with {magic!r}",
            hint="is something else listening on this port, or TLS on one side only?",
        )
    if version != VERSION:
        raise WrongVersion(
            f"this side speaks version {VERSION} of the wire protocol, the other {version}",
            version=version,
            hint="install the same release of manyhands on both sides",
        )
    if header_bytes > limits.header_bytes:
        raise Oversized(f"header of {header_bytes} bytes; at most {limits.header_bytes} are taken")
    if payload_bytes > limits.payload_bytes:
        raise Oversized(
            f"payload of {payload_bytes} bytes; at most {limits.payload_bytes} are taken",
            hint="send larger data as several parts",
        )
    return Prefix(kind, header_bytes, payload_bytes)


H = TypeVar("H", bound=msgspec.Struct)


class Schema(Generic[H]):
    """Which header each kind of frame has: encodes and decodes headers, nothing else."""

    def __init__(self, kinds: Mapping[int, type[H]]) -> None:
        self._kind_of = {header: kind for kind, header in kinds.items()}
        self._decoders = {kind: msgspec.msgpack.Decoder(header) for kind, header in kinds.items()}
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, header: H, payload_bytes: int = 0) -> bytes:
        """Prefix and header of a frame as one `bytes`; the payload follows it on the wire."""
        body = self._encoder.encode(header)
        return encode_prefix(self._kind_of[type(header)], len(body), payload_bytes) + body

    def decode(self, kind: int, header: Buffer) -> H:
        """The header of a frame of that kind. Raises Malformed for whatever breaks the schema."""
        decoder = self._decoders.get(kind)
        if decoder is None:
            raise Malformed(f"frame kind {kind} is not one of {sorted(self._decoders)}")
        try:
            return decoder.decode(header)
        # RecursionError: msgpack may nest deeper than the interpreter's stack allows.
        except (msgspec.DecodeError, UnicodeDecodeError, OverflowError, RecursionError) as error:
            reason = _shown(error)
            raise Malformed(f"header of frame kind {kind} breaks its schema: {reason}") from None


def _shown(error: Exception) -> str:
    """The error's text, fit for one line of a log: msgspec quotes the sender's field names."""
    return str(error)[:_SHOWN_CHARACTERS].encode("unicode_escape").decode("ascii")


class FrameReader:
    """Cuts a byte stream into frames, each payload straight into memory the caller names.

    `recv_into(view)` reads at least one byte into `view` and returns how many, 0 at the end of
    the stream. Use: `next()`, then exactly one of `payload_into()` or `skip_payload()`.
    Not thread-safe. Small reads go through one read-ahead buffer; of a payload at most that much
    is copied, the rest is received in place. After a WireError from `next()` or a Truncated the
    place in the stream is lost: close it. `limits` may be replaced between two frames.
    """

    def __init__(
        self, recv_into: Callable[[memoryview], int], limits: Limits, read_ahead: int = 1 << 14
    ) -> None:
        self._recv_into = recv_into
        self.limits = limits
        self._read_ahead = max(read_ahead, PREFIX_BYTES)
        self._ahead = memoryview(bytearray(self._read_ahead))
        self._start = self._end = 0
        self._payload_left = 0

    def next(self) -> tuple[Prefix, bytes] | None:
        """The next frame's prefix and header bytes; None at a clean end of the stream."""
        if self._payload_left:  # not an assert: under -O this would read payload as frames
            raise UsageError(
                f"{self._payload_left} bytes of the last frame's payload were not read",
                hint="call payload_into() or skip_payload() after every next()",
            )
        if not self._fill(PREFIX_BYTES, may_end=True):
            return None
        prefix = decode_prefix(self._ahead[self._start : self._end], self.limits)
        self._start += PREFIX_BYTES
        self._fill(prefix.header_bytes)
        header = bytes(self._ahead[self._start : self._start + prefix.header_bytes])
        self._start += prefix.header_bytes
        self._payload_left = prefix.payload_bytes
        return prefix, header

    def payload_into(self, targets: Iterable[memoryview]) -> None:
        """Receive the payload into `targets`, which together have its exact size.

        Raises Malformed before a byte is written when they do not; the payload can still be
        taken or skipped then. Raises Truncated, with some targets written, at an early end.
        """
        views = [as_bytes(target) for target in targets]
        expected = sum(len(view) for view in views)
        if expected != self._payload_left:
            raise Malformed(f"{expected} bytes expected, the frame has {self._payload_left}")
        self._payload_left = 0
        for view in views:
            ready = min(len(view), self._end - self._start)
            view[:ready] = self._ahead[self._start : self._start + ready]
            self._start += ready
            self._receive_exactly(view[ready:])

    def skip_payload(self) -> None:
        """Read the payload and forget it, in bounded memory."""
        ready = min(self._payload_left, self._end - self._start)
        self._start += ready
        left = self._payload_left - ready
        self._payload_left = 0
        if left:  # the read-ahead buffer is empty then, so it can serve as the bin
            self._start = self._end = 0
        while left:
            piece = self._ahead[: min(left, len(self._ahead))]
            self._receive_exactly(piece)
            left -= len(piece)

    def _fill(self, num_bytes: int, *, may_end: bool = False) -> bool:
        """Have `num_bytes` in the read-ahead buffer; False at a clean end that is allowed."""
        have = self._end - self._start
        if have >= num_bytes:
            return True
        self._make_room(num_bytes)
        while self._end < num_bytes:
            # Not all that fits: what is read ahead of a payload has to be copied into it.
            stop = max(num_bytes, self._read_ahead)
            got = self._recv_into(self._ahead[self._end : stop])
            if not got:
                if may_end and self._end == 0:
                    return False
                raise Truncated(f"the stream ended after {self._end} of {num_bytes} bytes")
            self._end += got
        return True

    def _make_room(self, num_bytes: int) -> None:
        """Move what is read ahead to the front of a buffer of at least `num_bytes`.

        The buffer grows only for a header, so only to a size that `limits` allowed.
        """
        kept = bytes(self._ahead[self._start : self._end])
        if num_bytes > len(self._ahead):
            self._ahead = memoryview(bytearray(num_bytes))
        self._ahead[: len(kept)] = kept
        self._start, self._end = 0, len(kept)

    def _receive_exactly(self, target: memoryview) -> None:
        done = 0
        while done < len(target):
            got = self._recv_into(target[done:])
            if not got:
                raise Truncated(f"the stream ended {len(target) - done} bytes before the payload")
            done += got


def payload_size(buffers: Sequence[Buffer]) -> int:
    """Bytes of these buffers together. Raises UsageError for one that is not contiguous."""
    return sum(as_bytes(buffer).nbytes for buffer in buffers)


def as_bytes(buffer: Buffer) -> memoryview:
    """The buffer's memory as a one-dimensional view of bytes, whatever its items are.

    `len()` of it is its size, and slices of two such views can be assigned to each other, which
    a view of other items (even ctypes' own bytes, "<B") does not allow. Raises UsageError for a
    buffer that is not contiguous.
    """
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise UsageError(
            f"a buffer of shape {view.shape} and strides {view.strides} is not contiguous",
            hint="pass bytes(buffer), or the memory as it lies",
        )
    if view.ndim == 1 and view.format == "B":
        return view
    # cast() refuses shapes with a zero in them, which have no memory to show anyway.
    return view.cast("B") if view.nbytes else memoryview(b"")
