"""Frames off a stream: taken one after another, and bodies many frames at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from manyhands.core.errors import LinkBroken, Malformed
from manyhands.links.amqp import frames
from manyhands.links.amqp.frames import part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from manyhands.links.stream import Stream

_READ_AHEAD = 4096  # bytes read beyond what is needed; a body's share of them is copied
_MAX_AT_ONCE = 256  # frames of a body that are read together
_MAX_SCATTER = 1000  # views a read; the system's own limit is 1024


class FrameReader:
    """Takes frames off `stream`, none larger than `frame_max`.

    The connection's own methods may come between any two frames of a message: they go to `aside`.
    Raises LinkBroken when the stream ends, WireError when what comes is not AMQP.
    """

    def __init__(
        self,
        stream: Stream,
        aside: Callable[[frames.Incoming], None],
        *,
        place: str,
        frame_max: int,
    ) -> None:
        self._stream, self._aside, self._place = stream, aside, place
        self._frame_max = frame_max
        self._buffer = memoryview(bytearray(frame_max + frames.FRAME_BYTES))
        self._at: int = 0  # what is read ahead: buffer[at:filled]
        self._filled: int = 0

    def payload(self, kind: int) -> bytes:
        """The payload of the next frame, which must be of this kind."""
        return self._take(self._expect(kind))

    def body(self, targets: Iterable[memoryview], body_bytes: int) -> None:
        """Read a body into `targets`, whose room is exactly `body_bytes`.

        A broker cuts a body into frames of one size. So the whole of it is read at once, values
        into `targets` and what stands between two frames aside. Where something else stands there
        (a heartbeat, a shorter frame), what came from there on is read again, frame by frame.
        """
        room = [target.cast("B") for target in targets if target.nbytes]
        done = 0
        while done < body_bytes:
            left = body_bytes - done
            size = self._body_frame(left)
            cut = frames.cut_body(size, min(left, size * _MAX_AT_ONCE))
            done += self._frames(part(room, done, left), cut)

    def discard(self, left: int) -> None:
        """Read a body of `left` bytes into nothing."""
        while left:
            size = self._body_frame(left)
            left -= size
            while size:
                step = min(size, self._filled - self._at) or self._refill(min(size, _READ_AHEAD))
                step = min(step, size)
                self._at += step
                size -= step
            self._frame_end()

    def _frames(self, room: Sequence[memoryview], cut: frames.Cut) -> int:
        """Read body frames, the head of the first being read; how many bytes of `room` are filled,
        which is less than the cut has where other frames came."""
        seams = bytearray(len(cut.seams))
        pieces = cut.lay_out(room, memoryview(seams))
        got = self._unbuffer(pieces, cut.num_bytes)
        for i, end in enumerate(cut.ends):
            while got < end:
                got += self._receive(part(pieces, got, cut.num_bytes - got))
            if got == cut.num_bytes and bytes(seams) == cut.seams:
                break  # all of it, at one look
            seam = slice(i * frames.FRAME_BYTES, (i + 1) * frames.FRAME_BYTES)
            if bytes(seams[seam]) != cut.seams[seam]:
                start = end - len(cut.seams[seam])
                self._give_back(part(pieces, start, got - start))
                self._frame_end()
                return min((i + 1) * cut.size, cut.body_bytes)
        return cut.body_bytes

    def _unbuffer(self, targets: Sequence[memoryview], size: int) -> int:
        """Move up to `size` bytes of what is read ahead into `targets`."""
        size = min(size, self._filled - self._at)
        for target in part(targets, 0, size):
            target[:] = self._buffer[self._at : self._at + len(target)]
            self._at += len(target)
        return size

    def _give_back(self, views: Sequence[memoryview]) -> None:
        """Let these bytes be what comes next, before what is read ahead."""
        data = b"".join([*views, self._buffer[self._at : self._filled]])
        if len(data) > len(self._buffer):
            self._buffer = memoryview(bytearray(len(data)))
        self._buffer[: len(data)] = data
        self._at, self._filled = 0, len(data)

    def _body_frame(self, left: int) -> int:
        size = self._expect(frames.BODY)
        if not 0 < size <= left:
            raise Malformed(f"a body frame of {size} bytes where {left} are left of the body")
        return size

    def _expect(self, kind: int) -> int:
        """The payload size of the next frame, which must be of this kind."""
        while True:
            self._fill(frames.HEAD_BYTES)
            got, channel, size = frames.decode_head(self._buffer, self._at, self._frame_max)
            self._at += frames.HEAD_BYTES
            if got == frames.HEARTBEAT:
                self._take(size)
            elif got == kind and (channel or kind == frames.METHOD):
                return size
            elif not channel and got == frames.METHOD:
                self._aside(frames.decode_method(self._take(size)))
            else:
                raise Malformed(f"a frame of kind {got} where one of kind {kind} belongs")

    def _take(self, size: int) -> bytes:
        """A payload, checked to end where a frame ends."""
        self._fill(size + 1)
        payload = bytes(self._buffer[self._at : self._at + size])
        self._at += size
        self._frame_end()
        return payload

    def _frame_end(self) -> None:
        self._fill(1)
        if bytes(self._buffer[self._at : self._at + 1]) != frames.FRAME_END:
            raise Malformed("a frame without its end mark")
        self._at += 1

    def _fill(self, size: int) -> None:
        """Have at least `size` bytes read ahead; `size` is at most a frame."""
        while self._filled - self._at < size:
            self._refill(max(size - (self._filled - self._at), _READ_AHEAD))

    def _refill(self, size: int) -> int:
        if self._at:  # what is left is a piece of a frame's head or tail, or one small frame
            left = self._filled - self._at
            self._buffer[:left] = self._buffer[self._at : self._filled]
            self._at, self._filled = 0, left
        got = self._receive([self._buffer[self._filled : self._filled + size]])
        self._filled += got
        return got

    def _receive(self, targets: Sequence[memoryview]) -> int:
        if len(targets) == 1:
            got = self._stream.recv_into(targets[0])
        else:
            got = self._stream.recv_each_into(targets[:_MAX_SCATTER])
        if not got:
            raise LinkBroken(f"{self._place} closed the connection without a word")
        return got
