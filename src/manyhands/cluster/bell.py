"""The bell: wakes those who wait in the event loop for a change that another thread makes.

    coordinator's threads        the event loop
      ring({17, "host-3"}) ──►     every waiter of job 17 and of host-3 looks again

A long poll is a coroutine here, not a thread: a thousand of them cost a thousand small objects, and
one whose client hangs up ends at once. Rings between two turns of the loop are delivered together.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Hashable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
Receive = Callable[[], Awaitable[Any]]  # ASGI's; its messages are plain dictionaries


class Gone(Exception):
    """The client has hung up: there is nobody to answer."""


class Bell:
    """Made in the event loop; `ring` may be called from any thread, the rest in the loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiters: dict[Hashable, set[asyncio.Event]] = {}
        self._lock = threading.Lock()
        self._rung: set[Hashable] = set()
        self._all = False
        self._scheduled = False
        self.is_closing = False

    def ring(self, topics: Iterable[Hashable] | None) -> None:
        """Wakes who waits for one of the topics; None wakes everybody. Returns at once."""
        with self._lock:
            if topics is None:
                self._all = True
            else:
                self._rung.update(topics)
            if self._scheduled:
                return
            self._scheduled = True
        # A loop that is closed has nobody who waits.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._deliver)

    def close(self) -> None:
        """All waits end now, and none begins any more."""
        self.is_closing = True
        self.ring(None)

    async def hold(
        self,
        look: Callable[[], Awaitable[T]],
        *,
        enough: Callable[[T], bool],
        topics: Iterable[Hashable],
        wait_s: float,
        receive: Receive,
    ) -> T:
        """Looks until it is enough, or `wait_s` are over; returns what was seen last.

        Raises Gone as soon as the client hangs up.
        """
        end_s = self._loop.time() + wait_s
        with self._waiting(topics) as woken:
            async with _watched(receive, woken) as line:
                while True:
                    woken.clear()
                    seen = await look()
                    if line.done():
                        raise Gone
                    rest_s = end_s - self._loop.time()
                    if enough(seen) or self.is_closing or rest_s <= 0:
                        return seen
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(rest_s):
                            await woken.wait()
                    if line.done():
                        raise Gone

    def _deliver(self) -> None:
        with self._lock:
            rung, everybody = self._rung, self._all
            self._rung, self._all, self._scheduled = set(), False, False
        topics = list(self._waiters) if everybody else rung
        for topic in topics:
            for woken in self._waiters.get(topic, ()):
                woken.set()

    @contextlib.contextmanager
    def _waiting(self, topics: Iterable[Hashable]) -> Generator[asyncio.Event]:
        woken = asyncio.Event()
        topics = tuple(topics)
        for topic in topics:
            self._waiters.setdefault(topic, set()).add(woken)
        try:
            yield woken
        finally:
            for topic in topics:
                self._waiters[topic].discard(woken)
                if not self._waiters[topic]:
                    del self._waiters[topic]


@contextlib.asynccontextmanager
async def _watched(receive: Receive, woken: asyncio.Event) -> AsyncGenerator[asyncio.Task[None]]:
    """A task that is done when the client has hung up; it wakes who waits."""

    async def listen() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task = asyncio.create_task(listen())
    task.add_done_callback(lambda _: woken.set())
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
