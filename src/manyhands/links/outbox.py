"""Outbox: what a room still has to say to one peer.

Frames leave in order; `now` frames (beats) leave first and are not kept. Kept frames stay until
the peer says that it holds them, so that a new connection goes on where the old one broke.
Fan-outs to a watching peer are dropped when it is `watch_bytes` behind; a Gap takes their place.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from manyhands.links.messages import Gap, Header
from manyhands.links.room import Frame

Via = TypeVar("Via")  # what frames leave by: a connection


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
    """Thread-safe. One taker at a time."""

    def __init__(self, watch_bytes: int, budget: Budget | None = None) -> None:
        self._watch_bytes = watch_bytes
        self._budget = budget or Budget(1 << 62)
        self._changed = threading.Condition()
        self._now: deque[Frame] = deque()
        self._waiting: deque[Frame] = deque()
        self._unacked: deque[Frame] = deque()
        self._num_acked = 0
        self._via: Via | None = None
        self._ended = False
        self._notice: Frame | None = None  # the Gap that is the last frame, if it still waits
        self._put_bytes = self._consumed_bytes = 0
        self.num_gaps = 0
        self._waiting_bytes = 0

    def put(self, frame: Frame, *, droppable: bool = False) -> None:
        """Add a frame; a droppable one may turn into a Gap."""
        with self._changed:
            if self._ended:
                return
            if droppable and self._behind(frame.cost):
                # A Gap that has left, or that others follow, does not tell of this loss.
                if self._notice is None:
                    self.num_gaps += 1
                    self._notice = Frame(Gap(1))
                    self._add(self._notice)
                return
            self._notice = None
            self._put_bytes += frame.cost
            self._add(frame)

    def put_now(self, header: Header) -> None:
        """Add a frame that overtakes the others and is forgotten once sent."""
        with self._changed:
            if not self._ended:
                self._now.append(Frame(header))
                self._changed.notify()

    def take(self) -> tuple[Frame, Via] | None:
        """The next frame and what to send it by; None when the outbox has ended and is empty."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._ended or (self._via is not None and (self._now or self._waiting))
            )
            if self._via is None or not (self._now or self._waiting):
                return None
            if self._now:
                return self._now.popleft(), self._via
            frame = self._waiting.popleft()
            self._unacked.append(frame)
            self._count(-frame.cost)
            if frame is self._notice:
                self._notice = None
            return frame, self._via

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
            self._via = None
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
            if last is not None:
                self._now.append(Frame(last))
            self._changed.notify_all()

    def _behind(self, num_bytes: int) -> bool:
        return self._put_bytes - self._consumed_bytes + num_bytes > self._watch_bytes

    def _add(self, frame: Frame) -> None:
        self._waiting.append(frame)
        self._count(frame.cost)
        self._changed.notify()

    def _count(self, num_bytes: int) -> None:
        # Not what is sent and kept for a new connection: its receipt may be stuck behind data that
        # waits for this very budget. It is little: peers say what they hold every few megabytes.
        self._waiting_bytes += num_bytes
        self._budget.add(num_bytes)
