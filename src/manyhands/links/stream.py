"""Byte streams: a TCP, TLS or Unix socket that one thread reads while others write.

OpenSSL forbids two threads inside one connection, and CPython's own answers to that differ by
version (some hold a lock across a blocking read, so that a writer waits for the next arrival).
So TLS sockets here are non-blocking, every call is made under one short lock, and waiting is done
outside it. Plain TCP needs no lock: writes do not block and gather with sendmsg, and a large read
is one blocking call that returns when all has come, instead of one for every few packets.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import islice

from manyhands.core.errors import LinkBroken, LinkTimeout
from manyhands.wire.frames import Buffer

# A kernel that holds megabytes of unsent data would put every beat behind them: on a slow network
# for seconds. On a fast one it saves going back and forth.
_UNSENT_SLOW, _UNSENT_FAST = 256 << 10, 4 << 20
_LARGE_BYTES = 512 << 10  # of a write that tells how fast the network is
_FAST_BYTES_PER_S = 50e6
_MAX_GATHER = 64  # buffers a sendmsg; the system's own limit is 1024
_TLS_PIECE = 256 << 10  # bytes a TLS write, so that a reader gets the lock in between
_WHOLE_BYTES = 64 << 10  # a read of more than this waits for all of it ...
_READ_S = 0.5  # ... but not longer than this: whatever has come by then is a sign of life


class Stream:
    """A connected socket. One reader, any number of writers; `close` may come from any thread.

    `send` writes all buffers as one uninterrupted piece. A closed or reset connection is
    LinkBroken for a writer, and 0 bytes for the reader once nothing more will come.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._tls = sock if isinstance(sock, ssl.SSLSocket) else None
        sock.setblocking(self._tls is None)
        if self._tls is None:
            seconds = struct.pack("ll", int(_READ_S), int(_READ_S % 1 * 1e6))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
        self._tls_lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._closed = False
        self._unsent = 0  # bytes that the kernel may hold before it counts as full
        self.heard_s = time.monotonic()  # when the last byte arrived
        self.bytes_sent = 0
        if sock.family == socket.AF_UNIX:
            # Nothing is on a network here. The system may allow less.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNSENT_FAST)
        else:
            with contextlib.suppress(OSError):  # reset before it was ours
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if hasattr(socket, "TCP_NOTSENT_LOWAT"):
                    self._limit_unsent(_UNSENT_SLOW)
        # For the reader and for whoever writes: two threads may not ask one of them at a time.
        self._readable, self._writable = select.poll(), select.poll()
        self._writable_to_reader = select.poll()
        self._readable.register(sock, select.POLLIN)
        for writable in (self._writable_to_reader, self._writable):
            writable.register(sock, select.POLLOUT)

    def recv_into(self, target: memoryview) -> int:
        """At least one byte into `target`; 0 when the connection has ended, however it ended."""
        if not target:
            return 0
        while True:
            try:
                if self._tls is None:
                    whole = len(target) > _WHOLE_BYTES
                    got = self._sock.recv_into(target, 0, socket.MSG_WAITALL if whole else 0)
                else:
                    with self._tls_lock:
                        got = self._tls.recv_into(target)
                self.heard_s = time.monotonic()
                return got
            except BlockingIOError:
                pass  # _READ_S without a byte
            except ssl.SSLWantReadError:
                self._readable.poll()
            except ssl.SSLWantWriteError:  # new keys: TLS has something to say itself
                self._writable_to_reader.poll()
            except (OSError, ValueError):  # ValueError: closed under us
                return 0
            if self._closed:
                return 0

    def recv_each_into(self, targets: Sequence[memoryview]) -> int:
        """As `recv_into`, into one after the other. It waits until all is there."""
        if self._tls is not None:
            return self.recv_into(targets[0])
        while not self._closed:
            try:
                got = self._sock.recvmsg_into(targets, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                continue  # _READ_S without a byte
            except (OSError, ValueError):
                return 0
            self.heard_s = time.monotonic()
            return got
        return 0

    def send(self, buffers: Sequence[Buffer], *, timeout_s: float | None = None) -> None:
        """Write all of `buffers`, in order, with no other writer's bytes between them.

        Raises LinkBroken when the connection is gone, LinkTimeout when the far side took
        nothing at all for `timeout_s`; after either the stream cannot be used for writing.
        """
        with self._write_lock:
            self._send(buffers, timeout_s)

    def send_some(self, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
        """Write what the network takes at once; returns the rest, to be sent before anything else.

        All of it for TLS: encrypting is work for a thread that has nothing else to do.
        """
        if self._tls is not None:
            return buffers
        with self._write_lock:
            if self._closed:
                raise LinkBroken("the connection was closed")
            left = _views(buffers)
            self._write(left)
            return left

    def send_now(self, buffers: Sequence[Buffer], *, wait_s: float = 0.0) -> bool:
        """Write a few bytes if the network takes them within `wait_s`; False if it does not, or if
        others keep on writing."""
        deadline = time.monotonic() + wait_s
        if not self._write_lock.acquire(timeout=wait_s):
            return False
        try:
            # A Unix socket has room again when three quarters of it have been read.
            if not self._writable.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return False
            self._send(buffers, None)
            return True
        finally:
            self._write_lock.release()

    def _send(self, buffers: Sequence[Buffer], timeout_s: float | None) -> None:
        if self._closed:
            raise LinkBroken("the connection was closed")
        if self._tls is None:
            self._send_gathered(buffers, timeout_s)
        else:
            self._send_tls(buffers, timeout_s)

    def _limit_unsent(self, num_bytes: int) -> None:
        if num_bytes != self._unsent:
            self._unsent = num_bytes
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, num_bytes)

    def _send_gathered(self, buffers: Sequence[Buffer], timeout_s: float | None) -> None:
        before, start_s = self.bytes_sent, time.monotonic()
        self._send_all(buffers, timeout_s)
        num_bytes = self.bytes_sent - before
        if num_bytes >= _LARGE_BYTES and self._unsent:
            fast = num_bytes > _FAST_BYTES_PER_S * (time.monotonic() - start_s)
            with contextlib.suppress(OSError):  # closed meanwhile
                self._limit_unsent(_UNSENT_FAST if fast else _UNSENT_SLOW)

    def _send_all(self, buffers: Sequence[Buffer], timeout_s: float | None) -> None:
        left = _views(buffers)
        while not self._write(left):
            self._wait_writable(timeout_s)

    def _write(self, left: deque[memoryview]) -> bool:
        """What the network takes at once goes from `left`; whether that was all."""
        while left:
            try:
                gathered = list(islice(left, _MAX_GATHER))
                sent = self._sock.sendmsg(gathered, [], socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except (OSError, ValueError) as error:
                raise LinkBroken(f"the connection is gone: {error}") from None
            self.bytes_sent += sent
            if len(gathered) == len(left) and sent == sum(map(len, gathered)):
                left.clear()
                return True
            while sent:
                if sent >= len(left[0]):
                    sent -= len(left.popleft())
                else:
                    left[0] = left[0][sent:]
                    sent = 0
        return True

    def _send_tls(self, buffers: Sequence[Buffer], timeout_s: float | None) -> None:
        assert self._tls is not None
        # One TLS record costs about as much as 2 KiB of it: small pieces are joined first.
        pieces = deque(_bytes_view(b) for b in buffers)
        if len(pieces) > 1 and len(pieces[0]) < 4096:
            head, second = pieces.popleft(), pieces.popleft()
            pieces.appendleft(second[16384 - len(head) :])
            pieces.appendleft(memoryview(bytes(head) + bytes(second[: 16384 - len(head)])))
        for whole in pieces:
            view = whole
            while view:
                try:
                    with self._tls_lock:
                        sent = self._tls.send(view[:_TLS_PIECE])
                except ssl.SSLWantWriteError:
                    self._wait_writable(timeout_s)
                    continue
                except ssl.SSLWantReadError:
                    # The reader will take what the far side has sent; there is nothing to wait for
                    # here but that, and the socket is readable until it has done so.
                    time.sleep(0.001)
                    continue
                except (OSError, ValueError) as error:
                    raise LinkBroken(f"the connection is gone: {error}") from None
                self.bytes_sent += sent
                view = view[sent:]

    def _wait_writable(self, timeout_s: float | None) -> None:
        ready = self._writable.poll(None if timeout_s is None else timeout_s * 1000)
        if self._closed:
            raise LinkBroken("the connection was closed")
        if not ready:
            assert timeout_s is not None
            raise LinkTimeout("room in the connection's send buffer", timeout_s)

    def close(self) -> None:
        """End the connection in both directions and wake whoever waits on it. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            # The descriptor stays open until every user is gone: a number that is reused while
            # another thread polls it would be a stranger's socket.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def detach(self) -> None:
        """Give the descriptor back; for the reader, once it is done."""
        self.close()
        # A writer may be inside: it sees the end at once, and must not find a stranger's socket.
        with self._write_lock, contextlib.suppress(OSError):
            self._sock.close()


def _views(buffers: Sequence[Buffer]) -> deque[memoryview]:
    return deque(view for view in map(_bytes_view, buffers) if len(view))


def _bytes_view(buffer: Buffer) -> memoryview:
    return memoryview(buffer).cast("B") if memoryview(buffer).nbytes else memoryview(b"")
