"""A socket that one thread reads while others write."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress

import pytest

from manyhands.core.errors import LinkBroken, LinkTimeout
from manyhands.links.stream import Stream
from manyhands.links.tls import create_identity, server_context, wrap_client
from manyhands.testing.contract import together


@pytest.fixture(params=["plain", "tls"])
def pair(request):
    """Two connected streams."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    if request.param == "tls":
        context = server_context(*create_identity())
        near, far = together(
            lambda: wrap_client(near), lambda: context.wrap_socket(far, server_side=True)
        )
    streams = Stream(near), Stream(far)
    yield streams
    for stream in streams:
        stream.detach()


def receive(stream: Stream, count: int) -> bytes:
    data = bytearray(count)
    done = 0
    while done < count:
        got = stream.recv_into(memoryview(data)[done:])
        assert got, f"the end after {done} of {count} bytes"
        done += got
    return bytes(data)


def test_many_buffers_arrive_as_one_piece(pair):
    near, far = pair
    buffers = [os.urandom(i % 7 * 1000) for i in range(200)]
    whole = b"".join(buffers)
    _, got = together(lambda: near.send(buffers), lambda: receive(far, len(whole)))
    assert got == whole
    assert near.bytes_sent == len(whole)


def test_both_ways_at_once_from_several_threads(pair):
    """Writers do not mix their bytes; a reader of the same connection holds nobody up."""
    size, count = 100_000, 30

    def write(stream: Stream, mark: int) -> None:
        for _ in range(count):
            stream.send([bytes([mark]) * 10, bytes([mark]) * (size - 10)])

    def read(stream: Stream) -> None:
        for _ in range(2 * count):
            piece = receive(stream, size)
            assert piece == piece[:1] * size

    near, far = pair
    together(
        lambda: write(near, 1), lambda: write(near, 2), lambda: read(near),
        lambda: write(far, 3), lambda: write(far, 4), lambda: read(far),
    )  # fmt: skip


def test_a_writer_sends_while_the_reader_waits(pair):
    near, far = pair
    reader = threading.Thread(target=lambda: near.recv_into(memoryview(bytearray(1))))
    reader.start()
    near.send([b"hello"], timeout_s=5)
    assert receive(far, 5) == b"hello"
    near.close()
    reader.join(5)
    assert not reader.is_alive()


def test_the_end_is_nothing_for_a_reader_and_an_error_for_a_writer(pair):
    near, far = pair
    near.send([b"last"])
    near.close()
    assert receive(far, 4) == b"last"
    assert far.recv_into(memoryview(bytearray(1))) == 0
    with pytest.raises(LinkBroken):
        near.send([b"more"])
    assert near.recv_into(memoryview(bytearray(1))) == 0


def fill(stream: Stream) -> None:
    stream.send([bytes(64 << 20)], timeout_s=30)


def test_a_far_side_that_takes_nothing_is_a_time_out(pair):
    near, _ = pair
    start_s = time.monotonic()
    with pytest.raises(LinkTimeout):
        near.send([bytes(64 << 20)], timeout_s=0.3)
    assert time.monotonic() - start_s < 10


def test_a_beat_does_not_wait_behind_data(pair):
    near, _ = pair
    writer = threading.Thread(target=lambda: _ignore(lambda: fill(near)))
    writer.start()
    _wait_until(near._write_lock.locked)
    start_s = time.monotonic()
    assert not near.send_now([b"beat"], wait_s=0.05)
    assert time.monotonic() - start_s < 5
    near.close()
    writer.join(5)
    assert not writer.is_alive(), "close wakes a blocked writer"


def test_a_beat_goes_when_the_network_takes_it(pair):
    near, far = pair
    assert near.send_now([b"beat"])
    assert receive(far, 4) == b"beat"
    assert time.monotonic() - far.heard_s < 5


def test_the_descriptor_is_given_back_only_when_no_writer_is_inside(pair):
    near, _ = pair
    number = near._sock.fileno()
    writer = threading.Thread(target=lambda: _ignore(lambda: fill(near)))
    writer.start()
    _wait_until(near._write_lock.locked)
    near.detach()
    writer.join(5)
    assert not writer.is_alive()
    assert near._sock.fileno() == -1 != number


def test_close_from_many_threads(pair):
    near, far = pair
    together(*[near.close] * 8, *[far.detach] * 1)
    near.close()


def _ignore(work) -> None:
    with suppress(LinkBroken, LinkTimeout):
        work()


def _wait_until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
