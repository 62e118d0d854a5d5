"""Scribe: gives the rows of rounds to the loggers, at the leader of the run alone.

Every peer keeps the rows that it does not know to be logged. With `run.agree` the first of the
roster, that is the leader, says how far its loggers are; when it goes, its successor logs what was
left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from manyhands.observe.desk import MOST, Desk
from manyhands.replica.run import Run

_WORD = "logged"


class Scribe:
    """Used by the user's thread. No method but `close` waits for a logger."""

    def __init__(self, run: Run, loggers: Sequence[object]) -> None:
        self._run, self._desk = run, Desk(loggers)
        self.params: Mapping[str, object] = {}
        """What a logger is told before its first row."""
        self._rows: dict[int, dict[str, float]] = {}  # by round
        self._given: int | None = None  # the last one that this peer's own loggers have got
        self._logged = -1  # the last round that is, as far as this peer knows

    def note(self, round: int, row: dict[str, float], *, whole: bool) -> None:
        """The row of a round. If it is not `whole`, `add` brings the rest."""
        self._rows[round] = row
        self._log(round + 1 if whole else round)

    def add(self, round: int, rest: dict[str, float]) -> None:
        """The rest of a row."""
        self._rows.setdefault(round, {}).update(rest)
        self._log(round + 1)

    def close(self, status: str) -> None:
        """What is left is logged, if this peer leads; then finalize the loggers."""
        try:
            self._log(max(self._rows, default=-1) + 1)
        finally:
            self._desk.finalize(status)

    def _log(self, stop: int) -> None:
        """Rows of rounds before `stop`."""
        heard = float(self._run.agree(self._logged, _WORD))
        if heard > self._logged:  # it may be no number yet
            self._logged = int(heard)
        # Not without end: a leader whose logger hangs would have all of them kept.
        kept = sorted(at for at in self._rows if at > self._logged)[-MOST:]
        self._rows = {at: self._rows[at] for at in kept}
        if not self._run.is_leader:
            return
        for at in kept:
            if at < stop and (self._given is None or at > self._given):
                self._give(at)
        self._logged = max(self._logged, self._desk.settled)
        self._run.agree(self._logged, _WORD)

    def _give(self, at: int) -> None:
        if self._given is None:
            self._desk.log_hyperparams(self.params)
        self._desk.log_metrics(self._rows[at], at)
        self._given = at
