"""Loader: what the user iterates over in place of a DataLoader."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from manyhands.core.errors import UsageError
from manyhands.data.calendar import Calendar
from manyhands.data.fetch import Fetcher, Request, WorkerFetcher
from manyhands.data.source import Source
from manyhands.replica.agenda import Agenda
from manyhands.replica.conductor import Conductor, Turn
from manyhands.replica.replica import Replica

_SPARE = 2  # samples of a turn that counts nothing: batch normalisation takes no single one


class Fetches(Protocol):
    """Where batches come from."""

    def fetch(self, request: Request) -> Any:  # noqa: ANN401
        """The batch."""
        ...

    def close(self) -> None:
        """End whatever reads ahead."""
        ...


class Units:
    """A round's samples in units that are never divided: single samples, or grains of several."""

    def __init__(self, calendar: Calendar, grain: int) -> None:
        self._calendar, self._grain = calendar, grain

    def num(self, round: int) -> int:
        """How many a round has."""
        return -(-self._calendar.num_samples(round) // self._grain)

    def request(self, turn: Turn) -> Request:
        """The samples of a turn. One that counts nothing still has some: its body runs too."""
        if turn.evaluates:  # the same every time
            return Request(0, tuple(p for span in turn.ranges.spans for p in range(*span)))
        span = self._calendar.span(turn.round)
        if not turn.ranges:
            stop = min(span.stop, span.start + _SPARE)
            return Request(span.epoch, tuple(range(span.start, stop)))
        positions: list[int] = []
        for start, stop in turn.ranges.spans:
            low = span.start + start * self._grain
            positions += range(low, min(span.stop, span.start + stop * self._grain))
        return Request(span.epoch, tuple(positions))

    def num_samples(self, turn: Turn) -> int:
        """Of a turn."""
        if turn.evaluates:
            return len(turn.ranges)
        size = self._calendar.num_samples(turn.round)
        spans = turn.ranges.spans
        return sum(min(size, b * self._grain) - a * self._grain for a, b in spans)


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
        fetcher: Fetches,
        num_rounds: int | None,
        dataset: Any,  # noqa: ANN401
    ) -> None:
        self._replica, self._conductor = replica, conductor
        self._agenda, self._units, self._fetcher = agenda, units, fetcher
        self._num_rounds = num_rounds
        self._held: Turn | None = None  # of a later epoch than the one that was asked for
        self.at_end: Callable[[], None] = lambda: None
        """Called when an iteration has no more."""
        self.epoch = -1
        """The one that is iterated over."""
        self.wait_s = 0.0
        """How long the loop has waited for its batches, since the beginning."""
        # What loops ask a DataLoader for, to say how far they are.
        self.dataset, self.batch_size = dataset, agenda.calendar.batch

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
            batch = self._fetch(turn)
            self._replica.begin(turn)
            yield batch

    def _fetch(self, turn: Turn) -> Any:  # noqa: ANN401
        begun_s = time.monotonic()
        batch = self._fetcher.fetch(self._units.request(turn))
        self.wait_s += time.monotonic() - begun_s
        return batch

    def evaluate(self, fetcher: Fetches) -> Iterator[Any]:
        """This peer's share of the evaluation after the epoch; nothing if that is behind the run.

        Who has no share of it waits here for the others.
        """
        for turn in self._turns(2 * self.epoch + 1):
            if not turn.evaluates:
                raise UsageError(
                    f"round {turn.round} comes next, and the loop evaluates",
                    hint="run the loop over the loader to its end before run.evaluation",
                )
            batch = None if turn.task is None else fetcher.fetch(self._units.request(turn))
            self._replica.begin(turn)
            if turn.task is not None:
                yield batch
        fetcher.close()

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

    def __init__(self, loader: Loader, fetcher: Fetches) -> None:
        self._loader, self._fetcher = loader, fetcher

    def __iter__(self) -> Iterator[Any]:
        return self._loader.evaluate(self._fetcher)


def fetcher_for(source: Source, seed: int, calendar: Calendar) -> Fetcher | WorkerFetcher:
    """With the workers that the user wants."""
    if not source.workers.num:
        return Fetcher(source, seed)
    return WorkerFetcher(source, seed, _guess(calendar))


def _guess(calendar: Calendar) -> Callable[[Request], Request]:
    """Most often a peer's share of the next round is its share of this one."""

    def guess(request: Request) -> Request:
        moved = tuple(p + calendar.batch for p in request.positions)
        last = calendar.rounds_per_epoch * calendar.batch
        if moved[-1] < min(calendar.size, last):
            return Request(request.epoch, moved)
        return Request(request.epoch + 1, tuple(p % calendar.batch for p in request.positions))

    return guess
