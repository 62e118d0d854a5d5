"""Memory for frames on their way, used again.

Fresh memory is cleared, and costs a page fault for every 4 KiB: for a relay that is a good part of
all its work.
"""

from __future__ import annotations


class Memory:
    """Lends pieces of up to `piece_bytes`; keeps about `keep_bytes` that nobody uses.

    Thread-safe, and without a lock: pieces come back from `__del__`, which may run at any moment,
    also while this very thread is in here. Appending to and popping from a list is one step.
    """

    def __init__(self, piece_bytes: int, keep_bytes: int) -> None:
        self._piece_bytes = piece_bytes
        self._keep = max(1, keep_bytes // piece_bytes)
        self._free: list[bytearray] = []

    def lend(self, num_bytes: int) -> Loan:
        """A piece of that size; a larger one than usual is not kept, nor a much smaller one."""
        if not self._piece_bytes // 4 < num_bytes <= self._piece_bytes:
            return Loan(None, bytearray(num_bytes), num_bytes)
        try:
            piece = self._free.pop()
        except IndexError:
            piece = bytearray(self._piece_bytes)
        return Loan(self, piece, num_bytes)

    def take_back(self, piece: bytearray) -> None:
        """Nobody looks at it any more."""
        if len(self._free) < self._keep:
            self._free.append(piece)


class Loan:
    """A piece of memory. It goes back when this object does: whoever uses `view` holds on to it."""

    __slots__ = ("_memory", "_piece", "view")

    def __init__(self, memory: Memory | None, piece: bytearray, num_bytes: int) -> None:
        self._memory, self._piece = memory, piece
        self.view = memoryview(piece)[:num_bytes]

    def __del__(self) -> None:
        if self._memory is not None:
            self._memory.take_back(self._piece)
