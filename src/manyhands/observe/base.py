"""Base: what a logger is: a place where the numbers of a training go, by step.

A step of a run is a round. Its row has "epoch", "lr", the means of the round ("train/loss"), how
fast it was ("perf/samples_per_s"); the last one of an epoch has also its means over the epoch
("train/epoch_loss") and those of its evaluation ("val/loss").
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol, runtime_checkable

from manyhands.core.errors import UsageError

log = logging.getLogger(__name__)

SUCCESS, FAILED = "success", "failed"
"""What `finalize` is told, in Lightning's words."""

_EPOCH = "train/epoch_"


@runtime_checkable
class Logger(Protocol):
    """The names are Lightning's: one of its loggers is one here. Used by one thread.

    What it raises ends nothing: behind a `Desk` it is warned about and counted.
    """

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Steps come in order. One that comes again, as after a resume, is never there twice:
        files write it and all after it anew, places that cannot do that keep what they have.
        """
        ...

    def log_hyperparams(self, params: Mapping[str, object]) -> None:
        """What the training was told, once, before its first row."""
        ...

    def finalize(self, status: str) -> None:
        """No more rows; `status` is "success" or "failed". Idempotent."""
        ...


class MissingExtra(UsageError):
    """A package is not installed that this logger needs."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"{package} is not installed", hint=f"pip install 'manyhands[{extra}]', or {package}"
        )
        self.package = package


def require(package: str) -> None:
    """Raises MissingExtra if it is not installed; its extra has its name. Loads nothing.

    For constructors: a training that could not be logged shall not begin.
    """
    if find_spec(package) is None:
        raise MissingExtra(package, package)


def load(module: str) -> Any:  # noqa: ANN401  (what it has no strict types for)
    """A module of a package that was required, at its first use."""
    return import_module(module)


class Steps:
    """Lets no step go back. For places that cannot take a row out again.

    `there` says in words where rows up to `last` are already: the first step among them is warned
    about, since another training that goes there from its beginning would be left out in silence.
    """

    def __init__(self, last: int = -1, *, there: str | None = None) -> None:
        self.last = self._found = last
        self._there = there

    def is_new(self, step: int) -> bool:
        """Whether it comes after all that were new before. If so, it is the last one now."""
        if step <= self.last:
            if self._there is not None and step <= self._found:
                log.warning(
                    "%s has rows up to step %d, which stay as they are: what comes for these steps "
                    "is left out. A training that was resumed goes on after them; give another one "
                    "a place of its own",
                    *(self._there, self._found),
                )
                self._there = None
            return False
        self.last = step
        return True


def ends_epoch(metrics: Mapping[str, float]) -> bool:
    """Whether a row has what an epoch has come to."""
    return any(name.startswith((_EPOCH, "val/")) for name in metrics)


def of_epoch(name: str) -> str:
    """How a row calls the mean over the epoch of what it calls "train/..."."""
    return _EPOCH + name.removeprefix("train/")


def text_of(metrics: Mapping[str, float], step: int) -> str:
    """A row in one line, for people."""
    words = (f"{name} {value:.4g}" for name, value in metrics.items())
    return "  ".join([f"step {step}", *words])


def plain(params: Mapping[str, object]) -> dict[str, bool | int | float | str | None]:
    """With values that any place can keep: numbers that are some, and words."""
    return {str(name): _plain(value) for name, value in params.items()}


def _plain(value: object) -> bool | int | float | str | None:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return str(value)
