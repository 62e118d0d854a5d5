"""A session: one peer's stay at a hub, which survives the connection it came by.

Both sides count the frames they have received (beats apart). A peer that dials again says how many
it holds and is told how many the hub holds; each goes on after those.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence

from manyhands._version import __version__
from manyhands.core.errors import LinkBroken, LinkTimeout, Malformed, Truncated, WireError
from manyhands.core.peers import PeerId
from manyhands.links.memory import Memory
from manyhands.links.messages import (
    SCHEMA,
    Beat,
    BeatBack,
    Bye,
    Credit,
    Data,
    Dismissal,
    Receipt,
    Welcome,
)
from manyhands.links.outbox import Budget, Outbox, Taken
from manyhands.links.room import Frame, Port, Room
from manyhands.links.stream import Stream
from manyhands.wire.frames import Buffer, FrameReader, encode_prefix

ACK_BYTES = 2 << 20  # say what has arrived at least this often
_PUSHED = 8  # frames a reader writes before it reads on: others may go on adding to them
_LAST_WORD_S = 1.0  # for telling a peer why it is out before its connection is closed
log = logging.getLogger(__name__)


class Session:
    """One peer's stay: a port of its room that survives the connection it came by."""

    def __init__(
        self,
        run: str,
        room: Room,
        peer: PeerId,
        budget: Budget,
        memory: Memory,
        *,
        forget: Callable[[Session], None],
        stopping: Callable[[], bool],
    ) -> None:
        self.run, self.room, self.peer = run, room, peer
        self._budget, self._memory = budget, memory
        self._forget, self._stopping = forget, stopping
        self.outbox: Outbox[Stream] = Outbox(room.terms.watch_bytes, budget)
        self._secret = secrets.token_bytes(16)
        self._num_received = 0  # frames of the peer that count for resuming
        self._unsaid_bytes, self._said_s = 0, 0.0
        self._withheld = False  # we are not reading: its silence is ours
        self._stream: Stream | None = None
        self._lock = threading.Lock()
        self._written = threading.Event()  # the last word has been said

    # -- connections ----------------------------------------------------------------------------

    def connect(self, stream: Stream) -> None:
        """Answer the first Hello and begin."""
        self._stream = stream
        self.outbox.resume(stream, 0, self._welcome(resumed=False))

    def reconnect(self, stream: Stream, secret: bytes, received: int) -> bool:
        """Go on over a new connection; the old one, if it still seems alive, is closed."""
        if not hmac.compare_digest(secret, self._secret):
            return False
        with self._lock:  # no frame of the old connection counts from here on: see `_take`
            if not self.outbox.resume(stream, received, self._welcome(resumed=True)):
                return False
            old, self._stream = self._stream, stream
        if old is not None:
            old.close()
        log.info("%s came back to run %r", self.peer, self.run)
        return True

    def _welcome(self, *, resumed: bool) -> Welcome:
        return Welcome(
            self.room.terms, self._secret, __version__, resumed, self._num_received, time.time()
        )

    def read(self, stream: Stream, reader: FrameReader) -> None:
        """Take the peer's frames until this connection ends."""
        try:
            self._read_frames(stream, reader)
        except Truncated:
            pass  # the connection broke within a frame: the peer will send it again
        except WireError as error:
            log.warning("%s broke the protocol: %s", self.peer, error.message)
            self.room.dismiss(self.peer, f"it broke the protocol: {error.message}")
            self._written.wait(_LAST_WORD_S)
        finally:
            stream.close()
            if self.outbox.pause(stream):
                self.room.closed(self, time.monotonic())

    def _read_frames(self, stream: Stream, reader: FrameReader) -> None:
        while (head := reader.next()) is not None:
            prefix, raw_header = head
            frame = Frame(SCHEMA.decode(prefix.kind, raw_header))
            if isinstance(frame.header, Data):
                self._check_data(frame.header, prefix.payload_bytes)
                # Whole frames are relayed: what came is what goes out.
                frame.encoded = encode_prefix(*prefix) + raw_header
            elif prefix.payload_bytes:
                raise Malformed(f"{type(frame.header).__name__} has no payload")
            if prefix.payload_bytes:
                self._wait_for_memory()
                frame.loan = loan = self._memory.lend(prefix.payload_bytes)
                frame.payload = loan.view
                reader.payload_into([frame.payload])
            ports = self._take(stream, frame)
            # On this thread, as far as the network takes it: the bytes are in this core's cache,
            # and waking another thread costs more than writing them.
            for port in ports:
                port.push()
            if self._stream is not stream or isinstance(frame.header, Bye):
                return
            del frame, ports  # let the memory go while waiting for the next one

    def _take(self, stream: Stream, frame: Frame) -> Sequence[Port]:
        """Count and route a whole frame; returns who has something to send now."""
        with self._lock:
            if self._stream is not stream:
                return ()  # this connection has been replaced
            header = frame.header
            if isinstance(header, Beat | Receipt):
                self.outbox.acked(header.received)
                self.outbox.consumed(header.consumed)
                if isinstance(header, Receipt):
                    return ()
                self.outbox.put_now(BeatBack(header.n, self._num_received), wake=False)
                return (self,)
            if isinstance(header, Credit) and header.sender != self.peer.incarnation:
                raise Malformed("a credit in another peer's name")
            self._num_received += 1
            ports = self.room.post(self.peer, frame)
            self._unsaid_bytes += frame.num_bytes
            now = time.monotonic()
            # By time too: on a slow link data leaves no room for beats, and renews the lease.
            if self._unsaid_bytes >= ACK_BYTES or now - self._said_s > self.room.terms.beat_s:
                self._unsaid_bytes, self._said_s = 0, now
                self.outbox.put_now(BeatBack(0, self._num_received), wake=False)
                return (*ports, self)
            return ports

    def _check_data(self, data: Data, payload_bytes: int) -> None:
        if data.sender != self.peer.incarnation:
            raise Malformed("data in another peer's name")
        if sum(data.sizes) != payload_bytes:
            raise Malformed(f"buffers of {sum(data.sizes)} bytes, a payload of {payload_bytes}")

    def _wait_for_memory(self) -> None:
        self._withheld = True
        self._budget.wait(self._stopping)
        self._withheld = False

    def write(self) -> None:
        """Send what is in the outbox until the session ends."""
        while (taken := self.outbox.take()) is not None:
            try:
                taken.via.send(_buffers(taken), timeout_s=self.room.terms.lease_s)
            except (LinkBroken, LinkTimeout):
                taken.via.close()  # its reader ends, and the peer may come back
            del taken  # let the memory go while waiting for the next one
        self._written.set()
        self._forget(self)
        with self._lock:
            if self._stream is not None:
                self._stream.close()

    # -- Port -----------------------------------------------------------------------------------

    @property
    def heard_s(self) -> float:
        """When the peer's last byte came; now, while it is us who do not read."""
        stream = self._stream
        return time.monotonic() if self._withheld or stream is None else stream.heard_s

    @property
    def num_gaps(self) -> int:
        """How many Gaps the peer has been sent."""
        return self.outbox.num_gaps

    def put(self, frame: Frame, *, droppable: bool = False, pushed: bool = False) -> None:
        """Queue a frame for the peer."""
        self.outbox.put(frame, droppable=droppable, wake=not pushed)

    def push(self) -> None:
        """Write what the network takes at once; `write` does the rest."""
        for _ in range(_PUSHED):
            taken = self.outbox.take_now()
            if taken is None:
                return
            try:
                rest = taken.via.send_some(_buffers(taken))
            except LinkBroken:
                taken.via.close()
                rest = ()
            if rest:
                self.outbox.leave(taken, rest)
                return
            self.outbox.sent()
        self.outbox.wake()

    def dismiss(self, reason: str) -> None:
        """Say so, then end."""
        log.info("%s is out of run %r: %s", self.peer, self.run, reason)
        self.outbox.end(Dismissal(reason))

    def end(self) -> None:
        """End without a word: the hub stops."""
        self.outbox.end()
        stream = self._stream
        if stream is not None:
            stream.close()


def _buffers(taken: Taken[Stream]) -> Sequence[Buffer]:
    if taken.rest is not None:
        return taken.rest
    frame = taken.frame
    return [frame.encode()] if frame.payload is None else [frame.encode(), frame.payload]
