"""Screen: a demo as it goes on, a table on a terminal and else a line now and then."""

from __future__ import annotations

import sys
import time
from collections import deque
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from manyhands.cli.demo_score import Score

_PICTURE_S = 0.1  # between two of the table
_LINES = 10  # of progress, where there is no table
_RATE_S = 3.0  # that samples a second are a mean of


class Screen:
    """Used by one thread. Outside of the block it only prints."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._shown_s = 0.0
        self._next_line = 1
        self._totals: deque[tuple[float, int]] = deque()
        self.states: dict[str, str] = {}
        """What each peer does, in words."""

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, score: Score) -> None:
        """The state of things, if it is time for it."""
        now_s = time.monotonic()
        self._totals.append((now_s, score.computed.total()))
        while self._totals[0][0] < now_s - _RATE_S:
            self._totals.popleft()
        if self._live is not None and (
            now_s >= self._shown_s + _PICTURE_S or score.round == score.num_rounds
        ):
            self._shown_s = now_s
            self._live.update(self._table(score), refresh=True)
        if self._live is None and score.round >= self._next_line:
            step = max(1, score.num_rounds // _LINES)
            last = score.num_rounds if score.round < score.num_rounds else sys.maxsize
            self._next_line = min(self._next_line + step, last)
            shares = ", ".join(f"{name} {number}" for name, number in score.newest.items())
            self.say(f"{self._progress(score)}; samples of this round: {shares}")

    def _progress(self, score: Score) -> str:
        if not score.round:
            return "torch is imported, the digits are loaded"
        (start_s, before), (now_s, after) = self._totals[0], self._totals[-1]
        rate = (after - before) / (now_s - start_s) if now_s > start_s else 0.0
        loss = score.losses.get(score.round - 1, float("nan"))
        return f"round {score.round} of {score.num_rounds}, loss {loss:.4f}, {rate:.0f} samples/s"

    def _table(self, score: Score) -> Table:
        table = Table("peer", "state", title=self._progress(score), title_justify="left")
        table.add_column("samples of this round", justify="right")
        table.add_column("of all rounds", justify="right")
        for name, state in self.states.items():
            newest = str(score.newest.get(name, 0)) if state == "trains" else ""
            table.add_row(name, state, newest, str(score.computed[name]))
        return table

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
