"""Outbox: what a room still has to say to one peer.

Frames leave in order; `now` frames (beats) leave first and are not kept. Kept frames stay until
the peer says that it holds them, so that a new connection goes on where the old one broke.
Fan-outs to a watching peer are dropped when it is `watch_bytes` behind; a Gap takes their place.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from manyhands.links.messages import Gap, Header
from manyhands.links.room import Frame
from manyhands.wire.frames import Buffer

Via = TypeVar("Via")  # what frames leave by: a connection


class Taken(NamedTuple, Generic[Via]):
    """A frame to send now, and what to send it by. `rest`: what is left of it, if it was begun."""

    frame: Frame
    via: Via
    rest: Sequence[Buffer] | None = None


class Budget:
    """Bytes that wait in many outboxes together. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._changed = threading.Condition()

    def add(self, num_bytes: int) -> None:
        """Count more bytes, or fewer."""
        if num_bytes:
            with self._changed:
                self._used_bytes += num_bytes
                if num_bytes < 0:
                    self._changed.notify_all()

    def wait(self, give_up: Callable[[], bool]) -> None:
        """Return when the limit is kept, or `give_up()`."""
        with self._changed:
            self._changed.wait_for(lambda: self._used_bytes <= self._limit_bytes or give_up())

    def wake(self) -> None:
        """Let waiters ask `give_up` again."""
        with self._changed:
            self._changed.notify_all()


class Outbox(Generic[Via]):
    """Thread-safe. Frames leave one after the other, each whole: there is one sender at a time.

    That is whoever waits in `take`, until it takes again; or whoever got a frame by `take_now`,
    until it says `sent` or leaves the rest to the one who waits.
    """

    def __init__(self, watch_bytes: int, budget: Budget | None = None) -> None:
        self._watch_bytes = watch_bytes
        self._budget = budget or Budget(1 << 62)
        self._changed = threading.Condition()
        self._now: deque[Frame] = deque()
        self._waiting: deque[Frame] = deque()
        self._unacked: deque[Frame] = deque()
        self._num_acked = 0
        self._via: Via | None = None
        self._writing = self._pushing = False  # a frame is being sent: of `take`, of `take_now`
        self._rest: Taken[Via] | None = None  # somebody was: go on with it
        self._ended = False
        self._notice: Frame | None = None  # the Gap that is the last frame, if it still waits
        self._put_bytes = self._consumed_bytes = 0
        self.num_gaps = 0
        self._waiting_bytes = 0

    def put(self, frame: Frame, *, droppable: bool = False, wake: bool = True) -> None:
        """Add a frame; a droppable one may turn into a Gap. Without `wake`, `take_now` it."""
        with self._changed:
            if self._ended:
                return
            if droppable and self._behind(frame.cost):
                # A Gap that has left, or that others follow, does not tell of this loss.
                if self._notice is None:
                    self.num_gaps += 1
                    self._notice = Frame(Gap(1))
                    self._add(self._notice, wake=wake)
                return
            self._notice = None
            self._put_bytes += frame.cost
            self._add(frame, wake=wake)

    def put_now(self, header: Header, *, wake: bool = True) -> None:
        """Add a frame that overtakes the others and is forgotten once sent."""
        with self._changed:
            if not self._ended:
                self._now.append(Frame(header))
                if wake:
                    self._changed.notify()

    def take(self) -> Taken[Via] | None:
        """The next frame and what to send it by; None when the outbox has ended and is empty."""
        with self._changed:
            self._writing = False
            self._changed.wait_for(lambda: self._ready() or (self._ended and not self._pushing))
            self._writing = self._ready()
            return self._take() if self._writing else None

    def take_now(self) -> Taken[Via] | None:
        """The same for who cannot wait: None if there is nothing, or somebody is at it."""
        with self._changed:
            if self._writing or self._rest is not None or not self._ready():
                return None
            self._pushing = True
            return self._take()

    def sent(self) -> None:
        """What was taken has left, or its connection is gone."""
        with self._changed:
            self._pushing = False
            if self._ended:
                self._changed.notify_all()

    def leave(self, taken: Taken[Via], rest: Sequence[Buffer]) -> None:
        """The rest of it has to wait: for whoever waits in `take`."""
        with self._changed:
            self._pushing = False
            if taken.via is self._via:
                self._rest = taken._replace(rest=rest)
            self._changed.notify_all()

    def wake(self) -> None:
        """Let whoever waits in `take` go on with what is here."""
        with self._changed:
            self._changed.notify()

    def _ready(self) -> bool:
        if self._pushing or self._via is None:
            return False
        return bool(self._rest or self._now or self._waiting)

    def _take(self) -> Taken[Via]:
        assert self._via is not None
        if self._rest is not None:
            rest, self._rest = self._rest, None
            return rest
        if self._now:
            return Taken(self._now.popleft(), self._via)
        frame = self._waiting.popleft()
        self._unacked.append(frame)
        self._count(-frame.cost)
        if frame is self._notice:
            self._notice = None
        return Taken(frame, self._via)

    def acked(self, num_frames: int) -> None:
        """The peer holds this many frames in all."""
        with self._changed:
            while self._unacked and self._num_acked < num_frames:
                self._num_acked += 1
                self._unacked.popleft()

    def consumed(self, num_bytes: int) -> None:
        """The peer's reader has taken messages of this cost in all."""
        with self._changed:
            self._consumed_bytes = max(self._consumed_bytes, num_bytes)

    def resume(self, via: Via, num_frames: int, first: Header | None = None) -> bool:
        """Go on by `via`: with `first`, then after the peer's `num_frames`-th frame.

        Returns False, and changes nothing, if that frame is not kept any more.
        """
        with self._changed:
            sent = self._num_acked + len(self._unacked)
            if not self._num_acked <= num_frames <= sent:
                return False
            self.acked(num_frames)
            self._waiting.extendleft(reversed(self._unacked))
            self._count(sum(frame.cost for frame in self._unacked))
            self._unacked.clear()
            self._now.clear()
            self._rest = None
            if first is not None:
                self._now.append(Frame(first))
            self._via = via
            self._changed.notify()
            return True

    def pause(self, via: Via) -> bool:
        """`via` has broken; False if another one has already taken its place."""
        with self._changed:
            if self._via is not via:
                return False
            self._via = self._rest = None
            return True

    def end(self, last: Header | None = None) -> None:
        """Nothing more comes but `last`; what is already here is dropped."""
        with self._changed:
            if self._ended:
                return
            self._ended = True
            self._waiting.clear()
            self._unacked.clear()
            self._now.clear()
            self._count(-self._waiting_bytes)
            # The rest of a frame stays: `last` would be taken for a part of it.
            if last is not None:
                self._now.append(Frame(last))
            self._changed.notify_all()

    def _behind(self, num_bytes: int) -> bool:
        return self._put_bytes - self._consumed_bytes + num_bytes > self._watch_bytes

    def _add(self, frame: Frame, *, wake: bool) -> None:
        self._waiting.append(frame)
        self._count(frame.cost)
        if wake:
            self._changed.notify()

    def _count(self, num_bytes: int) -> None:
        # Not what is sent and kept for a new connection: its receipt may be stuck behind data that
        # waits for this very budget. It is little: peers say what they hold every few megabytes.
        self._waiting_bytes += num_bytes
        self._budget.add(num_bytes)
