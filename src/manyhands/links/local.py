"""The local link: peers that are threads of one process, for tests and single machines.

The room, the endpoint and all promises are the hub's; only the sockets are missing. Rooms live in
one registry of this module, the single piece of state here that outlives a call: `local:///RUN`
must find the same room from everywhere in the process. A room goes when its last peer does.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from manyhands.core.address import LocalAddress
from manyhands.core.errors import LinkBroken, ManyhandsError
from manyhands.core.peers import PeerId
from manyhands.links import arbiter
from manyhands.links.base import LinkSettings, Place
from manyhands.links.endpoint import Endpoint, Sink, Wrap
from manyhands.links.messages import BeatBack, Bye, Data, Dismissal, Header, Terms
from manyhands.links.outbox import Outbox
from manyhands.links.room import Frame, Room
from manyhands.wire.frames import Buffer

log = logging.getLogger(__name__)
_rooms: dict[str, _LocalRoom] = {}
_rooms_lock = threading.Lock()


def open_local(
    address: LocalAddress,
    me: PeerId,
    settings: LinkSettings,
    place: Place | None,
    wrap: Wrap = lambda carrier: carrier,
) -> Endpoint:
    """Join a room of this process, making it if need be."""
    assert address.run is not None
    with _rooms_lock:
        room = _rooms.get(address.run)
        if room is None:
            room = _rooms[address.run] = _LocalRoom(address.run, settings.terms)
        room.num_users += 1
    carrier = LocalCarrier(room, me)
    return Endpoint(me, room.room.terms, wrap(carrier), place).start(settings.connect_s)


class _LocalRoom:
    """A room and the thread that ticks it, as long as somebody uses it."""

    def __init__(self, run: str, terms: Terms) -> None:
        self.run = run
        self.num_users = 0
        self.room = Room(terms, arbiter.first_view(era=1), time.monotonic())
        self._stop = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name=f"room {run}", daemon=True)
        self._ticker.start()

    def _tick(self) -> None:
        while not self._stop.wait(self.room.tick_s):
            self.room.tick(time.monotonic())

    def release(self) -> None:
        """One user less; the last one ends the room."""
        with _rooms_lock:
            self.num_users -= 1
            if self.num_users:
                return
            del _rooms[self.run]
        self._stop.set()
        self._ticker.join()


class LocalCarrier:
    """A port of the room with a thread that reads from it."""

    def __init__(self, room: _LocalRoom, me: PeerId) -> None:
        self._room, self.peer = room, me
        self.bytes_sent = 0
        self.heard_s = time.monotonic()
        self._outbox: Outbox[Sink] = Outbox(room.room.terms.watch_bytes)
        self._num_read = 0
        self._reader: threading.Thread | None = None
        self._released = False
        self._closing = threading.Lock()

    # -- Carrier --------------------------------------------------------------------------------

    def start(self, sink: Sink) -> None:
        self._sink = sink
        self._outbox.resume(sink, 0)
        self._reader = threading.Thread(target=self._read, name=f"read {self.peer}", daemon=True)
        self._reader.start()
        self._room.room.join(self, time.monotonic())

    def carry(self, header: Header, buffers: Sequence[Buffer] = ()) -> None:
        # One copy, shared by all receivers: the sender may change its memory after `flush`.
        payload = memoryview(b"".join(buffers)) if buffers else None
        self.bytes_sent += 0 if payload is None else len(payload)
        self._room.room.post(self.peer, Frame(header, payload))

    def beat(self, n: int, consumed: int) -> None:
        self.heard_s = time.monotonic()
        self._outbox.consumed(consumed)
        self._outbox.put_now(BeatBack(n))

    def flush(self, timeout_s: float) -> None:
        pass  # `carry` has already handed everything over

    def close(self) -> None:
        self._room.room.post(self.peer, Frame(Bye()))
        self._outbox.end()
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join()
        with self._closing:
            first, self._released = not self._released, True
        if first:
            self._room.release()

    # -- Port -----------------------------------------------------------------------------------

    @property
    def num_gaps(self) -> int:
        return self._outbox.num_gaps

    def put(self, frame: Frame, *, droppable: bool = False, pushed: bool = False) -> None:
        self._outbox.put(frame, droppable=droppable)

    def push(self) -> None:
        pass  # its reader has been woken

    def dismiss(self, reason: str) -> None:
        self._outbox.end(Dismissal(reason))

    def _read(self) -> None:
        try:
            self._read_frames()
        except ManyhandsError as error:
            self._fail(error.message)
        except Exception as error:  # the user's `place`
            log.exception("the reader of %s failed", self.peer)
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, why: str) -> None:
        self._sink.failed(LinkBroken(f"a message could not be received: {why}"))
        self._room.room.post(self.peer, Frame(Bye()))

    def _read_frames(self) -> None:
        while (taken := self._outbox.take()) is not None:
            frame, sink, _ = taken
            if isinstance(frame.header, Data):
                _deliver(sink, frame.header, frame)
            else:
                sink.handle(frame.header)
            if not isinstance(frame.header, BeatBack | Dismissal):
                self._num_read += 1
                self._outbox.acked(self._num_read)


def _deliver(sink: Sink, data: Data, frame: Frame) -> None:
    targets = sink.targets(data)
    if targets is None:
        return
    at = 0
    for target in targets:
        if frame.payload is not None:
            target[:] = frame.payload[at : at + len(target)]
        at += len(target)
    sink.delivered(data, targets)
