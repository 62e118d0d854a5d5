"""The hub link: a peer's side of the connection to a hub.

Frames that the hub may not have yet are kept by reference; when the connection breaks, the reader
thread dials again, both sides say how many frames they hold, and go on after those. A hub that was
restarted knows nothing of the session: the peer is then taken back as what it was, and a cut
follows.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from manyhands.core.address import HubAddress
from manyhands.core.errors import (
    LinkBroken,
    LinkClosed,
    LinkError,
    LinkTimeout,
    ManyhandsError,
    Truncated,
)
from manyhands.core.peers import NO_VIEW, PeerId, PeerState, View
from manyhands.links.base import LinkSettings, Place
from manyhands.links.dial import Dialler, check_security
from manyhands.links.endpoint import Endpoint, Sink, Wrap
from manyhands.links.messages import (
    SCHEMA,
    Beat,
    BeatBack,
    Bye,
    Credit,
    Data,
    Dismissal,
    Header,
    NewView,
    Ready,
    Receipt,
    Return,
    Terms,
    Welcome,
)
from manyhands.links.passing import passes
from manyhands.links.session import ACK_BYTES
from manyhands.links.stream import Stream
from manyhands.wire.frames import Buffer, FrameReader, Prefix, payload_size

log = logging.getLogger(__name__)
_REDIAL_S = 0.1  # the first pause between two attempts; it doubles up to one second
_BYE_S = 1.0  # for the last frame of a closing link


def open_hub(
    address: HubAddress,
    me: PeerId,
    settings: LinkSettings,
    place: Place | None,
    wrap: Wrap = lambda carrier: carrier,
) -> Endpoint:
    """Dial the hub and join the run."""
    check_security(address)
    carrier = HubCarrier(address, me, settings)
    terms = carrier.dial()
    # A restarted hub publishes its first view one lease after it began to collect returns.
    patience_s = settings.connect_s + 1.5 * terms.lease_s
    return Endpoint(me, terms, wrap(carrier), place).start(patience_s)


class _Kept(NamedTuple):
    """A frame that the hub may not hold yet."""

    header: Header
    encoded: bytes
    buffers: Sequence[Buffer]
    num_bytes: int
    sent_s: float


class HubCarrier:
    """Moves frames over one connection at a time."""

    def __init__(self, address: HubAddress, me: PeerId, settings: LinkSettings) -> None:
        self._me, self._settings = me, settings
        self._terms = settings.terms
        self._dialler = Dialler(address, me, settings.connect_s)
        self._session = b""
        self._reader: FrameReader | None = None
        self._sink: Sink | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._view, self._state = NO_VIEW, PeerState.WATCHING
        # Outgoing. `_turn` makes frames leave in the order in which they are kept. `_out` guards
        # the account of them, the oldest first, and is never held while the network is waited
        # for: the reader thread needs it, and a reader that waits for a writer is a deadlock.
        self._turn = threading.Lock()
        self._out = threading.Condition()
        self._stream: Stream | None = None
        self._kept: deque[_Kept] = deque()
        self._kept_bytes = 0
        self._num_carried = self._num_acked = 0  # of all sessions
        self._num_before = 0  # of those, in earlier sessions
        self._failure: LinkError | None = None
        self._said_bye = False
        self._resender: threading.Thread | None = None
        # Incoming, used by the reader thread only.
        self._num_received = 0
        self._unsaid_bytes = 0
        self._consumed = 0

    # -- connecting -----------------------------------------------------------------------------

    def dial(self) -> Terms:
        """The first connection. Raises Refused, LinkBroken or LinkTimeout."""
        stream, reader, welcome = self._dialler.greet(self._terms, None)
        self._terms, self._session = welcome.terms, welcome.session
        self._stream, self._reader = stream, reader
        return welcome.terms

    # -- Carrier --------------------------------------------------------------------------------

    def start(self, sink: Sink) -> None:
        self._sink = sink
        self._thread = threading.Thread(target=self._run, name=f"read {self._me}", daemon=True)
        self._thread.start()

    def carry(self, header: Header, buffers: Sequence[Buffer] = ()) -> None:
        size = payload_size(buffers)
        encoded = SCHEMA.encode(header, size)
        if isinstance(header, Data):
            self._wait_for_hub()
        with self._turn:
            with self._out:
                kept = _Kept(header, encoded, buffers, len(encoded) + size, time.monotonic())
                self._kept.append(kept)
                self._kept_bytes += kept.num_bytes
                self._num_carried += 1
                stream = self._stream
            if stream is not None:
                self._write(stream, kept)

    def _wait_for_hub(self) -> None:
        """Without a connection nothing leaves; then no more is kept than a hub would keep."""
        with self._out:
            self._out.wait_for(
                lambda: (
                    self._stream is not None
                    or self._kept_bytes < self._terms.watch_bytes
                    or self._is_over()
                )
            )

    def _is_over(self) -> bool:
        return self._closing.is_set() or self._failure is not None

    def _write(self, stream: Stream, kept: _Kept) -> bool:
        receipt: list[Buffer] = []
        if self._unsaid_bytes >= ACK_BYTES:  # the reader found no moment to say so
            self._unsaid_bytes = 0
            receipt = [self._receipt()]
        try:
            stream.send([kept.encoded, *kept.buffers, *receipt], timeout_s=self._terms.lease_s)
        except (LinkBroken, LinkTimeout):
            # The frame is kept. The reader thread sees the end and dials again.
            stream.close()
            with self._out:
                if self._stream is stream:
                    self._stream = None
            return False
        return True

    def beat(self, n: int, consumed: int) -> None:
        self._consumed = consumed
        stream = self._stream
        if stream is None:
            return None
        if time.monotonic() - stream.heard_s > self._terms.lease_s / 2:
            return stream.close()  # a dead connection that nobody has closed: dial again
        # Unless data is being written: then that is the sign of life.
        beat = SCHEMA.encode(Beat(n, self._num_received, consumed))
        self._say(stream, beat, wait_s=self._terms.beat_s / 4)
        return None

    def _receipt(self) -> bytes:
        return SCHEMA.encode(Receipt(self._num_received, self._consumed))

    def _say(self, stream: Stream, frame: bytes, *, wait_s: float = 0.0) -> bool:
        """Whether it could be said in time."""
        with contextlib.suppress(LinkBroken):
            return stream.send_now([frame], wait_s=wait_s)
        return False

    @property
    def bytes_sent(self) -> int:
        stream = self._stream
        return 0 if stream is None else stream.bytes_sent

    def flush(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        with self._out:
            target, stream = self._num_carried, self._stream
        if stream is not None:
            # A beat that waits its turn: the answer says what the hub holds.
            beat = Beat(0, self._num_received, self._consumed)
            with contextlib.suppress(LinkBroken, LinkTimeout):
                stream.send([SCHEMA.encode(beat)], timeout_s=timeout_s)
        with self._out:
            self._out.wait_for(
                lambda: self._num_acked >= target or self._is_over(),
                max(0.0, deadline - time.monotonic()),
            )
            if self._num_acked >= target:
                return
            if self._failure is not None:
                raise self._failure
            if self._closing.is_set():
                raise LinkClosed("the link was closed while frames were on their way")
            raise LinkTimeout("word from the hub that it holds all frames", timeout_s)

    def close(self) -> None:
        with self._out:
            first, self._said_bye = not (self._said_bye or self._is_over()), True
            self._closing.set()
            self._out.notify_all()
            stream = self._stream
        reader = None if self._thread is threading.current_thread() else self._thread
        bye = SCHEMA.encode(Bye())
        if stream is not None and first and self._say(stream, bye, wait_s=_BYE_S) and reader:
            # The hub hangs up. Hanging up first, with data unread, could take the Bye with it.
            reader.join(_BYE_S)
        self._dialler.stop()
        if stream is not None:
            stream.close()
        if reader is not None:
            reader.join()
            if self._resender is not None:
                self._resender.join()
        elif self._thread is None and stream is not None:  # never started
            stream.detach()

    # -- the reader thread ----------------------------------------------------------------------

    def _run(self) -> None:
        stream, reader = self._stream, self._reader
        assert stream is not None
        assert reader is not None
        assert self._sink is not None
        try:
            while True:
                try:
                    self._serve(stream, reader)
                finally:
                    with self._out:
                        self._stream = None
                    stream.close()
                    stream.detach()
                if self._closing.is_set():
                    return
                log.warning(
                    "%s lost its hub, %s, and looks for it for up to %g s",
                    self._me,
                    self._dialler.where,
                    self._settings.outage_s,
                )
                stream, reader = self._redial()
                log.info("%s is back at its hub", self._me)
        except LinkError as error:
            self._fail(error)
        except ManyhandsError as error:
            self._fail(_broken(error))
        except Exception as error:  # the user's `place`
            log.exception("the reader of %s failed", self._me)
            self._fail(LinkBroken(f"a message could not be received: {error!r}"))
        finally:
            with self._out:
                self._out.notify_all()

    def _fail(self, error: LinkError) -> None:
        assert self._sink is not None
        if not self._closing.is_set():
            self._failure = error
            self._sink.failed(error)

    def _serve(self, stream: Stream, reader: FrameReader) -> None:
        """Hand frames to the sink until this connection ends."""
        assert self._sink is not None
        while (head := self._next(reader)) is not None:
            prefix, raw_header = head
            header = SCHEMA.decode(prefix.kind, raw_header)
            if isinstance(header, Data):
                if not self._receive(reader, header):
                    return
            elif isinstance(header, BeatBack):
                self._acked(header.received)
                self._sink.handle(header)
                continue  # beats are not counted
            else:
                if isinstance(header, NewView):
                    self._note_view(header.view)
                self._sink.handle(header)
                if isinstance(header, Dismissal):
                    self._closing.set()
                    return
            self._num_received += 1
            self._unsaid_bytes += prefix.payload_bytes
            if self._unsaid_bytes >= ACK_BYTES and self._say(stream, self._receipt()):
                self._unsaid_bytes = 0

    def _next(self, reader: FrameReader) -> tuple[Prefix, bytes] | None:
        try:
            return reader.next()
        except Truncated:
            return None  # the connection broke within a frame

    def _receive(self, reader: FrameReader, data: Data) -> bool:
        """One message, straight to its place; False if the connection broke within it."""
        assert self._sink is not None
        targets = self._sink.targets(data)
        try:
            if targets is None:
                reader.skip_payload()
            else:
                reader.payload_into(targets)
        except Truncated:
            return False
        if targets is not None:
            self._sink.delivered(data, targets)
        return True

    def _acked(self, received: int) -> None:
        assert self._sink is not None
        last: _Kept | None = None
        with self._out:
            while self._kept and self._num_acked - self._num_before < received:
                last = self._kept.popleft()
                self._kept_bytes -= last.num_bytes
                self._num_acked += 1
            self._out.notify_all()
        if last is not None:
            self._sink.heard(last.sent_s)

    def _note_view(self, view: View) -> None:
        self._view = view.number
        member = view.member(self._me.incarnation)
        if member is not None:
            self._state = member.state

    def _redial(self) -> tuple[Stream, FrameReader]:
        """Find the hub again. Raises Excluded or Refused, or LinkBroken after the outage time."""
        assert self._sink is not None
        give_up = time.monotonic() + self._settings.outage_s
        pause = _REDIAL_S
        while True:
            back = Return(self._session, self._num_received, self._view, self._state)
            try:
                stream, reader, welcome = self._dialler.greet(self._terms, back)
            except ManyhandsError as error:
                if not passes(error):
                    raise
                if time.monotonic() > give_up:
                    raise LinkBroken(
                        f"the hub was not found again within {self._settings.outage_s:g} s: {error}"
                    ) from None
            else:
                self._go_on(stream, welcome)
                return stream, reader
            # Jitter: a hub that restarts should not meet all its peers in one instant.
            if self._closing.wait(pause * random.uniform(0.5, 1.0)):  # noqa: S311
                raise LinkClosed("the link was closed while it looked for its hub")
            pause = min(1.0, 2 * pause)

    def _go_on(self, stream: Stream, welcome: Welcome) -> None:
        assert self._sink is not None
        if self._resender is not None:
            self._resender.join()  # it wrote to a connection that is closed
        self._turn.acquire()
        with self._out:
            if welcome.resumed:
                self._acked(welcome.received)
            else:
                self._start_over(welcome)
            self._stream = stream
            self._out.notify_all()
            again = list(self._kept)
        # Beside the reader, which must not wait for the hub to read: the hub may be waiting for it.
        self._resender = threading.Thread(
            target=self._resend, args=(stream, again), name=f"resend {self._me}", daemon=True
        )
        self._resender.start()

    def _resend(self, stream: Stream, again: Sequence[_Kept]) -> None:
        """Takes over `_turn`: nothing new leaves before what is sent again."""
        try:
            for kept in again:
                if not self._write(stream, kept):
                    return
        finally:
            self._turn.release()

    def _start_over(self, welcome: Welcome) -> None:
        """Another life of the hub: what was under way is lost, and a cut will say so.

        Words to the arbiter still hold, and saying them twice does no harm; but whoever was to
        become active now has a Gap to see first.
        """
        assert self._sink is not None
        self._session = welcome.session
        self._kept = deque(k for k in self._kept if not isinstance(k.header, Data | Credit | Ready))
        self._kept_bytes = sum(kept.num_bytes for kept in self._kept)
        self._num_before = self._num_acked = self._num_carried - len(self._kept)
        self._num_received = 0
        self._sink.renewed()


def _broken(error: ManyhandsError) -> LinkBroken:
    return LinkBroken(f"the hub broke the protocol: {error.message}", hint=error.hint)
