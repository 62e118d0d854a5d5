"""News: what single peers have to tell, on its way to all of them.

A peer's news go with its report of a round; the lead puts everybody's into the notes of the
record, as many as there is room for; with that they come back to all, in the same order. Whoever
has told something tells it until it has come back: a round that is tried again, a lead that dies,
a full record lose nothing and double nothing.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Annotated, NamedTuple

import msgspec

log = logging.getLogger(__name__)

MOST_WAITING = 256
_WHAT_BYTES, _TEXT_BYTES = 32, 240
_A_REPORT, _A_RECORD = 4, 12  # so many: about 4 kB, in notes that have 16
_SOURCE_BYTES = 8
_PEER_BYTES = 128  # a name has up to 100, and its incarnation comes after it

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class Item(NamedTuple):
    """One thing that a peer tells. Numbers of one source grow."""

    number: _Count
    time_s: float
    what: Annotated[str, msgspec.Meta(max_length=_WHAT_BYTES)]
    text: Annotated[str, msgspec.Meta(max_length=_TEXT_BYTES)]


class Bulletin(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one peer tells with one round. `source` is its process, whatever its incarnation."""

    source: Annotated[bytes, msgspec.Meta(max_length=_SOURCE_BYTES)]
    peer: Annotated[str, msgspec.Meta(max_length=_PEER_BYTES)]
    items: Annotated[tuple[Item, ...], msgspec.Meta(max_length=_A_REPORT)]


class Told(NamedTuple):
    """One thing that has come."""

    source: str
    peer: str
    item: Item


class News:
    """One peer's part in it. The engine reads the report; all else is the user's thread."""

    def __init__(self) -> None:
        self.peer = ""
        self._source = secrets.token_bytes(_SOURCE_BYTES)
        self._lock = threading.Lock()
        self._next = 0
        self._waiting: deque[Item] = deque()
        self._heard: dict[bytes, int] = {}  # the last number of each source
        self._new: deque[Told] = deque(maxlen=_A_RECORD * MOST_WAITING)
        self._dropped = 0

    def tell(self, what: str, text: str) -> None:
        """To all peers of the run, with one of the next rounds. What is too long is cut."""
        with self._lock:
            if len(self._waiting) >= MOST_WAITING:
                self._dropped += 1
                if self._dropped == 1:
                    log.warning("more than %d events wait for a round: some are lost", MOST_WAITING)
                return
            words = _cut(what, _WHAT_BYTES), _cut(text, _TEXT_BYTES)
            self._waiting.append(Item(self._next, time.time(), *words))
            self._next += 1

    @property
    def waiting(self) -> list[Told]:
        """What has not come back yet."""
        with self._lock:
            return [Told(self._source.hex(), self.peer, item) for item in self._waiting]

    def report(self) -> Bulletin | None:
        """What this peer says with a round."""
        with self._lock:
            if not self._waiting:
                return None
            items = tuple(self._waiting)[:_A_REPORT]
            return Bulletin(self._source, self.peer, items)

    def hear(self, bulletins: Iterable[Bulletin]) -> None:
        """Those of a round that is committed."""
        for bulletin in bulletins:
            for item in bulletin.items:
                if item.number <= self._heard.get(bulletin.source, -1):
                    continue
                self._heard[bulletin.source] = item.number
                self._new.append(Told(bulletin.source.hex(), bulletin.peer, item))
        back = self._heard.get(self._source, -1)
        with self._lock:
            while self._waiting and self._waiting[0].number <= back:
                self._waiting.popleft()

    def take(self) -> list[Told]:
        """What was heard since the last time."""
        taken = list(self._new)
        self._new.clear()
        return taken


def gather(bulletins: Iterable[Bulletin]) -> tuple[Bulletin, ...]:
    """What the lead puts into a record, of everybody's in roster order: what there is room for."""
    room, taken = _A_RECORD, list[Bulletin]()
    for bulletin in bulletins:
        items = bulletin.items[:room]
        if items:
            taken.append(msgspec.structs.replace(bulletin, items=items))
            room -= len(items)
    return tuple(taken)


def _cut(text: str, num_bytes: int) -> str:
    return text.encode(errors="replace")[:num_bytes].decode(errors="ignore")
