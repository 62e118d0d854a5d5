"""What the tests of tables have in common. Loads no torch: worker processes import it."""

from __future__ import annotations

import io
from collections.abc import Callable

from manyhands.data.table import BadSample


def bad(use: Callable[[], object]) -> BadSample:
    """The error that this raises, without the frames it came through: they hold open files."""
    try:
        use()
    except BadSample as error:
        return BadSample(error.where, error.reason)
    raise AssertionError("nothing was bad")


def notes(use: Callable[[], object], kind: type[Exception]) -> list[str]:
    """What was added to the error that this raises."""
    try:
        use()
    except kind as error:
        return list(error.__notes__)
    raise AssertionError("nothing was raised")


class Blob:
    """As one that is not on this machine: a file without a number."""

    name, place = "rows.jsonl", "memory://rows.jsonl"

    def __init__(self, data: bytes) -> None:
        self._data, self.opened = data, 0

    @property
    def size(self) -> int:
        return len(self._data)

    def open(self, mode: str = "rb"):
        self.opened += 1
        return io.BytesIO(self._data)

    def read_bytes(self) -> bytes:
        return self._data


def put_rows(table, indices, results) -> None:
    """In a process of its own."""
    results.put([table[i] for i in indices])
