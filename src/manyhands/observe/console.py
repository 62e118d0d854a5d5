"""Console: rows for a person who looks on."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Mapping
from typing import TextIO

from manyhands.observe.base import ends_epoch, text_of


class Console:
    """A line that is written over in every step; where that cannot be, a line for every epoch."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._open = False  # the cursor is behind an unfinished line

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        last = ends_epoch(metrics)
        if self._stream.isatty():
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(f"\r\x1b[K{text_of(metrics, step)[:width]}" + "\n" * last)
            self._open = not last
        elif last:
            self._stream.write(text_of(metrics, step) + "\n")
        self._stream.flush()

    def log_hyperparams(self, params: Mapping[str, object]) -> None:
        pass  # who looks on has just typed them

    def finalize(self, status: str) -> None:
        if self._open:
            self._stream.write("\n")
            self._stream.flush()
            self._open = False


class Records:
    """Records of Python's `logging`: steps at DEBUG, the last one of an epoch at INFO."""

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger or logging.getLogger("manyhands.steps")

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        level = logging.INFO if ends_epoch(metrics) else logging.DEBUG
        self._logger.log(level, "%s", text_of(metrics, step))

    def log_hyperparams(self, params: Mapping[str, object]) -> None:
        words = (f"{name} {value}" for name, value in params.items())
        self._logger.debug("%s", "  ".join(words))

    def finalize(self, status: str) -> None:
        pass
