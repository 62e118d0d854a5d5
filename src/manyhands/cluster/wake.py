"""Wake: what an agent's own thread waits for, as one thing to select on.

Signals, events of other threads, a time of the clock that also runs in sleep, keepers' pipes.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
from collections import deque
from types import FrameType, TracebackType
from typing import Generic, Self, TypeVar

from manyhands.cluster.keeper import Alarm

_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

Event = TypeVar("Event")


class Wake(Generic[Event]):
    """A context manager, in the main thread. A stop that was ignored before (nohup) stays so."""

    def __init__(self) -> None:
        self.stops = 0
        """Signals that asked to stop, so far."""
        self._events: deque[Event] = deque()
        self._alarm = Alarm()
        self._selector = selectors.DefaultSelector()
        self._read, self._write = os.pipe()
        for fd in (self._read, self._write):
            os.set_blocking(fd, False)
        self._selector.register(self._read, selectors.EVENT_READ)
        if self._alarm.fd >= 0:
            self._selector.register(self._alarm.fd, selectors.EVENT_READ)

    def tell(self, event: Event) -> None:
        """From any thread; does not block."""
        self._events.append(event)
        # Full: it is awake. Closed: some thread was not waited for, and nobody listens any more.
        with contextlib.suppress(OSError):
            os.write(self._write, b"\0")

    def watch(self, fd: int, whose: object) -> None:
        """Name `whose` when `fd` can be read."""
        self._selector.register(fd, selectors.EVENT_READ, whose)

    def unwatch(self, fd: int) -> None:
        """Before it is closed."""
        self._selector.unregister(fd)

    def wait(self, until_s: float | None) -> tuple[list[object], list[Event]]:
        """Who can be read, and what was told; both may be empty: a signal, or the time."""
        ready = self._selector.select(self._alarm.set(until_s))
        with contextlib.suppress(BlockingIOError):
            self.stops += sum(number in _STOPS for number in os.read(self._read, 4096))
        events: list[Event] = []
        while self._events:
            events.append(self._events.popleft())
        return [key.data for key, _ in ready if key.data is not None], events

    def __enter__(self) -> Self:
        self._fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._before = {
            number: signal.signal(number, _leave_to_reader)
            for number in (signal.SIGCHLD, *_STOPS)
            if number == signal.SIGCHLD or signal.getsignal(number) != signal.SIG_IGN
        }
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._fd)
        self._alarm.close()
        self._selector.close()
        read, write = self._read, self._write
        self._read = self._write = -1
        os.close(read)
        os.close(write)


def _leave_to_reader(number: int, frame: FrameType | None) -> None:
    """Python writes the number to the wakeup descriptor by itself."""
