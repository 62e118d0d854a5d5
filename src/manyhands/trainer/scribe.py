"""Scribe: gives rounds to the loggers, their rows and what has happened, at the leader alone.

Every peer keeps the pages that it does not know to be logged. With `run.agree` the first of the
roster, that is the leader, says how far its loggers are; when it goes, its successor logs what was
left.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from manyhands.core.errors import UsageError
from manyhands.observe.desk import MOST, Desk
from manyhands.observe.events import Happening
from manyhands.replica.run import Run
from manyhands.trainer.facts import BAD_SAMPLE

log = logging.getLogger(__name__)

_WORD = "logged"


@dataclass(slots=True)
class _Page:
    """Of a round; of the last one there may be events after it, and no row."""

    events: list[Happening] = field(default_factory=list[Happening])
    row: dict[str, float] = field(default_factory=dict[str, float])
    whole: bool = True  # nothing is to be added to the row


class Scribe:
    """Used by the user's thread. No method but `close` waits for a logger."""

    def __init__(self, run: Run, loggers: Sequence[object] | Desk) -> None:
        self._run = run
        self._desk = loggers if isinstance(loggers, Desk) else Desk(loggers)
        if self._desk.ended:
            raise UsageError("this Desk has come to its end", hint="make one for every fit")
        self.params: Mapping[str, object] = {}
        """What a logger is told before its first row."""
        self._pages: dict[int, _Page] = {}  # by round
        self._given: int | None = None  # the last one that this peer's own loggers have got
        self._logged = -1  # the last round that is, as far as this peer knows
        self._unfinished: int | None = None  # a round whose row is not whole at the end
        self._bad: set[str] = set()

    @property
    def num_bad(self) -> int:
        """Samples that any peer has told to be bad, since this one is here."""
        return len(self._bad)

    def note(self, round: int, row: dict[str, float], *, whole: bool) -> None:
        """The row of a round. If it is not `whole`, `add` brings the rest."""
        page = self._page(round)
        page.row.update(row)
        page.whole = whole
        self._log(round + 1 if whole else round)

    def add(self, round: int, rest: dict[str, float]) -> None:
        """The rest of a row."""
        self.note(round, rest, whole=True)

    def close(self, status: str) -> None:
        """What is left is logged, if this peer leads; then finalize the loggers.

        But for a row whose rest has not come: whoever goes on with that round logs it, and there
        are loggers that take a step only once.
        """
        try:
            self._hear()
            if left := self._run.waiting():
                self._end_with(left)
            for at, page in self._pages.items():
                if not page.whole and (self._given is None or at > self._given):
                    page.row = {}
                    self._unfinished = at
            self._log(max(self._pages, default=-1) + 1)
        finally:
            self._desk.finalize(status)

    def _end_with(self, left: Sequence[Happening]) -> None:
        """No round comes any more that could bring these to the others."""
        if self._run.is_leader:
            self._page(self._run.round).events.extend(left)
            return
        for event in left:
            log.warning("not in the log of the run, since it came last: %s %s", *_words(event))

    def _page(self, round: int) -> _Page:
        return self._pages.setdefault(round, _Page())

    def _hear(self) -> None:
        for event in self._run.happened():
            self._page(event.step).events.append(event)
            if event.what == BAD_SAMPLE:
                self._bad.add(event.text)

    def _log(self, stop: int) -> None:
        """Pages of rounds before `stop`."""
        self._hear()
        heard = float(self._run.agree(self._logged, _WORD))
        if heard > self._logged:  # it may be no number yet
            self._logged = int(heard)
        # Not without end: a leader whose logger hangs would have all of them kept.
        kept = sorted(at for at in self._pages if at > self._logged)[-MOST:]
        self._pages = {at: self._pages[at] for at in kept}
        if not self._run.is_leader:
            return
        for at in kept:
            if at < stop and (self._given is None or at > self._given):
                self._give(at, self._pages[at])
        settled = self._desk.settled
        if self._unfinished is not None:  # events of that round may be logged, its row is not
            settled = min(settled, self._unfinished - 1)
        self._logged = max(self._logged, settled)
        self._run.agree(self._logged, _WORD)

    def _give(self, at: int, page: _Page) -> None:
        if self._given is None:
            self._desk.log_hyperparams(self.params)
        for event in page.events:
            self._desk.log_event(event)
        if page.row:
            self._desk.log_metrics(page.row, at)
        self._given = at


def _words(event: Happening) -> tuple[str, str]:
    return event.what, event.text
