"""Loggers: where the numbers of a run go, a row for every round.

A row has what was averaged over the round ("loss"), "epoch" and "lr"; the last one of an epoch has
also its means over the epoch ("epoch loss") and those of its evaluation ("eval loss"). Another
place for them (TensorBoard, a web service) is a class with two methods.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Protocol, TextIO, cast

from manyhands.core.errors import UsageError


class Logger(Protocol):
    """Used by one thread, at the leader of a run: the first of its roster.

    When the leader goes, its successor logs from the first round on that it does not know to be
    logged, each machine in its own place. So no round is missing (but for the very last, if the
    leader dies with it), and one may be both in the old leader's place and in the new one's, with
    the same values.
    """

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """Rounds come in order; one that has come already is logged anew, and all after it."""
        ...

    def close(self) -> None:
        """No more rows. Idempotent."""
        ...


class JsonLines:
    """A file with a line for every round: {"round": 3, "loss": 0.25, ...}. Each is there once.

    It is opened with the first row, and lines from that round on are cut off: a run that is resumed
    writes over what it redoes, one that is begun anew over everything. What is no number is null.
    Raises OSError, and UsageError for a file of something else.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._file: BinaryIO | None = None
        self._last = -1

    def log(self, round: int, values: Mapping[str, float]) -> None:
        if self._file is None or round <= self._last:
            self.close()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # For reading, and for writing at the end only.
            self._file = self._path.open("a+b")
            self._file.truncate(self._start_of(round, self._file))
        row = {"round": round} | {n: v if math.isfinite(v) else None for n, v in values.items()}
        self._file.write(json.dumps(row).encode() + b"\n")
        self._file.flush()
        self._last = round

    def _start_of(self, round: int, file: BinaryIO) -> int:
        """Where the lines from this round on begin, or one that was not written to its end."""
        at = 0
        file.seek(0)
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            if _round_in(line, f"{self._path}, line {number}") >= round:
                break
            at += len(line)
        return at

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _round_in(line: bytes, place: str) -> int:
    found = None
    with suppress(ValueError):
        row = json.loads(line)
        found = cast("dict[str, object]", row).get("round") if isinstance(row, dict) else None
    if isinstance(found, int):
        return found
    raise UsageError(f"{place} is not of a run's rounds", hint="log to another file, or remove it")


class Terminal:
    """A line that is written over in every round; where that cannot be, a line for every epoch."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._open = False  # the cursor is behind an unfinished line

    def log(self, round: int, values: Mapping[str, float]) -> None:
        last = _ends_epoch(values)
        if self._stream.isatty():
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(f"\r\x1b[K{_text(round, values)[:width]}" + "\n" * last)
            self._open = not last
        elif last:
            self._stream.write(_text(round, values) + "\n")
        self._stream.flush()

    def close(self) -> None:
        if self._open:
            self._stream.write("\n")
            self._stream.flush()
            self._open = False


class Records:
    """Records of Python's `logging`: rounds at DEBUG, the last one of an epoch at INFO."""

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger or logging.getLogger("manyhands.rounds")

    def log(self, round: int, values: Mapping[str, float]) -> None:
        level = logging.INFO if _ends_epoch(values) else logging.DEBUG
        self._logger.log(level, "%s", _text(round, values))

    def close(self) -> None:
        pass


def _ends_epoch(values: Mapping[str, float]) -> bool:
    return any(name.startswith("epoch ") for name in values)


def _text(round: int, values: Mapping[str, float]) -> str:
    return "  ".join([f"round {round}", *(f"{name} {value:.4g}" for name, value in values.items())])
