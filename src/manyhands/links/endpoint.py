"""Endpoint: the half of a link that is the same for all of them.

It keeps the promises of `base.Link` (windows, stream numbers, leases, views, errors) over a
`Carrier`, which only moves frames between this peer and its meeting point:

    user threads ── send ──► windows, numbering ──► carrier.carry ──► meeting point
    user threads ◄─ receive ─ inbox ◄─ sink.* ◄──── carrier's reader thread
    beat thread ──────────────────────────────────► carrier.beat
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self, cast

from manyhands.core.errors import (
    Excluded,
    LinkClosed,
    LinkError,
    LinkTimeout,
    Malformed,
    Oversized,
    PeerGone,
)
from manyhands.core.peers import NO_VIEW, PeerId, PeerState, View
from manyhands.links.base import DEFAULT_TIMEOUT_S, Delivery, Event, Gap, Place
from manyhands.links.lease import HeldLease
from manyhands.links.messages import (
    MAX_BUFFERS,
    MESSAGE_BYTES,
    REASON_CHARS,
    BeatBack,
    Credit,
    Data,
    Dismissal,
    Gone,
    Header,
    Leaving,
    Lost,
    NewView,
    Ready,
    Resign,
    Terms,
    cost_of,
)
from manyhands.links.messages import Gap as GapNotice
from manyhands.links.window import ReceiveWindows, SendWindows, StreamCheck
from manyhands.wire.frames import Buffer, payload_size


class Carrier(Protocol):
    """Moves frames between one peer and its meeting point, in order, over reconnects."""

    def start(self, sink: Sink) -> None:
        """Begin to hand what arrives to `sink`, on a thread of the carrier's own."""
        ...

    def carry(self, header: Header, buffers: Sequence[Buffer] = ()) -> None:
        """Take a frame to be delivered. Thread-safe; may block while the network is slow."""
        ...

    def beat(self, n: int, consumed: int) -> None:
        """Say that this peer is alive. Must not wait behind queued data."""
        ...

    def flush(self, timeout_s: float) -> None:
        """Return when the meeting point holds every frame carried so far."""
        ...

    @property
    def bytes_sent(self) -> int:
        """Bytes that have left for the meeting point over the present connection."""
        ...

    def close(self) -> None:
        """Say good-bye if there is somebody to say it to; stop and join all threads."""
        ...


class Sink(Protocol):
    """Where a carrier's reader thread puts what arrives."""

    def targets(self, data: Data) -> Sequence[memoryview] | None:
        """Where the buffers of this message go; None: it came before, drop it."""
        ...

    def delivered(self, data: Data, buffers: Sequence[memoryview]) -> None:
        """The message is complete."""
        ...

    def handle(self, header: Header) -> None:
        """Any other frame."""
        ...

    def heard(self, sent_s: float) -> None:
        """The meeting point has what was sent at that time."""
        ...

    def renewed(self) -> None:
        """The meeting point has forgotten what was under way; a cut will follow."""
        ...

    def failed(self, error: LinkError) -> None:
        """The carrier cannot go on."""
        ...

    def backlog_bytes(self) -> int:
        """Bytes of messages that have arrived and nobody has received."""
        ...


Wrap = Callable[[Carrier], Carrier]
"""A seam for tests: what stands between an endpoint and its carrier."""


class Endpoint:
    """A `Link` over a carrier. Opened by `open_link`, which has already made the carrier known."""

    def __init__(self, me: PeerId, terms: Terms, carrier: Carrier, place: Place | None) -> None:
        self._me, self._terms, self._carrier, self._place = me, terms, carrier, place
        self._send_lock = threading.Lock()  # numbering and carrying are one act
        lock = threading.RLock()
        self._changed = threading.Condition(lock)  # guards everything below
        # Of the same lock, for whoever waits in `receive`: each credit, and each word that the
        # meeting point holds what was sent, would wake it for nothing.
        self._came = threading.Condition(lock)
        # With a message its header; with a Gap how many the meeting point had told of by then.
        self._inbox: deque[tuple[Event, Data | int | None]] = deque()
        self._view = View(NO_VIEW, ())
        self._names: dict[int, PeerId] = {}
        self._gone: set[int] = set()
        self._out = SendWindows(terms.window_bytes)
        self._in = ReceiveWindows(terms.window_bytes)
        self._streams = StreamCheck()
        self._lease = HeldLease(terms.lease_s)
        self._gaps_told = self._gaps_seen = 0  # by the meeting point, by the user
        self._consumed = self._told_consumed = 0
        self._backlog = 0
        self._error: LinkError | None = None
        self._stop = False
        self._poke = threading.Event()  # the next beat is due now
        self._beater = threading.Thread(target=self._beat, name=f"beat {me}", daemon=True)

    # -- Link -----------------------------------------------------------------------------------

    @property
    def me(self) -> PeerId:
        return self._me

    @property
    def terms(self) -> Terms:
        return self._terms

    @property
    def bytes_sent(self) -> int:
        return self._carrier.bytes_sent

    def send(
        self,
        to: PeerId | None,
        message: bytes,
        buffers: Sequence[Buffer] = (),
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        _check_types(to, message, buffers, timeout_s)
        size = payload_size(buffers)
        self._check_size(len(message), len(buffers), size)
        address = None if to is None else to.incarnation
        if address == self._me.incarnation:
            raise PeerGone(f"{to} (this peer itself; a link talks to the others)")
        deadline = time.monotonic() + timeout_s
        while True:
            self._wait_for_room(to, address, deadline, timeout_s)
            with self._send_lock:
                with self._changed:
                    readers = self._readers(to, address)
                    if self._out.waiting_for(readers):
                        continue  # another thread was faster
                    seq = self._out.debit(address, readers, cost_of(len(message), size))
                sizes = tuple(memoryview(buffer).nbytes for buffer in buffers)
                data = Data(self._me.incarnation, address, seq, sizes, message)
                self._carrier.carry(data, buffers)
            with self._changed:
                return self._check_open()  # it may have ended while the network was slow

    def receive(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> Event:
        _check_types(None, b"", (), timeout_s)
        with self._changed:
            if not self._came.wait_for(lambda: self._inbox or self._error, timeout_s):
                raise LinkTimeout("message or view", timeout_s)
            if not self._inbox:
                assert self._error is not None
                raise self._error.with_traceback(None)
            event, about = self._inbox.popleft()
            credit = self._take(about) if isinstance(about, Data) else None
            if isinstance(about, int):
                self._gaps_seen = about
            if self._consumed - self._told_consumed >= self._terms.watch_bytes // 4:
                self._poke.set()  # a watching peer that reads fast should not miss anything
        if credit is not None:
            self._carrier.carry(credit)
        return event

    def tell(self, word: Ready | Leaving | Gone | Resign) -> None:
        with self._changed:
            self._check_open()
            if isinstance(word, Ready):
                word = Ready(gaps=self._gaps_seen)
            elif isinstance(word, Resign):
                word = Resign(word.finished, word.reason[:REASON_CHARS])
        self._carrier.carry(word)

    def flush(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        with self._changed:
            self._check_open()
        self._carrier.flush(timeout_s)

    def lease_start_s(self) -> float:
        return self._lease.start_s  # a number: it needs no lock

    def renew_lease(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        asked_s = time.monotonic()
        self._poke.set()
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._error or self._lease.start_s > asked_s, timeout_s
            ):
                raise LinkTimeout("answer to a beat", timeout_s)
            self._check_open()

    def close(self) -> None:
        with self._changed:
            self._inbox.clear()
            self._end(LinkClosed("the link was closed on this side"))
        self._stop = True
        self._poke.set()
        self._carrier.close()
        if self._beater.is_alive() and self._beater is not threading.current_thread():
            self._beater.join()

    def __repr__(self) -> str:
        state = "open" if self._error is None else type(self._error).__name__
        return f"<Link of {self._me}, {state}, view {self._view.number}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- life -----------------------------------------------------------------------------------

    def start(self, timeout_s: float) -> Self:
        """Begin; returns when a view shows this peer. Closes itself when that fails."""
        try:
            self._carrier.start(self)
            self._beater.start()
            with self._changed:
                here = self._changed.wait_for(
                    lambda: self._error or self._view.member(self._me.incarnation), timeout_s
                )
                if self._error:
                    raise self._error.with_traceback(None)
            if not here:
                raise LinkTimeout("view that shows this peer", timeout_s)
        except BaseException:
            self.close()
            raise
        return self

    def _beat(self) -> None:
        n = 0
        while not self._stop and self._error is None:
            n += 1
            with self._changed:
                self._lease.sent(n, time.monotonic())
                self._told_consumed = self._consumed
            self._carrier.beat(n, self._told_consumed)
            self._poke.wait(self._terms.beat_s)
            self._poke.clear()

    def _end(self, error: LinkError) -> None:
        with self._changed:
            self._error = self._error or error
            self._lease.end()
            self._changed.notify_all()
            self._came.notify_all()

    # -- sending --------------------------------------------------------------------------------

    def _check_size(self, message_bytes: int, num_buffers: int, size: int) -> None:
        # Each buffer takes a few bytes of the header beside the message.
        if message_bytes + 5 * num_buffers > MESSAGE_BYTES or num_buffers > MAX_BUFFERS:
            raise Oversized(
                f"message of {message_bytes} bytes with {num_buffers} buffers; at most "
                f"{MESSAGE_BYTES} bytes are taken, 5 for each buffer, and {MAX_BUFFERS} buffers"
            )
        if size > self._terms.part_bytes:
            raise Oversized(
                f"buffers of {size} bytes; the peers of this run take {self._terms.part_bytes}",
                hint="send larger data as several parts",
            )

    def _wait_for_room(
        self, to: PeerId | None, address: int | None, deadline: float, timeout_s: float
    ) -> None:
        with self._changed:
            while True:
                full = self._out.waiting_for(self._readers(to, address))
                if not full:
                    return
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    names = ", ".join(str(self._names[i]) for i in full)
                    raise LinkTimeout(
                        f"credit from {names}",
                        timeout_s,
                        hint="they are alive but do not read: look at what they are doing",
                    )

    def _readers(self, to: PeerId | None, address: int | None) -> list[int]:
        """Whose windows this message uses. Fan-outs pass watching peers by."""
        self._check_open()
        if address is not None:
            if self._view.member(address) is None:
                raise PeerGone(to)
            return [address]
        return [
            m.peer.incarnation
            for m in self._view.roster
            if m.state is not PeerState.WATCHING and m.peer.incarnation != self._me.incarnation
        ]

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._error.with_traceback(None)

    # -- receiving ------------------------------------------------------------------------------

    def _take(self, data: Data) -> Credit | None:
        cost = data.cost
        self._consumed += cost
        self._backlog -= cost
        due = self._in.take(data.sender, fanout=data.to is None, seq=data.seq, num_bytes=cost)
        if due is None or data.sender in self._gone:
            return None
        return Credit(self._me.incarnation, data.sender, *due)

    def targets(self, data: Data) -> Sequence[memoryview] | None:
        if sum(data.sizes) > self._terms.part_bytes:
            raise Oversized(f"{sum(data.sizes)} bytes of buffers; {self._terms.part_bytes} agreed")
        with self._changed:
            if data.sender in self._gone or not self._streams.is_new(
                data.sender, fanout=data.to is None, seq=data.seq
            ):
                self._consumed += data.cost
                return None
        sender = self._name(data.sender)
        placed = self._place(sender, data.message, data.sizes) if self._place else None
        if placed is None:
            whole = memoryview(bytearray(sum(data.sizes)))
            return _cut(whole, data.sizes)
        if tuple(view.nbytes for view in placed) != data.sizes:
            raise ValueError(
                f"`place` gave room for {tuple(view.nbytes for view in placed)} bytes; "
                f"message {data.message[:40]!r} of {sender} has buffers of {data.sizes}"
            )
        return placed

    def delivered(self, data: Data, buffers: Sequence[memoryview]) -> None:
        fanout = data.to is None
        event = Delivery(self._name(data.sender), data.message, tuple(buffers), fanout)
        with self._changed:
            hole = self._streams.arrived(data.sender, fanout=fanout, seq=data.seq)
            watching = self._watching()
            if hole and watching:
                self._add_gap()
            self._backlog += data.cost
            self._arrive(event, data)
        if hole and not watching:
            self._carrier.carry(Lost(data.sender))

    def handle(self, header: Header) -> None:
        match header:
            case Credit():
                with self._changed:
                    self._out.credit(header.sender, header.direct_seq, header.fanout_seq)
                    self._changed.notify_all()
            case BeatBack():
                with self._changed:
                    if self._error is None:
                        self._lease.answered(header.n)
                        self._changed.notify_all()
            case NewView():
                self._adopt(header.view)
            case GapNotice():
                with self._changed:
                    self._streams.forgive()
                    self._gaps_told += 1
                    self._add_gap()
            case Dismissal():
                self._end(Excluded(header.reason))
            case _:
                raise Malformed(f"a meeting point does not send {type(header).__name__}")

    def heard(self, sent_s: float) -> None:
        with self._changed:
            if self._error is None:
                self._lease.renew(sent_s)

    def renewed(self) -> None:
        with self._changed:
            self._streams.forgive()
            self._consumed = self._told_consumed = 0
            # A meeting point that starts anew has told of no gap yet.
            self._gaps_told = self._gaps_seen = 0
            self._inbox = deque(
                (event, 0 if isinstance(event, Gap) else about) for event, about in self._inbox
            )
            if self._watching():
                self._add_gap()

    def failed(self, error: LinkError) -> None:
        self._end(error)

    def backlog_bytes(self) -> int:
        with self._changed:
            return self._backlog

    def _adopt(self, view: View) -> None:
        with self._changed:
            old = self._view
            if view.number <= old.number:
                return
            self._view = view
            here = {m.peer.incarnation for m in view.roster}
            self._names.update({m.peer.incarnation: m.peer for m in view.roster})
            self._gone |= {m.peer.incarnation for m in old.roster} - here
            for windows in (self._out, self._in, self._streams):
                windows.forget(self._gone)
            if view.cut != old.cut:
                self._out.reset()
            self._arrive(view, None)
            if self._me.incarnation not in here and old.member(self._me.incarnation):
                self._end(Excluded("a view without it was published"))
            self._changed.notify_all()

    def _add_gap(self) -> None:
        if self._inbox and isinstance(self._inbox[-1][0], Gap):
            self._inbox.pop()  # for a user who does not read, one is as good as many
        self._arrive(Gap(), self._gaps_told)

    def _arrive(self, event: Event, about: Data | int | None) -> None:
        if self._error is None:  # nothing comes after the end
            self._inbox.append((event, about))
            self._came.notify_all()

    def _watching(self) -> bool:
        member = self._view.member(self._me.incarnation)
        return member is None or member.state is PeerState.WATCHING

    def _name(self, incarnation: int) -> PeerId:
        # A message may overtake the view that introduces its sender.
        return self._names.get(incarnation) or PeerId("?", incarnation)


def _cut(whole: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    cut: list[memoryview] = []
    at = 0
    for size in sizes:
        cut.append(whole[at : at + size])
        at += size
    return cut


def _check_types(to: object, message: object, buffers: object, timeout_s: object) -> None:
    """Say what a slip of the hand means, rather than what it leads to."""
    if not isinstance(message, bytes):
        raise TypeError(f"message must be bytes, not {type(message).__name__}: encode it first")
    if not (to is None or isinstance(to, PeerId)):
        raise TypeError(f"to must be a PeerId of a view, or None for all, not {to!r}")
    if isinstance(buffers, bytes | bytearray | memoryview) or not isinstance(buffers, Sequence):
        raise TypeError("buffers must be a list of bytes-like objects: write [buffer]")
    for buffer in cast("Sequence[object]", buffers):
        if not isinstance(buffer, bytes | bytearray | memoryview):
            hint = "; wire.tensors.bytes_of(tensor) gives its bytes" * hasattr(buffer, "dtype")
            raise TypeError(f"a buffer must be bytes-like, not {type(buffer).__name__}{hint}")
    if not isinstance(timeout_s, int | float):
        raise TypeError("timeout_s must be a number of seconds: every wait has an end")
