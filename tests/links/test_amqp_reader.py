"""Frames off a stream, however they are cut and whatever comes between them."""

import contextlib
import random
import socket
import struct
import threading

import pytest

from manyhands.core.errors import LinkBroken, Malformed
from manyhands.links.amqp import frames
from manyhands.links.amqp.frames import part
from manyhands.links.amqp.reader import FrameReader
from manyhands.links.stream import Stream

FRAME_MAX = 4096
BLOCKED = frames.method(frames.Method.CONNECTION_BLOCKED, b"\x03low", channel=0)
PATIENCE_S = 20.0


class Wire:
    """A reader, and what it reads, sent by a thread in pieces."""

    def __init__(self, *data: bytes, end: bool = True):
        self.ours, self.theirs = socket.socketpair()
        self.aside: list[frames.Incoming] = []
        self.heard = threading.Event()
        self.reader = FrameReader(
            Stream(self.ours), self._on_aside, place="a fake", frame_max=FRAME_MAX
        )
        self._data, self._end = data, end
        self._writer = threading.Thread(target=self._write)

    def _on_aside(self, said: frames.Incoming) -> None:
        self.aside.append(said)
        self.heard.set()

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the reader has seen enough
            for data in self._data:
                self.theirs.sendall(data)
            if self._end:
                self.theirs.shutdown(socket.SHUT_WR)

    def __enter__(self):
        self._writer.start()
        return self

    def __exit__(self, *_):
        self.ours.close()
        self.theirs.close()
        self._writer.join(PATIENCE_S)
        assert not self._writer.is_alive()


def body_frame(data: bytes) -> bytes:
    return frames.frame(frames.BODY, frames.CHANNEL, data)


def cut(whole: bytes, sizes) -> list[bytes]:
    pieces, at = [], 0
    while at < len(whole):
        size = next(sizes)
        pieces.append(whole[at : at + size])
        at += size
    return pieces


def rooms(rng: random.Random, size: int) -> list[memoryview]:
    """Views of other sizes than any frame, one of them empty."""
    sizes = [0]
    while sum(sizes) < size:
        sizes.append(min(rng.choice([1, 7, 300, 5000, 100_000]), size - sum(sizes)))
    rng.shuffle(sizes)
    return [memoryview(bytearray(n)) for n in sizes]


@pytest.mark.parametrize("seed", range(60))
def test_any_cut_and_anything_between(seed):
    rng = random.Random(seed)
    most = FRAME_MAX - frames.FRAME_BYTES
    bodies = [rng.randbytes(rng.choice([1, most, most + 1, 3 * most, 50_000])) for _ in range(3)]
    asides = 0
    wire = bytearray()
    for data in bodies:
        wire += frames.method(frames.Method.QUEUE_BIND_OK)
        even = rng.random() < 0.5  # as a broker cuts it
        least = rng.choice([1, 500])
        sizes = iter(lambda: most if even else rng.randint(least, most), None)  # noqa: B023
        for piece in cut(data, sizes):
            while rng.random() < 0.15:
                block = rng.random() < 0.3
                asides += block
                wire += BLOCKED if block else frames.HEARTBEAT_FRAME
            wire += body_frame(piece)
    arrivals = cut(bytes(wire), iter(lambda: rng.choice([1, 8, 1000, 60_000]), None))
    with Wire(*arrivals) as line:
        for data in bodies:
            line.reader.payload(frames.METHOD)
            targets = rooms(rng, len(data))
            line.reader.body(targets, len(data))
            assert b"".join(targets) == data
        with pytest.raises(LinkBroken):
            line.reader.payload(frames.METHOD)
        assert len(line.aside) == asides


def test_more_frames_and_more_room_than_one_read_takes():
    data = random.Random(1).randbytes(5000)
    wire = b"".join(body_frame(data[i : i + 1]) for i in range(len(data)))
    targets = [memoryview(bytearray(1)) for _ in data]
    with Wire(wire) as line:
        line.reader.body(targets, len(data))
    assert b"".join(targets) == data


def test_what_comes_between_is_heard_before_the_body_goes_on():
    """A broker that closes a connection waits for our answer: the body never goes on."""
    data = bytes(3 * 4088)
    with Wire(body_frame(data[:4088]) + BLOCKED, end=False) as line:
        target = memoryview(bytearray(len(data)))
        reading = threading.Thread(target=lambda: line.reader.body([target], len(data)))
        reading.start()
        assert line.heard.wait(PATIENCE_S)
        line.theirs.sendall(body_frame(data[4088:8176]) + body_frame(data[8176:]))
        reading.join(PATIENCE_S)
        assert not reading.is_alive()


@pytest.mark.parametrize(
    ("second", "complaint"),
    [
        (body_frame(b"x" * 4088)[:-1] + b"\x00", "end mark"),
        (body_frame(b"x" * 5), "without a word"),
        (struct.pack(">BHI", frames.BODY, 1, 1 << 30), "were agreed on"),
        (frames.frame(frames.HEADER, 1, b"x" * 4088), "kind 2 where one of kind 3"),
        (frames.frame(frames.BODY, 1, b""), "0 bytes where 4088"),
    ],
)
def test_a_second_frame_that_is_wrong(second, complaint):
    with Wire(body_frame(bytes(4088)) + second) as line:
        target = memoryview(bytearray(2 * 4088))
        with pytest.raises((Malformed, LinkBroken, frames.Oversized), match=complaint):
            line.reader.body([target], len(target))


def test_part():
    views = [memoryview(b"abc"), memoryview(b""), memoryview(b"defgh")]
    for start in range(9):
        for size in range(9 - start):
            got = part(views, start, size)
            assert b"".join(got) == b"abcdefgh"[start : start + size]
            assert all(got)
