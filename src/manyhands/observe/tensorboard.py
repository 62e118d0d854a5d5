"""TensorBoard: rows as event files. It takes the package `tensorboard`, and nothing of torch."""

from __future__ import annotations

import os
import time
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

from manyhands.observe.base import Steps, load, plain, require

_FILES = "*.tfevents.*"


class TensorBoard:
    """Event files in a folder, opened with the first row. Steps that they have are kept as they
    are: a run that is resumed adds what is new. Making one raises MissingExtra; logging, OSError.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        require("tensorboard")
        self._folder = Path(folder)
        self._writer: Any = None  # of a package without types, that may be missing
        self._steps = Steps()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        writer = self._open()
        if not self._steps.is_new(step):
            return
        proto = load("tensorboard.compat.proto.summary_pb2").Summary
        values = [proto.Value(tag=n, simple_value=float(v)) for n, v in metrics.items()]
        self._add(writer, proto(value=values), step)

    def log_hyperparams(self, params: Mapping[str, object]) -> None:
        writer = self._open()
        words = {n: "None" if v is None else v for n, v in plain(params).items()}
        self._add(writer, load("tensorboard.plugins.hparams.summary_v2").hparams_pb(words), 0)

    def finalize(self, status: str) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self) -> Any:  # noqa: ANN401
        if self._writer is None:
            files = load("tensorboard.summary.writer.event_file_writer")
            self._steps = Steps(last_step(self._folder), there=str(self._folder))
            self._writer = files.EventFileWriter(str(self._folder))
        return self._writer

    @staticmethod
    def _add(writer: Any, summary: Any, step: int) -> None:  # noqa: ANN401
        proto = load("tensorboard.compat.proto.event_pb2").Event
        writer.add_event(proto(wall_time=time.time(), step=step, summary=summary))
        writer.flush()  # this thread is the logger's own, and a killed process loses nothing


def last_step(folder: Path, names: Container[str] | None = None) -> int:
    """The last one in the event files of a folder, with a value of these names; -1: none."""
    files = folder.glob(_FILES)
    return max((step for file in files for step in _steps_in(file, names)), default=-1)


def _steps_in(file: Path, names: Container[str] | None) -> Iterator[int]:
    """Those of rows. A file that ends in the middle of one, as a killed process leaves it, ends
    there.
    """
    reader = load("tensorboard.backend.event_processing.event_file_loader")
    for event in reader.LegacyEventFileLoader(str(file)).Load():
        values = (value for value in event.summary.value if value.HasField("simple_value"))
        if any(names is None or value.tag in names for value in values):
            yield event.step
