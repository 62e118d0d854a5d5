"""Logging: where the metrics of a training go: `with_logger`, and a logger as Wandb.jl has it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TextIO

from manyhands.core.errors import UsageError
from manyhands.observe import Desk, Wandb
from manyhands.observe.base import FAILED, SUCCESS, text_of

Log = Callable[[Mapping[str, float], int], None]


class _Block:
    """The logger of a `with` block, in a thread of its own, and how far its steps are.

    Loggers take steps in order, and some write over what comes again. So nothing goes back in a
    block: whatever is logged there comes after what was logged before.
    """

    def __init__(self, logger: Any) -> None:  # noqa: ANN401
        self.desk = Desk([logger])
        self._last = -1

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """At this step, or at the next one that is free."""
        self._last = max(step, self._last + 1)
        self.desk.log_metrics(metrics, self._last)

    def from_step(self, first: int) -> Log:
        """For a training that has taken `first` steps: they are counted on from the last row."""
        before = max(0, self._last - first)

        def log(metrics: Mapping[str, float], step: int) -> None:
            self.log(metrics, before + step)

        return log


_current: ContextVar[_Block | None] = ContextVar("manyhands fluxdistributed logger", default=None)


@contextmanager
def with_logger(logger: Any) -> Generator[Any]:  # noqa: ANN401
    """Inside the block, trainings of this thread (or task) log there; its end is the logger's.

    `logger` is whatever `manyhands.observe.adapt` takes: a logger of ours or of Lightning, a run
    of wandb, a SummaryWriter, a function of (dict, step). The steps of a block go on: those of a
    second training are counted from the last one that was logged. The logger has a thread of its
    own, and at the end of the block up to 30 s for what waits; what it raises is warned about.
    """
    block = _Block(logger)
    token, status = _current.set(block), FAILED
    try:
        yield logger
        status = SUCCESS
    except SystemExit as end:  # as a worker of `start` ends, which does not come back
        status = FAILED if end.code else SUCCESS
        raise
    finally:
        _current.reset(token)
        block.desk.finalize(status)


def WandbLogger(
    project: str | None = None,
    name: str | None = None,
    config: Mapping[str, object] | None = None,
    step_increment: int = 1,
    **options: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """A logger that writes to Weights & Biases; with WANDB_MODE=offline, to a folder.

    What wandb counts by goes up by `step_increment` for each step of the training. Needs wandb:
    pip install 'manyhands[wandb]'. Raises MissingExtra.
    """
    if step_increment < 1:
        raise UsageError(f"step_increment={step_increment}", hint="at least 1: steps go up")
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
def log_for(
    logger: Any,  # noqa: ANN401
    params: Mapping[str, object],
    *,
    first: int,
) -> Generator[Log]:
    """What a training logs with, that has taken `first` steps: to `logger`, else that of
    `with_logger`, else the console.

    In a thread of its own: a logger that raises or is slow does not disturb the training.
    """
    block = _current.get() if logger is None else None
    if block is not None:
        block.desk.log_hyperparams(params)
        yield block.from_step(first)
        return
    with Desk([Trace() if logger is None else logger]) as desk:
        desk.log_hyperparams(params)
        yield desk.log_metrics


def current_log() -> Log:
    """That of the block of `with_logger`, or the console; in this thread."""
    block = _current.get()
    return Trace().log_metrics if block is None else block.log
