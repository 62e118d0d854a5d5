"""The frames of the protocol: every kind survives the wire, nothing malformed does."""

from __future__ import annotations

import pytest

from manyhands.core.errors import Malformed, Oversized, Truncated, WrongVersion
from manyhands.links.messages import SCHEMA, Data, Header, decode_head
from manyhands.wire.frames import Limits
from tests.links.fuzz import FRAMES
from tests.wire import fuzz

LIMITS = Limits(header_bytes=64 << 10, payload_bytes=1 << 20)


def test_the_examples_are_of_every_kind():
    assert {type(header) for header, _ in FRAMES} == set(Header.__subclasses__())


@pytest.mark.parametrize(("header", "payload"), FRAMES, ids=lambda x: type(x).__name__)
def test_a_frame_survives_the_wire(header, payload):
    head = SCHEMA.encode(header, len(payload))
    assert decode_head(head, LIMITS) == (header, len(payload))


def test_a_head_must_be_whole_and_nothing_more():
    head = SCHEMA.encode(Data(1, 2, 3, (), b"x"))
    with pytest.raises(Malformed):
        decode_head(head + b"x", LIMITS)
    with pytest.raises(Malformed):
        decode_head(head[:-1], LIMITS)
    with pytest.raises(Truncated):
        decode_head(head[:10], LIMITS)
    with pytest.raises(WrongVersion):
        decode_head(head[:2] + b"\x02" + head[3:], LIMITS)
    with pytest.raises(Oversized):
        decode_head(SCHEMA.encode(Data(1, 2, 3, (), b"x"), 1 << 40), LIMITS)


@pytest.mark.parametrize(
    "header",
    [
        Data(0, 2, 3, (), b""),  # nobody is number 0
        Data(1, 2, -3, (), b""),
        Data(1, 2, 3, (-1,), b""),
        Data(1, 2, 3, (0,) * 5000, b""),
        Data(1, 2, 3, (), b"x" * (61 << 10)),
    ],
    ids=["sender", "seq", "size", "sizes", "message"],
)
def test_values_out_of_range(header):
    with pytest.raises(Malformed):
        decode_head(SCHEMA.encode(header), LIMITS)


def test_fuzz_briefly():
    report = fuzz.run(20_000, 3, SCHEMA, FRAMES)
    assert report.outcomes.total() == 20_000
