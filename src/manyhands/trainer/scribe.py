"""Scribe: gives the rows of rounds to the loggers, at the leader of the run alone.

Every peer keeps the rows that it does not know to be logged. With `run.agree` the first of the
roster, that is the leader, says how far it is; when it goes, its successor logs what was left.
"""

from __future__ import annotations

from collections.abc import Sequence

from manyhands.observe.loggers import Logger
from manyhands.replica.run import Run

_WORD = "logged"


class Scribe:
    """Used by the user's thread."""

    def __init__(self, run: Run, loggers: Sequence[Logger]) -> None:
        self._run, self._loggers = run, loggers
        self._rows: dict[int, dict[str, float]] = {}  # by round
        self._logged = -1  # the last round that is, as far as this peer knows

    def note(self, round: int, row: dict[str, float], *, whole: bool) -> None:
        """The row of a round. If it is not `whole`, `add` brings the rest."""
        self._rows[round] = row
        self._log(round + 1 if whole else round)

    def add(self, round: int, rest: dict[str, float]) -> None:
        """The rest of a row."""
        self._rows.setdefault(round, {}).update(rest)
        self._log(round + 1)

    def close(self) -> None:
        """What is left is logged, if this peer leads; then close the loggers."""
        try:
            self._log(max(self._rows, default=-1) + 1)
        finally:
            for logger in self._loggers:
                logger.close()

    def _log(self, stop: int) -> None:
        """Rows of rounds before `stop`."""
        heard = float(self._run.agree(self._logged, _WORD))
        if heard > self._logged:  # it may be no number yet
            self._logged = int(heard)
        self._rows = {at: row for at, row in self._rows.items() if at > self._logged}
        if not self._run.is_leader:
            return
        for at in sorted(at for at in self._rows if at < stop):
            for logger in self._loggers:
                logger.log(at, self._rows[at])
            self._logged = at
        self._run.agree(self._logged, _WORD)
