"""Proxy: a bad network between a peer and its meeting point, on loopback and on demand."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Proxy"]

_PIECE = 64 << 10
_CONNECT_S = 5.0
_RESET = struct.pack("ii", 1, 0)  # linger: on, no time


class Proxy:
    """Forwards every connection to its `port` on to (host, port), until told otherwise.

    All methods may be called from any thread and take effect at once, for all connections.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._lock = threading.Lock()
        self._pairs: set[_Pair] = set()
        self._threads: set[threading.Thread] = set()
        self._flowing = threading.Event()
        self._flowing.set()
        self._refusing = self._closing = False
        self._cut_in: int | None = None  # bytes towards the meeting point until the next cut
        self.num_connections = 0
        """Connections let in so far."""
        self.num_cuts = 0
        """Cuts so far, those of `cut_after` included."""
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._spawn(threading.Thread(target=self._accept, name="proxy accept", daemon=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def cut(self) -> None:
        """Break all connections now; new ones are let in."""
        with self._lock:
            pairs = list(self._pairs)
            self._cut_in = None
            self.num_cuts += 1
        for pair in pairs:
            pair.cut()

    def cut_after(self, num_bytes: int) -> None:
        """Cut once that many more bytes have gone towards the meeting point, not one later."""
        with self._lock:
            self._cut_in = num_bytes

    def refuse(self) -> None:
        """Turn new connections away."""
        self._refusing = True

    def accept(self) -> None:
        """Let new connections in again."""
        self._refusing = False

    def stall(self) -> None:
        """Let no byte through, in either direction; nothing is closed: a silent partition."""
        self._flowing.clear()

    def go(self) -> None:
        """Let bytes through again."""
        self._flowing.set()

    def forget(self) -> None:
        """Lose every byte of the connections that there are, in both directions; nothing is closed,
        and neither end is told that the other has gone. New ones are let through: what a router
        does that was started again.
        """
        with self._lock:
            for pair in self._pairs:
                pair.is_forgotten = True

    def close(self) -> None:
        """Break everything and free it. Idempotent."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._flowing.set()
        while True:
            self.cut()
            with self._lock:
                threads = [t for t in self._threads if t is not threading.current_thread()]
            if not threads:
                break
            for thread in threads:
                thread.join(0.1)
        self._listener.close()

    def _spawn(self, thread: threading.Thread) -> None:
        with self._lock:
            self._threads.add(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closing:
            try:
                near, _ = self._listener.accept()
            except OSError:
                break
            if self._refusing or self._closing:
                _reset(near)
                continue
            try:
                far = socket.create_connection(self._target, timeout=_CONNECT_S)
            except OSError:
                _reset(near)
                continue
            far.settimeout(None)
            self._join(_Pair(near, far))
        with self._lock:
            self._threads.discard(threading.current_thread())

    def _join(self, pair: _Pair) -> None:
        with self._lock:
            self._pairs.add(pair)
            self.num_connections += 1
        for source, sink, counted in ((pair.near, pair.far, True), (pair.far, pair.near, False)):
            thread = threading.Thread(
                target=self._pump, args=(pair, source, sink, counted), name="proxy", daemon=True
            )
            self._spawn(thread)

    def _pump(self, pair: _Pair, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        buffer = memoryview(bytearray(_PIECE))
        with contextlib.suppress(OSError):
            while not pair.dead:
                self._flowing.wait()
                num_bytes = source.recv_into(buffer)
                self._flowing.wait()  # what came while the network stalled waits with the rest
                if pair.is_forgotten and num_bytes:
                    continue
                if not num_bytes or pair.dead:
                    break
                allowed, last = self._allow(num_bytes) if counted else (num_bytes, False)
                sink.sendall(buffer[:allowed])
                if last:
                    self.cut()
        if pair.is_forgotten:
            pair.ended.wait()  # one end has gone, and the other is not told
        pair.cut()
        if pair.leave():  # the second of the two
            with self._lock:
                self._pairs.discard(pair)
        with self._lock:
            self._threads.discard(threading.current_thread())

    def _allow(self, num_bytes: int) -> tuple[int, bool]:
        """How many of these bytes may pass, and whether a cut follows."""
        with self._lock:
            if self._cut_in is None:
                return num_bytes, False
            allowed = min(num_bytes, self._cut_in)
            self._cut_in -= allowed
            return allowed, self._cut_in == 0


class _Pair:
    """Two sockets and the two threads between them."""

    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self.near, self.far = near, far
        self.dead = self.is_forgotten = False
        self.ended = threading.Event()
        self._users = 2
        self._lock = threading.Lock()

    def cut(self) -> None:
        """Wake both threads; the sockets stay until both have left."""
        with self._lock:
            if self.dead:
                return
            self.dead = True
            self.ended.set()
            for sock in (self.near, self.far):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def leave(self) -> bool:
        """One thread is done; the last one closes the sockets."""
        with self._lock:
            self._users -= 1
            if self._users:
                return False
        _reset(self.near)
        _reset(self.far)
        return True


def _reset(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    sock.close()
