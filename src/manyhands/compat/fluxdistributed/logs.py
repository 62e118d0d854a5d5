"""Logging: where the metrics of a training go: `with_logger`, and a logger as Wandb.jl has it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any, TextIO

from manyhands.core.errors import UsageError
from manyhands.observe import Desk, Logger, MissingExtra, Wandb, adapt
from manyhands.observe.base import FAILED, SUCCESS, text_of

Log = Callable[[Mapping[str, float], int], None]

_current: ContextVar[Any] = ContextVar("manyhands fluxdistributed logger", default=None)


@contextmanager
def with_logger(logger: Any) -> Generator[Any]:  # noqa: ANN401
    """Inside the block, trainings of this thread (or task) log there; its end is the logger's.

    `logger` is whatever `manyhands.observe.adapt` takes: a logger of ours or of Lightning, a run
    of wandb, a SummaryWriter, a function of (dict, step).
    """
    adapted = adapt(logger)
    token, status = _current.set(_Lent(adapted)), FAILED
    try:
        yield logger
        status = SUCCESS
    finally:
        _current.reset(token)
        adapted.finalize(status)


class _Lent:
    """A logger that outlives the training which logs to it."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._logger.log_metrics(metrics, step)

    def log_hyperparams(self, params: Mapping[str, object]) -> None:
        self._logger.log_hyperparams(params)

    def finalize(self, status: str) -> None:
        pass


def WandbLogger(
    project: str | None = None,
    name: str | None = None,
    config: Mapping[str, object] | None = None,
    step_increment: int = 1,
    **options: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """A logger that writes to Weights & Biases; with WANDB_MODE=offline, to a folder.

    What wandb counts by goes up by `step_increment` for each step of the training. Needs wandb:
    pip install 'manyhands[wandb]'.
    """
    if step_increment < 1:
        raise UsageError(f"step_increment={step_increment}", hint="at least 1: steps go up")
    if find_spec("wandb") is None:
        raise MissingExtra("wandb", "wandb")
    return _Stretched(Wandb(project=project, name=name, config=config, **options), step_increment)


class _Stretched:
    def __init__(self, logger: Any, increment: int) -> None:  # noqa: ANN401
        self._logger, self._increment = logger, increment

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._logger.log_metrics(metrics, step * self._increment)

    def log_hyperparams(self, params: Mapping[str, object]) -> None:
        self._logger.log_hyperparams(params)

    def finalize(self, status: str) -> None:
        self._logger.finalize(status)


class Trace:
    """A line for each row, as FluxDistributed prints by default."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        stream = self._stream or sys.stdout
        stream.write(text_of(metrics, step) + "\n")
        stream.flush()

    def log_hyperparams(self, params: Mapping[str, object]) -> None:
        pass

    def finalize(self, status: str) -> None:
        pass


@contextmanager
def desk_for(logger: Any = None, params: Mapping[str, object] | None = None) -> Generator[Log]:  # noqa: ANN401
    """What a training logs with: to `logger`, else that of `with_logger`, else the console.

    In threads of their own: a logger that raises or is slow does not disturb the training.
    """
    with Desk([_chosen(logger)]) as desk:
        if params:
            desk.log_hyperparams(params)
        yield desk.log_metrics


def current_log() -> Log:
    """The logger of `with_logger`, or the console; in this thread."""
    return adapt(_chosen(None)).log_metrics


def _chosen(logger: Any) -> Any:  # noqa: ANN401
    if logger is None:
        logger = _current.get()
    return Trace() if logger is None else logger
