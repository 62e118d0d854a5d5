"""Recent: a cache that forgets what was not asked for longest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """At most `size` values. What it holds depends on the order of the calls only.

    So peers that ask for the same keys in the same order hold, and lack, the same ones.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K, make: Callable[[], V]) -> V:
        """What is kept for a key, or is made for it now. If `make` raises, nothing is kept."""
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        made = make()
        self._kept[key] = made
        if len(self._kept) > self._size:
            self._kept.popitem(last=False)
        return made

    def values(self) -> list[V]:
        """All that are kept, the one that goes next first."""
        return list(self._kept.values())

    def __len__(self) -> int:
        return len(self._kept)
