"""Events: what happens to a run beside its numbers, of all its peers, in one file.

A happening has an id that is the same at whichever peer it is written, so that files of several
peers (the leader before and its successor) can be put together with nothing twice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, cast, runtime_checkable

from manyhands.core.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Happening:
    """Something that has happened to a run."""

    id: str
    step: int
    """Rounds that were over when the run heard of it."""
    time_s: float
    """Since 1970, by the clock of the peer that tells it."""
    peer: str | None
    """Whom it has happened to."""
    what: str
    text: str


@runtime_checkable
class Hears(Protocol):
    """A logger that wants to know what happens, too."""

    def log_event(self, event: Happening) -> None:
        """Steps come in order; an event may come again, with the same id."""
        ...


class EventLog:
    """A file with a line for every happening; it only grows, and each is there once.

    As a logger of a Trainer it takes no numbers. It is opened with the first happening; a line
    that was not written to its end is cut off. Raises OSError, UsageError for a file of something
    else.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._file: BinaryIO | None = None
        self._known: set[str] = set()

    def log_event(self, event: Happening) -> None:
        if self._file is None:
            self._open()
        assert self._file is not None
        if event.id in self._known:
            return
        self._known.add(event.id)
        self._file.write(json.dumps(asdict(event)).encode() + b"\n")
        self._file.flush()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        pass

    def log_hyperparams(self, params: Mapping[str, object]) -> None:
        pass

    def finalize(self, status: str) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = self._path.open("a+b")
        try:
            file.seek(0)
            at, known = 0, set[str]()
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                known.add(_read(line, f"{self._path}, line {number}").id)
                at += len(line)
            file.truncate(at)
        except BaseException:
            file.close()
            raise
        self._file, self._known = file, known


def merge(paths: Iterable[str | os.PathLike[str]]) -> list[Happening]:
    """The happenings of several files, by step and time, each once. Raises as `EventLog` does."""
    found: dict[str, Happening] = {}
    for path in paths:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    event = _read(line, f"{path}, line {number}")
                    found[event.id] = min(event, found.get(event.id, event), key=_order)
    return sorted(found.values(), key=_order)


def _order(event: Happening) -> tuple[int, float]:
    return event.step, event.time_s


def _read(line: bytes, place: str) -> Happening:
    try:
        return Happening(**cast("dict[str, object]", json.loads(line)))  # pyright: ignore[reportArgumentType]
    except (ValueError, TypeError):
        raise UsageError(
            f"{place} is not of a run's events", hint="log to another file, or remove it"
        ) from None
