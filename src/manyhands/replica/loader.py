"""Loader: what the user iterates over in place of a DataLoader."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from manyhands.core.errors import UsageError
from manyhands.data.calendar import Calendar
from manyhands.data.fetch import Request, Rows
from manyhands.data.quarantine import Quarantine, Rules
from manyhands.data.source import Source
from manyhands.data.supply import Supply, supply_for
from manyhands.data.table import BadSample
from manyhands.replica.agenda import Agenda
from manyhands.replica.conductor import Conductor, Turn
from manyhands.replica.replica import Replica
from manyhands.replica.units import Units

log = logging.getLogger(__name__)


class Intake:
    """The batches of one data set, and what is not there of them.

    `least`: samples that a model needs of a batch that is to have more.
    """

    def __init__(self, source: Source, seed: int, calendar: Calendar, least: int = 1) -> None:
        self._supply: Supply = supply_for(source, seed, _guess(calendar))
        self._quarantine = Quarantine(source.rules or Rules())
        self._least = least
        self.wait_s = 0.0
        """That were waited for batches, so far."""

    @property
    def bad(self) -> list[BadSample]:
        """The first ones that were to be in a batch here, each once."""
        return list(self._quarantine.bad)

    def rows(self, request: Request, *, counts: bool) -> Rows:
        """What is there of it; a stand-in, of no samples, for less than the model needs.

        Raises what reading raises and, of batches that count, TooManyBad.
        """
        began_s = time.perf_counter()
        try:
            rows = self._supply.read(request)
            if counts:
                self._quarantine.meet(request.epoch, rows.bad)
            if rows.num >= min(self._least, len(request.positions)):
                return rows
            if rows.num and counts:
                log.warning(
                    "positions %s of epoch %d: all but %d of these samples are bad, and batch "
                    "normalisation needs %d; they count nothing",
                    ", ".join(map(str, request.positions)),
                    request.epoch,
                    rows.num,
                    self._least,
                )
            return Rows(self._supply.stand_in(request), 0)
        finally:
            self.wait_s += time.perf_counter() - began_s

    def rest(self) -> None:
        """Nothing is wanted for a while."""
        self._supply.rest()

    def close(self) -> None:
        """Nothing is left running."""
        self._supply.close()


class Loader:
    """One epoch a time: each iteration over it is the next epoch of this process.

    Epochs that the run has behind it yield nothing: whoever joins late, or resumes, runs through
    its own loop to the place where the others are.
    """

    def __init__(
        self,
        replica: Replica,
        conductor: Conductor,
        agenda: Agenda,
        units: Units,
        intake: Intake,
        num_rounds: int | None,
        dataset: Any,  # noqa: ANN401
    ) -> None:
        self._replica, self._conductor = replica, conductor
        self._agenda, self._units, self._intake = agenda, units, intake
        self._num_rounds = num_rounds
        self._held: Turn | None = None  # of a later epoch than the one that was asked for
        self.at_end: Callable[[], None] = lambda: None
        """Called when an iteration has no more."""
        self.epoch = -1
        """The one that is iterated over."""
        # What loops ask a DataLoader for, to say how far they are.
        self.dataset, self.batch_size = dataset, agenda.calendar.batch

    @property
    def wait_s(self) -> float:
        """Seconds that the loop has waited for batches, so far; not those of the evaluation."""
        return self._intake.wait_s

    @property
    def bad(self) -> list[BadSample]:
        """The bad samples that this peer was to compute, each once."""
        return self._intake.bad

    def __len__(self) -> int:
        """Rounds of an epoch. Iterations may be more: a round can take several."""
        return self._agenda.calendar.rounds_per_epoch

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        for turn in self._turns(2 * self.epoch):
            if turn.evaluates:
                raise UsageError(
                    f"after round {turn.round - 1} comes an evaluation, and the loop trains on",
                    hint="iterate over run.evaluation after every epoch",
                )
            rows = self._intake.rows(self._units.request(turn), counts=turn.task is not None)
            self._replica.begin(turn, rows.num)
            yield rows.batch

    def evaluate(self, intake: Intake) -> Iterator[Any]:
        """This peer's share of the evaluation after the epoch; nothing if that is behind the run.

        Who has no share of it waits here for the others.
        """
        for turn in self._turns(2 * self.epoch + 1):
            if not turn.evaluates:
                raise UsageError(
                    f"round {turn.round} comes next, and the loop evaluates",
                    hint="run the loop over the loader to its end before run.evaluation",
                )
            if turn.task is None:
                self._replica.begin(turn)
                continue
            rows = intake.rows(self._units.request(turn), counts=True)
            self._replica.begin(turn, rows.num)
            yield rows.batch
        intake.rest()

    def abandon(self) -> Turn | None:
        """The loop has ended: a turn of a later epoch, that nobody will take here."""
        turn, self._held = self._held, None
        return turn

    def _turns(self, leg: int) -> Iterator[Turn]:
        while (turn := self._next(leg)) is not None:
            yield turn
        self.at_end()

    def _next(self, leg: int) -> Turn | None:
        self._replica.settle()
        if self._held is None:
            at = self._conductor.base.round
            if self._is_over(at) or self._agenda.leg(at) > leg:
                if self._agenda.leg(at - 1) <= leg:
                    self._replica.caught_up()
                return None  # the state is that after the round until the next leg begins
            self._held = self._replica.next_turn()
        if self._held is None:
            self._replica.stop()
            return None
        if self._agenda.leg(self._conductor.base.count(self._held.number)) > leg:
            return None
        turn, self._held = self._held, None
        return turn

    def _is_over(self, count: int) -> bool:
        return self._num_rounds is not None and count >= self._num_rounds


class Evaluation:
    """What a loop iterates over after each epoch: its samples count once, over all peers."""

    def __init__(self, loader: Loader, intake: Intake) -> None:
        self._loader, self._intake = loader, intake

    def __iter__(self) -> Iterator[Any]:
        return self._loader.evaluate(self._intake)

    @property
    def bad(self) -> list[BadSample]:
        """The bad samples that this peer was to evaluate, each once."""
        return self._intake.bad


def _guess(calendar: Calendar) -> Callable[[Request], Request]:
    """Most often a peer's share of the next round is its share of this one."""

    def guess(request: Request) -> Request:
        moved = tuple(p + calendar.batch for p in request.positions)
        last = calendar.rounds_per_epoch * calendar.batch
        # The greatest need not be the last: what is evaluated is shared out regardless of batches.
        if max(moved) < min(calendar.size, last):
            return Request(request.epoch, moved)
        return Request(request.epoch + 1, tuple(p % calendar.batch for p in request.positions))

    return guess
