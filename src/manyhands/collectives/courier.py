"""Courier: sends from a thread of its own, so that whoever reads never waits for whoever writes.

Urgent messages overtake the others: a finished sum is what the others wait for, a contribution of
the next part is not. Order is kept among the urgent ones and among the rest.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from manyhands.core.errors import LinkTimeout, ManyhandsError, PeerGone
from manyhands.links.base import DEFAULT_TIMEOUT_S

if TYPE_CHECKING:
    from manyhands.core.peers import PeerId
    from manyhands.links.base import Link
    from manyhands.wire.frames import Buffer

log = logging.getLogger(__name__)
_SLICE_S = 0.2  # of a wait: how often to look whether the end has come
_PATIENT = 16  # letters without hurry that wait for the meeting point's word together


class Letter(NamedTuple):
    """A message on its way.

    `buffers` may be a function that makes them when the letter's turn has come, or says with None
    that nobody wants it any more. `sent` is called once the meeting point holds it, and the
    buffers may change; without it nobody needs to know. Unless there is no `hurry`, the meeting
    point is asked for its word at once.
    """

    to: PeerId | None
    message: bytes
    buffers: Sequence[Buffer] | Callable[[], Sequence[Buffer] | None] = ()
    sent: Callable[[], None] | None = None
    hurry: bool = True


class Courier:
    """Thread-safe. `failed` is called, once, on a thread of the courier's, with what ended it.

    `skip_s`: a letter whose reader takes nothing for that long is dropped. Without it, that ends
    the courier after `DEFAULT_TIMEOUT_S`.
    """

    def __init__(
        self,
        link: Link,
        failed: Callable[[ManyhandsError], None],
        *,
        skip_s: float | None = None,
    ) -> None:
        self._link, self._failed, self._skip_s = link, failed, skip_s
        self._lock = threading.Lock()
        self._urgent: deque[Letter] = deque()
        self._waiting: deque[Letter] = deque()
        self._ended = False
        # Each wakes one thread only, and only if it sleeps: this is in the way of every message.
        self._bell: SimpleQueue[bool] = SimpleQueue()  # one for each letter; False: the end
        self._unconfirmed: SimpleQueue[list[Letter] | None] = SimpleQueue()
        self._threads = (
            threading.Thread(target=self._send, name=f"send {link.me}", daemon=True),
            threading.Thread(target=self._confirm, name=f"confirm {link.me}", daemon=True),
        )
        for thread in self._threads:
            thread.start()

    def post(self, letter: Letter, *, urgent: bool = False) -> None:
        """Send it when its turn comes. After `close` it is dropped."""
        self._post(letter, urgent=urgent)

    def _post(self, letter: Letter, *, urgent: bool) -> bool:
        with self._lock:
            if self._ended:
                return False
            (self._urgent if urgent else self._waiting).append(letter)
        self._bell.put(True)
        return True

    def drain(self, timeout_s: float, hopeful: Callable[[], bool] = lambda: True) -> bool:
        """Wait until all that was posted is at the meeting point.

        False if that took too long, or as soon as it is no longer `hopeful`.
        """
        done = threading.Event()
        # It has nothing to send, and its turn comes after those of all the others.
        self._post(Letter(None, b"", lambda: None, done.set), urgent=False)
        deadline = time.monotonic() + timeout_s
        while not done.wait(_SLICE_S):
            if self._ended or time.monotonic() > deadline or not hopeful():
                return done.is_set()
        return True

    def close(self) -> None:
        """Drop what waits and stop. The link must be closed, or about to be, if a send hangs."""
        self._stop()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _stop(self) -> bool:
        """Whether this is the first time."""
        with self._lock:
            first, self._ended = not self._ended, True
            self._urgent.clear()
            self._waiting.clear()
        self._bell.put(False)
        self._unconfirmed.put(None)
        return first

    def _send(self) -> None:
        try:
            self._send_all()
        finally:  # whatever it was: somebody waits for what will not be sent
            self._end(ManyhandsError("the thread that sends has failed; the log says why"))

    def _send_all(self) -> None:
        batch: list[Letter] = []  # whoever confirms is woken when there is something to do
        while self._bell.get() and (letter := self._next()) is not None:
            try:
                buffers = letter.buffers() if callable(letter.buffers) else letter.buffers
                if buffers is not None:
                    self._carry(letter, buffers)
            except PeerGone:
                pass  # the view that shows it says so to everybody; here it changes nothing
            except ManyhandsError as error:
                self._end(error)
                return
            if letter.sent is not None:
                batch.append(letter)
                if letter.hurry or len(batch) == _PATIENT:
                    self._unconfirmed.put(batch)
                    batch = []

    def _carry(self, letter: Letter, buffers: Sequence[Buffer]) -> None:
        """In slices, so that `close` need not wait for a reader that takes nothing."""
        patience_s = self._skip_s or DEFAULT_TIMEOUT_S
        deadline = time.monotonic() + patience_s
        while not self._ended:
            try:
                self._link.send(letter.to, letter.message, buffers, timeout_s=_SLICE_S)
            except LinkTimeout as error:
                if time.monotonic() < deadline:
                    continue
                if self._skip_s is None:
                    raise LinkTimeout(error.waited_for, patience_s, hint=error.hint) from None
                log.warning("a message was dropped: no %s", error.waited_for)
            return

    def _next(self) -> Letter | None:
        with self._lock:
            if self._ended:
                return None
            return (self._urgent or self._waiting).popleft()

    def _confirm(self) -> None:
        try:
            self._confirm_all()
        finally:
            self._end(ManyhandsError("the thread that confirms has failed; the log says why"))

    def _confirm_all(self) -> None:
        """Wait for the meeting point beside the sending, not between two letters."""
        while (batch := self._unconfirmed.get()) is not None:
            with contextlib.suppress(Empty):
                while (more := self._unconfirmed.get_nowait()) is not None:
                    batch += more
            if self._ended:
                return
            try:
                self._link.flush()
            except ManyhandsError as error:
                self._end(error)
                return
            for letter in batch:
                if letter.sent is not None:
                    letter.sent()

    def _end(self, error: ManyhandsError) -> None:
        if self._stop():
            self._failed(error)
