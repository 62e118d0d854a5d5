"""A socket that one thread reads while others write."""

from __future__ import annotations

import hashlib
import os
import random
import socket
import ssl
import struct
import threading
import time
from contextlib import suppress

import pytest

from manyhands.core.errors import LinkBroken, LinkTimeout
from manyhands.links.stream import Stream
from manyhands.links.tls import client_context, create_identity, server_context, wrap_client
from manyhands.testing.contract import together


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    return near, far


@pytest.fixture(params=["plain", "tls", "unix"])
def pair(request):
    """Two connected streams."""
    near, far = socket.socketpair() if request.param == "unix" else tcp_pair()
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


def test_bulk_both_ways_arrives_unchanged_in_reads_of_any_size(pair):
    """Reads of one byte up to several TLS records, pieces that no record size divides."""
    blobs = [random.Random(seed).randbytes(8_000_003) for seed in (1, 2)]

    def write(stream: Stream, blob: bytes) -> None:
        sizes, at = random.Random(len(blob)), 0
        while at < len(blob):
            size = sizes.choice([1, 100, 16_384, 70_001, 300_000])
            piece = blob[at : at + size]
            stream.send([piece[:7], piece[7:]])
            at += size

    def digest(stream: Stream, count: int) -> bytes:
        sizes, whole = random.Random(count), hashlib.sha256()
        while count:
            target = memoryview(bytearray(min(count, sizes.choice([1, 5, 16_384, 200_000]))))
            got = stream.recv_into(target)
            assert got
            whole.update(target[:got])
            count -= got
        return whole.digest()

    near, far = pair
    _, _, at_far, at_near = together(
        lambda: write(near, blobs[0]), lambda: write(far, blobs[1]),
        lambda: digest(far, len(blobs[0])), lambda: digest(near, len(blobs[1])),
    )  # fmt: skip
    assert at_far == hashlib.sha256(blobs[0]).digest()
    assert at_near == hashlib.sha256(blobs[1]).digest()


@pytest.mark.parametrize("how", ["closed", "reset"])
def test_a_cut_within_a_tls_record_is_an_end_like_any_other(how):
    near, far = tcp_pair()
    context = server_context(*create_identity())
    tls, stream = together(
        lambda: MemoryClient(near), lambda: Stream(context.wrap_socket(far, server_side=True))
    )
    near.sendall(tls.sealed(b"whole"))
    assert receive(stream, 5) == b"whole"
    near.sendall(tls.sealed(bytes(1000))[:500])
    if how == "reset":
        near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        near.close()
    else:
        near.shutdown(socket.SHUT_WR)  # close() would reset too: session tickets are unread
    assert stream.recv_into(memoryview(bytearray(1000))) == 0
    assert stream.recv_into(memoryview(bytearray(1000))) == 0
    near.close()
    stream.detach()


class MemoryClient:
    """TLS whose records a test can take apart."""

    def __init__(self, sock: socket.socket) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = client_context().wrap_bio(self._incoming, self._outgoing)
        while True:
            with suppress(ssl.SSLWantReadError):
                self._tls.do_handshake()
                sock.sendall(self._outgoing.read())
                return
            sock.sendall(self._outgoing.read())
            self._incoming.write(sock.recv(1 << 14))

    def sealed(self, data: bytes) -> bytes:
        self._tls.write(data)
        return self._outgoing.read()


def test_a_writer_sends_while_the_reader_waits(pair):
    near, far = pair
    reader = threading.Thread(target=lambda: near.recv_into(memoryview(bytearray(1))))
    reader.start()
    near.send([b"hello"], timeout_s=5)
    assert receive(far, 5) == b"hello"
    near.close()
    reader.join(30)
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
    assert time.monotonic() - start_s < 15  # half of what the data may wait
    near.close()
    writer.join(30)
    assert not writer.is_alive(), "close wakes a blocked writer"


def test_a_beat_goes_when_the_network_takes_it(pair):
    near, far = pair
    assert near.send_now([b"beat"])
    assert receive(far, 4) == b"beat"
    assert time.monotonic() - far.heard_s < 30


def test_a_last_word_waits_for_room(pair):
    """It comes right after data, which a Unix socket holds until it is read."""
    near, far = pair
    data = bytes(32 << 20)
    held = len(data) - sum(len(buffer) for buffer in near.send_some([data]))

    def say() -> None:
        near.send_now([b"bye"], wait_s=30)
        near.close()

    def read() -> bytes:
        time.sleep(0.2)
        return receive(far, held + 3)

    _, got = together(say, read)
    assert got.endswith(b"bye")


def test_a_reader_and_a_writer_wait_for_room_at_once(monkeypatch):
    """TLS may have to write before it can read on, when its keys change."""
    context = server_context(*create_identity())
    near, far = tcp_pair()
    near, far = together(
        lambda: wrap_client(near), lambda: context.wrap_socket(far, server_side=True)
    )
    stream = Stream(near)
    full, asked = threading.Event(), threading.Event()
    poll = stream._writable

    class Watched:
        def poll(self, *timeout):
            full.set()
            return poll.poll(*timeout)

    def wants_to_write(target):
        asked.set()
        raise ssl.SSLWantWriteError

    monkeypatch.setattr(stream, "_writable", Watched())
    monkeypatch.setattr(near, "recv_into", wants_to_write)

    def write():
        with pytest.raises(LinkBroken):
            stream.send([bytes(64 << 20)])  # nobody reads it

    def read():
        assert full.wait(30)
        assert stream.recv_into(memoryview(bytearray(1))) == 0

    def end():
        assert asked.wait(30)
        stream.close()

    together(write, read, end)
    stream.detach()
    far.close()


def test_what_the_network_does_not_take_at_once_is_given_back(pair):
    near, far = pair
    head, body = os.urandom(300), os.urandom(32 << 20)
    rest = near.send_some([head, body])
    left = sum(len(buffer) for buffer in rest)
    assert 0 < left <= len(head) + len(body)
    _, got = together(lambda: near.send(rest), lambda: receive(far, len(head) + len(body)))
    assert got == head + body
    near.close()
    if near._tls is None:
        with pytest.raises(LinkBroken):
            near.send_some([b"more"])


def test_a_little_is_taken_at_once():
    near, far = (Stream(sock) for sock in tcp_pair())
    assert not near.send_some([b"a", b"", b"bc"])
    assert receive(far, 3) == b"abc"
    near.detach()
    far.detach()


def test_the_descriptor_is_given_back_only_when_no_writer_is_inside(pair):
    near, _ = pair
    number = near._sock.fileno()
    writer = threading.Thread(target=lambda: _ignore(lambda: fill(near)))
    writer.start()
    _wait_until(near._write_lock.locked)
    near.detach()
    writer.join(30)
    assert not writer.is_alive()
    assert near._sock.fileno() == -1 != number


def test_close_from_many_threads(pair):
    near, far = pair
    together(*[near.close] * 8, *[far.detach] * 1)
    near.close()
    assert near.recv_into(memoryview(bytearray(1))) == 0
    with pytest.raises(LinkBroken):
        near.send([b"x"])


def _ignore(work) -> None:
    with suppress(LinkBroken, LinkTimeout):
        work()


def _wait_until(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)
