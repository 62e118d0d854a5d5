"""Supply: where the batches of a source come from: read at once, by threads, or by processes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Protocol

from manyhands.data.child import Child
from manyhands.data.courier import Courier, Sent
from manyhands.data.crew import Crew, Hand
from manyhands.data.fetch import (
    Fetcher,
    Marks,
    Request,
    Rows,
    Spots,
    WorkerFetcher,
    generators_kept,
)
from manyhands.data.reader import Reader
from manyhands.data.source import Source

SPARE = 2  # samples of a batch that counts nothing: batch normalisation takes no single one


class Supply(Protocol):
    """Used by one thread."""

    def read(self, request: Request) -> Rows:
        """Its samples. Raises what reading them raises."""
        ...

    def stand_in(self, request: Request) -> Any:  # noqa: ANN401
        """A batch of a few samples that can be read, near or far, for a body to run on."""
        ...

    def rest(self) -> None:
        """Nothing is wanted for a while."""
        ...

    def close(self) -> None:
        """Nothing is left running. A later `read` begins anew."""
        ...


def supply_for(source: Source, seed: int, guess: Callable[[Request], Request]) -> Supply:
    """As the source says. `guess(request)` is what may be asked for after it."""
    if source.rules is None:  # a DataLoader's
        return WorkerFetcher(source, seed, guess) if source.workers.num else Fetcher(source, seed)
    courier = None if source.device is None else Courier(source.device)
    if not source.workers.num:
        return Direct(source, seed, courier)
    return Ahead(source, seed, guess, courier)


class _Spare:
    """Batches that stand in for others, read in the user's thread."""

    def __init__(self, source: Source, seed: int, courier: Courier | None) -> None:
        self._reader, self._spots = Reader(source, seed, alone=True), Spots(source, seed)
        self._size, self._courier = source.size, courier

    def stand_in(self, request: Request) -> Any:  # noqa: ANN401
        positions = request.positions[:SPARE] or tuple(range(min(SPARE, self._size)))
        with generators_kept():
            batch = self._reader.stand_in(self._spots.marks(Request(request.epoch, positions)))
        return _moved(self._courier, batch)


class Direct(_Spare):
    """Reads when it is asked."""

    def read(self, request: Request) -> Rows:
        """Its samples. The user's generators are left alone."""
        # To keep them costs as much as to read a few samples.
        with generators_kept() if self._reader.draws else nullcontext():
            rows = self._reader.read(self._spots.marks(request))
        return rows._replace(batch=_moved(self._courier, rows.batch))

    def rest(self) -> None:
        """It always does."""

    def close(self) -> None:
        """Nothing runs."""


class Ahead(_Spare):
    """Has workers read ahead. The next batch is on its way to the device while one is used."""

    def __init__(
        self,
        source: Source,
        seed: int,
        guess: Callable[[Request], Request],
        courier: Courier | None,
    ) -> None:
        super().__init__(source, seed, courier)
        workers = source.workers
        hands: list[Hand] = []
        ahead = workers.prefetch
        if workers.kind == "process":
            ahead += 1  # waits here to be asked for: a process must not wait for its parent
            reader = Reader(source, seed, alone=True)
            hands += [Child(reader, n, workers.prefetch) for n in range(workers.num)]
        else:
            reader = Reader(source, seed, alone=False)
            hands += [_Own(reader) for _ in range(workers.num)]
        pinned = None if courier is None or not courier.overlaps else courier.pinned
        self._crew = Crew(
            hands,
            Spots(source, seed),
            guess,
            ahead=workers.num * ahead,
            finish=_same if pinned is None else _Finish(pinned),
        )
        self._sent: tuple[Rows, Sent] | None = None  # of what was guessed to come next

    def read(self, request: Request) -> Rows:
        """Its samples, once they are there."""
        rows = self._crew.read(request)
        if self._courier is None:
            return rows
        sent, self._sent = self._sent, None
        if sent is None or sent[0] is not rows:  # not read in time, or another was guessed
            sent = rows, self._courier.send(rows.batch)
        if self._courier.overlaps and (coming := self._crew.glance()) is not None:
            self._sent = coming[1], self._courier.send(coming[1].batch)
        return rows._replace(batch=self._courier.arrive(sent[1]))

    def rest(self) -> None:
        """What was read ahead is let go; the workers stay."""
        self._sent = None
        self._crew.rest()

    def close(self) -> None:
        """End the workers, and wait for that."""
        self._sent = None
        self._crew.close()


class _Own:
    """A hand that reads in its thread."""

    depth = 1

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._marks: Marks | None = None

    def begin(self) -> None:
        """Nothing to do."""

    def ask(self, marks: Marks) -> None:
        self._marks = marks

    def answer(self) -> Rows:
        marks, self._marks = self._marks, None
        assert marks is not None, "ask first"
        return self._reader.read(marks)

    def end(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


class _Finish:
    """What a hand's thread does to a batch."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        self._change = change

    def __call__(self, rows: Rows) -> Rows:
        return rows._replace(batch=self._change(rows.batch))


def _same(rows: Rows) -> Rows:
    return rows


def _moved(courier: Courier | None, batch: Any) -> Any:  # noqa: ANN401
    return batch if courier is None else courier.arrive(courier.send(batch))
