"""Courier: sends from a thread of its own, so that whoever reads never waits for whoever writes.

Urgent messages overtake the others: a finished sum is what the others wait for, a contribution of
the next part is not. Order is kept among the urgent ones and among the rest.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from manyhands.core.errors import ManyhandsError, PeerGone

if TYPE_CHECKING:
    from manyhands.core.peers import PeerId
    from manyhands.links.base import Link
    from manyhands.wire.frames import Buffer


class Letter(NamedTuple):
    """A message on its way.

    `buffers` may be a function that makes them when the letter's turn has come. `sent` is called
    once the meeting point holds it, and the buffers may change; without it nobody needs to know.
    """

    to: PeerId | None
    message: bytes
    buffers: Sequence[Buffer] | Callable[[], Sequence[Buffer]] = ()
    sent: Callable[[], None] | None = None


class Courier:
    """Thread-safe. `failed` is called, once, on a thread of the courier's, with what ended it."""

    def __init__(self, link: Link, failed: Callable[[ManyhandsError], None]) -> None:
        self._link, self._failed = link, failed
        self._changed = threading.Condition()
        self._urgent: deque[Letter] = deque()
        self._waiting: deque[Letter] = deque()
        self._unconfirmed: list[Callable[[], None]] = []
        self._busy = False  # a letter is between the queue and the link
        self._ended = False
        self._threads = (
            threading.Thread(target=self._send, name=f"send {link.me}", daemon=True),
            threading.Thread(target=self._confirm, name=f"confirm {link.me}", daemon=True),
        )
        for thread in self._threads:
            thread.start()

    def post(self, letter: Letter, *, urgent: bool = False) -> None:
        """Send it when its turn comes. After `close` it is dropped."""
        with self._changed:
            if not self._ended:
                (self._urgent if urgent else self._waiting).append(letter)
                self._changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Wait until all that was posted is at the meeting point; False if that took too long."""
        with self._changed:
            return self._changed.wait_for(
                lambda: (
                    self._ended
                    or not (self._urgent or self._waiting or self._busy or self._unconfirmed)
                ),
                timeout_s,
            )

    def close(self) -> None:
        """Drop what waits and stop. The link must be closed, or about to be, if a send hangs."""
        with self._changed:
            self._ended = True
            self._urgent.clear()
            self._waiting.clear()
            self._unconfirmed.clear()
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _send(self) -> None:
        while (letter := self._next()) is not None:
            try:
                buffers = letter.buffers() if callable(letter.buffers) else letter.buffers
                self._link.send(letter.to, letter.message, buffers)
            except PeerGone:
                pass  # the view that shows it says so to everybody; here it changes nothing
            except ManyhandsError as error:
                self._end(error)
                return
            with self._changed:
                self._busy = False
                if letter.sent is not None:
                    self._unconfirmed.append(letter.sent)
                self._changed.notify_all()

    def _next(self) -> Letter | None:
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._urgent or self._waiting)
            if self._ended:
                return None
            self._busy = True
            return (self._urgent or self._waiting).popleft()

    def _confirm(self) -> None:
        """Wait for the meeting point beside the sending, not between two letters."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._unconfirmed)
                if self._ended:
                    return
                batch = list(self._unconfirmed)
            try:
                self._link.flush()
            except ManyhandsError as error:
                self._end(error)
                return
            for sent in batch:
                sent()
            with self._changed:
                del self._unconfirmed[: len(batch)]
                self._changed.notify_all()

    def _end(self, error: ManyhandsError) -> None:
        with self._changed:
            first, self._ended = not self._ended, True
            self._changed.notify_all()
        if first:
            self._failed(error)
