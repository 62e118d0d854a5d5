"""Mail: messages about rounds as they come from a link, their values in blocks of a pool."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from manyhands.collectives import messages as m
from manyhands.collectives.pool import Block, Pool
from manyhands.core.errors import WireError
from manyhands.core.peers import NO_VIEW, PeerId, ViewNumber
from manyhands.links.base import Delivery

_WITH_VALUES = (m.Part, m.Sum, m.Fill)


class Mail:
    """A link's `place`, made before the link; the engine gives it a pool. Thread-safe."""

    def __init__(self) -> None:
        self.pool: Pool | None = None
        self._lock = threading.Lock()
        self._placed: dict[tuple[int, bytes], tuple[m.AnyMessage, Block]] = {}

    def __call__(
        self, sender: PeerId, message: bytes, sizes: tuple[int, ...]
    ) -> Sequence[memoryview] | None:
        """Where buffers go: those of one message lie one after the other in one block."""
        if self.pool is None or not sizes:
            return None
        try:
            word = m.decode(message)
        except WireError:
            return None  # whoever receives it says what is wrong
        if not isinstance(word, _WITH_VALUES):
            return None
        block = self.pool.take(sum(sizes))
        with self._lock:
            self._placed[sender.incarnation, message] = (word, block)
        return _cut(block, sizes)

    def forget(self, cut: ViewNumber) -> None:
        """What was under way before this cut may never have arrived: do not wait for it."""
        with self._lock:
            self._placed = {k: p for k, p in self._placed.items() if _cut_of(p[0]) >= cut}

    def open(self, delivery: Delivery) -> tuple[m.AnyMessage, Block | None]:
        """The message and its values. Raises Malformed."""
        key = (delivery.sender.incarnation, delivery.message)
        with self._lock:
            placed = self._placed.get(key)
            # Two messages may be of the same words: is this the one whose values lie there?
            if placed is not None and _lies_in(delivery, placed[1]):
                del self._placed[key]
                return placed
        message = m.decode(delivery.message)
        sizes = tuple(buffer.nbytes for buffer in delivery.buffers)
        if self.pool is None or not sum(sizes) or not isinstance(message, _WITH_VALUES):
            return message, None
        block = self.pool.take(sum(sizes))
        for view, buffer in zip(_cut(block, sizes), delivery.buffers, strict=True):
            view[:] = buffer
        return message, block


def _lies_in(delivery: Delivery, block: Block) -> bool:
    return bool(delivery.buffers) and delivery.buffers[0].obj is block.view.obj


def _cut_of(message: m.AnyMessage) -> ViewNumber:
    match message:
        case m.Part() | m.Sum():
            return message.attempt.cut
        case m.Fill():
            return message.sum.attempt.cut if message.cut is None else message.cut
        case _:
            return NO_VIEW


def _cut(block: Block, sizes: Sequence[int]) -> list[memoryview]:
    views: list[memoryview] = []
    at = 0
    for size in sizes:
        views.append(block.view[at : at + size])
        at += size
    return views
