"""Journal: what has happened to a run, as this peer knows it, and as all of its peers tell it.

Some things every peer sees by itself, in the records of rounds: who has joined and left, whose
bits were others, whose samples were refused. They have the same id everywhere. Other things only
one peer knows (a checkpoint, a sample that it cannot read): it tells them, see `News`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from manyhands.collectives.instructions import DropState, Generation, Lost, Retry, StopReason
from manyhands.collectives.outcomes import Stopped
from manyhands.core.peers import PeerId
from manyhands.observe.events import Happening
from manyhands.replica.conductor import AGAIN, Event
from manyhands.replica.deviation import Deviated
from manyhands.replica.keeper import NotSaved, Saved
from manyhands.replica.news import News, Told

Own = Event | Saved | NotSaved | Deviated

_KEPT = 1000  # events, and happenings that nobody has asked for


class Journal:
    """Used by the user's thread. Iterating over it gives this peer's own events, newest last."""

    def __init__(self, news: News) -> None:
        self._news = news
        self._events: deque[Own] = deque(maxlen=_KEPT)
        self._happened: deque[Happening] = deque(maxlen=_KEPT)
        self._members: dict[int, str] = {}  # of the next round
        self._step = 0

    def __iter__(self) -> Iterator[Own]:
        return iter(self._events)

    def extend(self, events: Iterable[Own]) -> None:
        """See `append`."""
        for event in events:
            self.append(event)

    def append(self, event: Own) -> None:
        """Something that this peer has seen, and perhaps others too."""
        self._events.append(event)
        match event:
            case Saved():
                self._news.tell("saved", f"round {event.round}, {event.place}")
            case NotSaved():
                self._news.tell("not saved", f"round {event.round}: {event.error.message}")
            case DropState():
                self._news.tell("started over", event.reason)
            case Stopped(reason=StopReason() as reason) if reason in AGAIN:
                self._news.tell("put out", f"{reason.value}: {event.text}")
            case Deviated():
                peer = None if event.peer is None else str(event.peer)
                text = f"before round {event.round}, {event.tensor}"
                self._note("deviated", peer, text, f"{peer} {event.round}")
            case Retry():
                text = f"samples {event.refused} of a round were refused"
                self._note("refused", None, text, f"{event.round} {event.attempt}")
            case Lost():
                self._note("lost", None, f"samples {event.ranges} kill peers", str(event.round))
            case Generation():
                text = f"no member was left: followers go on from {event.applied} rounds"
                self._note("taken over", None, text, str(event.cut))
            case _:
                pass

    def take(
        self, step: int, members: Sequence[int], name_of: Callable[[int], PeerId | None]
    ) -> list[Happening]:
        """What has happened since the last time. So many rounds are over, and these peers are the
        members of the next one.
        """
        self._step = step
        now = {peer: str(name_of(peer)) for peer in members}
        for peer, name in self._members.items():
            if peer not in now:
                self._note("left", name, "", str(peer))
        for peer, name in now.items():
            if peer not in self._members:
                self._note("joined", name, "", str(peer))
        self._members = now
        self._happened.extend(self._happening(told) for told in self._news.take())
        taken = list(self._happened)
        self._happened.clear()
        return taken

    def waiting(self) -> list[Happening]:
        """What this peer has told, and no round has brought back yet."""
        return [self._happening(told) for told in self._news.waiting]

    def _note(self, what: str, peer: str | None, text: str, which: str) -> None:
        made = Happening(
            id=f"{what} {which}",
            step=self._step,
            time_s=time.time(),
            peer=peer,
            what=what,
            text=text,
        )
        self._happened.append(made)

    def _happening(self, told: Told) -> Happening:
        item = told.item
        return Happening(
            id=f"{told.source} {item.number}",
            step=self._step,
            time_s=item.time_s,
            peer=told.peer,
            what=item.what,
            text=item.text,
        )
