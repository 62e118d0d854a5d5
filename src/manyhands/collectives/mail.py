"""Mail: messages about rounds as they come from a link, their values in blocks of a pool."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from manyhands.collectives import messages as m
from manyhands.collectives.pool import Block, Pool
from manyhands.core.errors import WireError
from manyhands.core.peers import PeerId
from manyhands.links.base import Delivery


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
        if not isinstance(word, m.Part | m.Sum | m.Fill):
            return None
        block = self.pool.take(sum(sizes))
        with self._lock:
            self._placed[sender.incarnation, message] = (word, block)
        return _cut(block, sizes)

    def open(self, delivery: Delivery) -> tuple[m.AnyMessage, Block | None]:
        """The message and its values. Raises Malformed."""
        with self._lock:
            placed = self._placed.pop((delivery.sender.incarnation, delivery.message), None)
        if placed is not None:
            return placed
        message = m.decode(delivery.message)
        sizes = tuple(buffer.nbytes for buffer in delivery.buffers)
        if self.pool is None or not sum(sizes):
            return message, None
        block = self.pool.take(sum(sizes))
        for view, buffer in zip(_cut(block, sizes), delivery.buffers, strict=True):
            view[:] = buffer
        return message, block


def _cut(block: Block, sizes: Sequence[int]) -> list[memoryview]:
    views: list[memoryview] = []
    at = 0
    for size in sizes:
        views.append(block.view[at : at + size])
        at += size
    return views
