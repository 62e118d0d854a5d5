"""Files: a row for every step, as JSON lines or as CSV. In either, each step is there once.

A file is opened with the first row, and rows from that step on are cut off: a run that is resumed
writes over what it redoes. One that is begun anew writes over all from its first row on: if others
before it logged earlier steps, give it another file. Hyperparameters go to a file beside it:
NAME.hyperparams.json.
"""

from __future__ import annotations

import csv
import json
import math
import os
import secrets
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TextIO, cast

from manyhands.core.errors import UsageError
from manyhands.observe.base import plain

_STEP = "step"


class JsonLines:
    """Lines such as {"step": 3, "train/loss": 0.25}; what is no number is null.

    Raises OSError, and UsageError for a file of something else.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._file: BinaryIO | None = None
        self._last = -1

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        numbers = _numbers_in(metrics)
        if self._file is None or step <= self._last:
            self._close()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._opened(step)
        row = {_STEP: step} | {n: v if math.isfinite(v) else None for n, v in numbers.items()}
        self._file.write(json.dumps(row).encode() + b"\n")
        self._file.flush()
        self._last = step

    def log_hyperparams(self, params: Mapping[str, object]) -> None:
        _write_beside(self._path, params)

    def finalize(self, status: str) -> None:
        self._close()

    def _opened(self, step: int) -> BinaryIO:
        """For rows from this step on; it is another's file until all of it was looked at."""
        file = self._path.open("a+b")  # for reading, and for writing at the end only
        try:
            file.truncate(self._start_of(step, file))
        except BaseException:
            file.close()
            raise
        return file

    def _start_of(self, step: int, file: BinaryIO) -> int:
        """Where the lines from this step on begin, or one that was not written to its end. All are
        looked at: nothing is cut off a file that has others, too.
        """
        at, start = 0, None
        file.seek(0)
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                # After a row of ours it is the rest of one, whatever became of it.
                if number == 1 and not _may_begin_row(line):
                    raise _refused(f"{self._path}, line 1")
                break
            if _step_in(line, f"{self._path}, line {number}") >= step and start is None:
                start = at
            at += len(line)
        return at if start is None else start

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _may_begin_row(line: bytes) -> bool:
    """Whether a row that was not written to its end may look so."""
    head = json.dumps({_STEP: 0}).encode().partition(b"0")[0]
    return line.startswith(head) or head.startswith(line)


def _step_in(line: bytes, place: str) -> int:
    found = None
    with suppress(ValueError):
        row = json.loads(line)
        found = cast("dict[str, object]", row).get(_STEP) if isinstance(row, dict) else None
    if isinstance(found, int):
        return found
    raise _refused(place)


def _numbers_in(metrics: Mapping[str, float]) -> dict[str, float]:
    """Plain ones, of numpy's and of tensors with one value too. Raises ValueError or TypeError for
    what is none, and UsageError.
    """
    if _STEP in metrics:
        raise UsageError(f"a value is called {_STEP!r}", hint="that is the step's own column")
    return {n: v if isinstance(v, int) else float(v) for n, v in metrics.items()}


def _refused(place: str) -> UsageError:
    return UsageError(f"{place} is not of a run's steps", hint="log to another file, or remove it")


class Csv:
    """A table with the column "step" first; the others in the order in which they have come.

    When a new one comes, the file is written anew beside itself and takes its place: who reads it
    sees the old table or the new one, never half of it. A cell that its row has not is empty.
    Raises OSError, and UsageError for a file of something else.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._file: TextIO | None = None
        self._columns = [_STEP]
        self._last = -1

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        numbers = _numbers_in(metrics)
        new = [name for name in metrics if name not in self._columns]
        if self._file is None or step <= self._last or new:
            self._open_before(step, list(metrics))
        assert self._file is not None
        row = {_STEP: step, **numbers}
        csv.writer(self._file, lineterminator="\n").writerow(row.get(n, "") for n in self._columns)
        self._file.flush()
        self._last = step

    def log_hyperparams(self, params: Mapping[str, object]) -> None:
        _write_beside(self._path, params)

    def finalize(self, status: str) -> None:
        self._close()

    def _open_before(self, step: int, names: list[str]) -> None:
        """With the rows before this step, and columns for these names."""
        self._close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._columns = self._read_columns()
        self._columns += [name for name in names if name not in self._columns]
        with _replacing(self._path) as new:
            writer = csv.writer(new, lineterminator="\n")
            writer.writerow(self._columns)
            if self._path.exists():
                writer.writerows(self._rows_before(step))
        self._file = self._path.open("a", encoding="utf-8", newline="")

    def _read_columns(self) -> list[str]:
        if not self._path.exists():
            return [_STEP]
        with self._path.open(encoding="utf-8", newline="") as file:
            first = file.readline()
        if not first:
            return [_STEP]
        columns = next(csv.reader([first]))
        if columns[:1] != [_STEP] or not first.endswith("\n"):
            raise _refused(f"{self._path}, line 1")
        return columns

    def _rows_before(self, step: int) -> Generator[list[str]]:
        """The cells of rows that were written to their end, up to this step. All are looked at."""
        before = True
        with self._path.open(encoding="utf-8", newline="") as file:
            file.readline()
            # No cell of ours has a line break: a line is a row.
            for number, line in enumerate(file, 2):
                row = next(csv.reader([line]))
                if not row or not row[0].isdecimal():
                    raise _refused(f"{self._path}, line {number}")
                before = before and line.endswith("\n") and int(row[0]) < step
                if before:
                    yield row + [""] * (len(self._columns) - len(row))

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _write_beside(path: Path, params: Mapping[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with _replacing(path.with_name(f"{path.stem}.hyperparams.json")) as file:
        json.dump(plain(params), file, indent=2)
        file.write("\n")


@contextmanager
def _replacing(path: Path) -> Generator[TextIO]:
    """A file that takes the place of this one when it is whole, and else leaves nothing."""
    # Another logger may write the same beside its own file, at the same time.
    part = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.part")
    try:
        with part.open("w", encoding="utf-8", newline="") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
