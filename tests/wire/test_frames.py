"""Frames: every stream comes back as it was sent, and every bad one gives its own error."""

from __future__ import annotations

import array
import contextlib
import itertools
import tracemalloc
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.core.errors import (
    Malformed,
    Oversized,
    Truncated,
    UsageError,
    WireError,
    WrongVersion,
)
from manyhands.wire.frames import (
    PREFIX_BYTES,
    VERSION,
    FrameReader,
    Limits,
    Schema,
    as_bytes,
    decode_prefix,
    encode_prefix,
    payload_size,
)

from . import fuzz
from .fuzz import Credit, Data, Hello

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

LIMITS = Limits(header_bytes=4096, payload_bytes=1 << 16)
SCHEMA: Schema[Any] = fuzz.SCHEMA
HUGE = 2**62


class Chunks:
    """A stream of `data` in pieces of the given sizes, over and over."""

    def __init__(self, data: bytes, sizes: Sequence[int] = (1 << 20,)) -> None:
        self.data, self.sizes, self.reads = data, sizes, 0

    def __call__(self, view: memoryview) -> int:
        num = min(len(view), self.sizes[self.reads % len(self.sizes)], len(self.data))
        self.reads += 1
        view[:num] = self.data[:num]
        self.data = self.data[num:]
        return num


def encode(frames: Iterable[tuple[msgspec.Struct, bytes]]) -> bytes:
    return b"".join(SCHEMA.encode(head, len(payload)) + payload for head, payload in frames)


def decode(reader: FrameReader) -> list[tuple[msgspec.Struct, bytes]]:
    frames: list[tuple[msgspec.Struct, bytes]] = []
    while (frame := reader.next()) is not None:
        payload = bytearray(frame[0].payload_bytes)
        reader.payload_into([memoryview(payload)])
        frames.append((SCHEMA.decode(frame[0].kind, frame[1]), bytes(payload)))
    return frames


integers = st.integers(-(2**63), 2**63 - 1)
headers = st.one_of(
    st.builds(Hello, st.text(max_size=40), st.text(max_size=9), st.text(max_size=9), integers),
    st.builds(
        Data,
        integers,
        st.none() | integers,
        integers,
        st.lists(integers, max_size=5).map(tuple),
        st.binary(max_size=300),
    ),
    st.builds(Credit, integers, integers),
)
frame_lists = st.lists(st.tuples(headers, st.binary(max_size=200)), max_size=5)
chunk_sizes = st.lists(st.integers(1, 50), min_size=1, max_size=5)

SAMPLE = encode([(Data(1, None, 2, (3, 4), b"abc"), b"1234567"), (Credit(1, 2), b"")])


# --- what is sent arrives -------------------------------------------------------------------


@given(frame_lists, chunk_sizes, st.integers(0, 100))
def test_any_frames_in_any_chunks_arrive_as_sent(frames, sizes, read_ahead):
    reader = FrameReader(Chunks(encode(frames), sizes), LIMITS, read_ahead=read_ahead)
    assert decode(reader) == frames
    assert reader.next() is None


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=6), chunk_sizes)
def test_a_payload_is_scattered_over_its_targets(payload, cuts, sizes):
    bounds = [0, *sorted(min(cut, len(payload)) for cut in cuts), len(payload)]
    parts = [bytearray(b - a) for a, b in itertools.pairwise(bounds)]
    data = encode([(Credit(1, 2), payload), (Credit(3, 4), b"")])
    reader = FrameReader(Chunks(data, sizes), LIMITS, read_ahead=64)
    reader.next()
    reader.payload_into(memoryview(part) for part in parts)
    assert b"".join(parts) == payload
    assert decode(reader) == [(Credit(3, 4), b"")]


@given(frame_lists, chunk_sizes)
def test_payloads_can_be_skipped(frames, sizes):
    reader = FrameReader(Chunks(encode(frames), sizes), LIMITS, read_ahead=32)
    seen: list[msgspec.Struct] = []
    while (frame := reader.next()) is not None:
        seen.append(SCHEMA.decode(frame[0].kind, frame[1]))
        reader.skip_payload()
    assert seen == [header for header, _ in frames]


def test_targets_need_not_be_views_of_bytes():
    target = array.array("I", [0, 0])
    reader = FrameReader(Chunks(encode([(Credit(1, 2), b"\x01\0\0\0\x02\0\0\0")])), LIMITS)
    reader.next()
    reader.payload_into([memoryview(target)])
    assert target.tolist() == [1, 2]


def test_targets_of_another_size_are_refused_before_a_byte_is_written():
    target = bytearray(5)
    for sizes in ((5, 1), (3,), ()):
        reader = FrameReader(Chunks(encode([(Credit(1, 2), b"1234"), (Credit(3, 4), b"")])), LIMITS)
        reader.next()
        with pytest.raises(Malformed, match="the frame has 4"):
            reader.payload_into([memoryview(target)[:size] for size in sizes])
        assert target == bytes(5)
        reader.skip_payload()
        assert decode(reader) == [(Credit(3, 4), b"")]


def test_a_payload_cannot_be_forgotten():
    reader = FrameReader(Chunks(encode([(Credit(1, 2), b"1234")])), LIMITS)
    reader.next()
    with pytest.raises(UsageError, match="4 bytes of the last frame"):
        reader.next()


def test_limits_can_be_raised_between_frames():
    head = Data(1, None, 1, (), bytes(30_000))
    reader = FrameReader(Chunks(encode([(Credit(1, 2), b""), (head, b"xy")])), LIMITS)
    reader.next()
    reader.limits = Limits(header_bytes=40_000, payload_bytes=2)
    assert decode(reader) == [(head, b"xy")]


# --- bad streams ----------------------------------------------------------------------------


def test_truncation_at_every_byte():
    first = len(SAMPLE) - len(encode([(Credit(1, 2), b"")]))
    for end in range(len(SAMPLE)):
        reader = FrameReader(Chunks(SAMPLE[:end], (3,)), LIMITS)
        if end in (0, first):
            assert len(decode(reader)) == (end > 0)
        else:
            with pytest.raises(Truncated):
                decode(reader)


def test_truncation_while_skipping():
    for end in range(1, len(SAMPLE)):
        reader = FrameReader(Chunks(SAMPLE[:end], (3,)), LIMITS, read_ahead=16)
        try:
            while reader.next() is not None:
                reader.skip_payload()
        except Truncated:
            continue
        assert end == len(SAMPLE) - len(encode([(Credit(1, 2), b"")]))


@given(st.integers(0, 255).filter(lambda version: version != VERSION))
def test_any_other_version(version):
    data = SAMPLE[:2] + bytes([version]) + SAMPLE[3:]
    with pytest.raises(WrongVersion) as caught:
        decode(FrameReader(Chunks(data), LIMITS))
    assert caught.value.version == version


def test_the_version_is_judged_before_the_sizes():
    with pytest.raises(WrongVersion):
        decode_prefix(b"MH\x02\x01" + b"\xff" * 12, LIMITS)


@given(st.binary(min_size=2, max_size=2).filter(lambda magic: magic != b"MH"))
def test_any_other_magic(magic):
    with pytest.raises(Malformed, match="expected a manyhands frame"):
        decode(FrameReader(Chunks(magic + SAMPLE[2:]), LIMITS))


@pytest.mark.parametrize("sizes", [(2**32 - 1, 0), (0, HUGE), (2**31, 2**64 - 1), (4097, 0)])
def test_announced_sizes_are_not_allocated(sizes):
    reader = FrameReader(Chunks(encode_prefix(2, *sizes) + bytes(100)), LIMITS)
    tracemalloc.start()
    try:
        with pytest.raises(Oversized):
            reader.next()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=400), chunk_sizes)
def test_random_bytes_give_wire_errors_only(data, sizes):
    source = Chunks(data, sizes)
    with contextlib.suppress(WireError):
        assert decode(FrameReader(source, LIMITS)) == []
    assert source.reads <= len(data) + 1


@given(st.data())
def test_flipped_bits_give_wire_errors_only(data):
    broken = bytearray(SAMPLE)
    for at in data.draw(st.lists(st.integers(0, len(SAMPLE) * 8 - 1), min_size=1, max_size=4)):
        broken[at // 8] ^= 1 << at % 8
    try:
        frames = decode(FrameReader(Chunks(bytes(broken), (7,)), LIMITS))
    except WireError:
        return
    # What still decodes is whole: no bit can make more of the bytes than there were.
    assert sum(len(payload) for _, payload in frames) <= len(SAMPLE)


def test_a_prefix_can_be_any_contiguous_buffer():
    data = encode_prefix(7, 8, 9)
    words = array.array("I")
    words.frombytes(data)
    assert decode_prefix(memoryview(words), LIMITS) == decode_prefix(data, LIMITS) == (7, 8, 9)
    for end in range(PREFIX_BYTES):
        with pytest.raises(Truncated):
            decode_prefix(data[:end], LIMITS)


# --- headers --------------------------------------------------------------------------------

pack = msgspec.msgpack.encode
GOOD = [1, None, 2, [3], b"m"]


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(pack(GOOD)[:-1], id="cut"),
        pytest.param(pack(GOOD) + b"\0", id="trailing byte"),
        pytest.param(pack(GOOD[:-1]), id="field missing"),
        pytest.param(pack([*GOOD, 1]), id="field too many"),
        pytest.param(pack(dict(enumerate(GOOD))), id="map"),
        pytest.param(pack(["1", *GOOD[1:]]), id="str for int"),
        pytest.param(pack([1.0, *GOOD[1:]]), id="float for int"),
        pytest.param(pack([True, *GOOD[1:]]), id="bool for int"),
        pytest.param(pack([*GOOD[:3], [2.5], b""]), id="float in the tuple"),
        pytest.param(pack([*GOOD[:4], 7]), id="int for bytes"),
        pytest.param(b"\x95\x01\xc0\x02\xdd\xff\xff\xff\xff", id="array of 2**32 announced"),
        pytest.param(b"\x95\x01\xc0\x02\x90\xc6\xff\xff\xff\xff", id="2**32 bytes announced"),
        pytest.param(b"\x91" * 4000, id="deep arrays"),
        pytest.param(b"\x95\x01\xc0\x02" + b"\x91" * 4000, id="deep in a field"),
        pytest.param(pack([*GOOD, *GOOD])[:1] + b"\x81\xa1a" * 1300, id="deep maps"),
        pytest.param(b"\xc1", id="a tag msgpack never uses"),
        pytest.param(b"\xc7\x05\x01hello", id="extension"),
        pytest.param(pack(msgspec.msgpack.Ext(-1, bytes(12))), id="timestamp"),
    ],
)
def test_headers_that_break_the_schema(body):
    with pytest.raises(Malformed, match="breaks its schema"):
        SCHEMA.decode(2, body)


def test_headers_not_in_utf8():
    for text in (b"\xff\xfe", b"\xed\xa0\x80", b"\xc0\x80"):
        with pytest.raises(Malformed):
            SCHEMA.decode(1, b"\x94" + bytes([0xA0 + len(text)]) + text + b"\xa0\xa0\x01")


class Loose(msgspec.Struct, forbid_unknown_fields=True):
    anything: Any = None


def test_deep_nesting_where_anything_is_allowed():
    schema = Schema({1: Loose})
    for deep in (b"\x91", b"\x81\xa1a", b"\xdd\0\0\0\1"):
        with pytest.raises(Malformed, match="recursion"):
            schema.decode(1, b"\x81\xa8anything" + deep * 60_000 + b"\xc0")


def test_an_error_does_not_repeat_what_the_sender_wrote_at_length_or_raw():
    with pytest.raises(Malformed) as caught:
        Schema({1: Loose}).decode(1, pack({"\x1b[31m\n" * 5000: 1}))
    assert len(str(caught.value)) < 1000
    assert str(caught.value).isprintable()


@given(st.integers(2**63, 2**64 - 1) | st.integers(-(2**63), 2**64 - 1))
def test_large_integers_arrive_or_are_malformed(number):
    assert SCHEMA.decode(3, pack([number, 0])) == Credit(number, 0)


def test_unknown_kinds():
    for kind in (0, 5, 255):
        with pytest.raises(Malformed, match=rf"frame kind {kind} is not one of \[1, 2, 3, 4\]"):
            SCHEMA.decode(kind, b"\x92\x01\x02")


# --- buffers --------------------------------------------------------------------------------


def test_payload_size_counts_bytes_whatever_the_items():
    grid = memoryview(bytearray(24)).cast("I", shape=[2, 3])
    buffers = [b"abc", bytearray(4), memoryview(array.array("d", [1, 2])), grid, b""]
    assert payload_size(buffers) == 3 + 4 + 16 + 24
    assert payload_size([]) == 0


def test_buffers_that_are_not_contiguous_are_refused():
    with pytest.raises(UsageError, match="not contiguous"):
        payload_size([memoryview(b"abcdef")[::2]])


def test_as_bytes_shares_the_memory():
    words = array.array("H", [0, 0])
    as_bytes(memoryview(words))[:2] = b"\x01\x02"
    assert words.tobytes() == b"\x01\x02\0\0"
    assert len(as_bytes(memoryview(array.array("d")))) == 0


# --- fuzz -----------------------------------------------------------------------------------


def test_fuzz_briefly():
    report = fuzz.run(20_000, seed=2)
    print(report)
    for outcome in ("ok", "Truncated", "Malformed", "Oversized", "WrongVersion"):
        assert report.outcomes[outcome] > 100


def test_fuzz_takes_other_schemas():
    schema: Schema[Any] = Schema({9: Credit})
    assert fuzz.run(500, 1, schema, [(Credit(1, 2), b"x")]).outcomes.total() == 500
