"""Adapt: whatever somebody logs with, as a logger.

What you have made yourself stays yours: it is flushed at the end, and you close it.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from manyhands.core.errors import UsageError
from manyhands.observe import tensorboard, wandb
from manyhands.observe.base import Logger, Steps, plain
from manyhands.observe.console import Records
from manyhands.observe.events import Happening, Hears

_TAKEN = (
    "an object with log_metrics, log_hyperparams and finalize (any logger of manyhands or "
    "Lightning), a logging.Logger, a SummaryWriter, an object with log(dict, step=...) such as a "
    "run of wandb, or a function of (dict, step)"
)


def adapt(thing: Any, *, last: int | None = None) -> Logger:  # noqa: ANN401
    """A logger for it: itself, if it is one. Raises UsageError for what is none of these.

    What is made into one gets no step twice. Of a place that outlives the process, only its owner
    knows up to which step it has rows already: the `last` one, after which others are sent, to a
    logger as well. That of a SummaryWriter, and of Lightning's TensorBoardLogger, which is one, is
    found in its folder.

    In this order: one of Python's logging; a logger; a SummaryWriter (`add_scalar`); a run of
    wandb; anything with `log(dict, step=...)`; a callable of (dict, step).
    """
    if isinstance(thing, type):
        raise UsageError(
            f"{thing.__name__} is a class, not a logger", hint=f"make one: {thing.__name__}(...)"
        )
    if isinstance(thing, logging.Logger):
        thing = Records(thing)
    if isinstance(thing, Logger):
        if last is None and not _is_lightnings_writer(thing):
            return thing
        return _Hearing(thing, last) if isinstance(thing, Hears) else _Further(thing, last)
    if callable(getattr(thing, "add_scalar", None)):
        return _Writer(thing, last)
    log = getattr(thing, "log", None)
    if callable(log) and callable(getattr(thing, "define_metric", None)):
        rows = wandb.Rows(_run_of(thing))
        return rows if last is None else _Further(rows, last)
    last = -1 if last is None else last
    if callable(log) and _takes(log, {}, step=0):
        return _Log(thing, last)
    if callable(thing):
        if _takes(thing, {}, 0):
            return _Adapted(thing, last)
        if _takes(thing, {}, step=0):
            return _Adapted(lambda metrics, step: thing(metrics, step=step), last)
        raise UsageError(f"{thing!r} cannot be called with (dict, step)", hint=f"pass {_TAKEN}")
    raise UsageError(f"a {type(thing).__name__} is no logger", hint=f"pass {_TAKEN}")


def _is_lightnings_writer(logger: Logger) -> bool:
    """By its name: Lightning need not be here, and has two packages."""
    return any(kind.__name__ == "TensorBoardLogger" for kind in type(logger).__mro__)


def _put_before_names(owner: Any) -> str:  # noqa: ANN401
    """What a logger of Lightning, made with `prefix=`, writes before each name."""
    prefix = getattr(owner, "_prefix", None)
    return f"{prefix}{getattr(owner, 'LOGGER_JOIN_CHAR', '-')}" if prefix else ""


def _run_of(thing: Any) -> Any:  # noqa: ANN401
    """A run of wandb, or that of the module itself, on which people call `log` too."""
    if not isinstance(thing, ModuleType):
        return thing
    if thing.run is None:
        raise UsageError(f"{thing.__name__} has no run yet", hint="call wandb.init(...) first")
    return thing.run


def _takes(call: Callable[..., object], *arguments: object, **named: object) -> bool:
    """Whether it can be called so, as far as it tells."""
    try:
        inspect.signature(call).bind(*arguments, **named)
    except (TypeError, ValueError):  # it cannot; or it is built in, and does not say
        return False
    return True


class _Adapted:
    """What gets its rows by a function. No step goes back, and hyperparameters go nowhere."""

    def __init__(self, send: Callable[[dict[str, float], int], object], last: int) -> None:
        self._send = send
        self._steps = Steps(last)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        if self._steps.is_new(step):
            self._send(dict(metrics), step)

    def log_hyperparams(self, params: Mapping[str, object]) -> None:
        pass

    def finalize(self, status: str) -> None:
        pass


class _InFolder(_Adapted):
    """What writes event files of TensorBoard: how far it was is found there, unless it is told."""

    def __init__(
        self,
        send: Callable[[dict[str, float], int], object],
        last: int | None,
        owner: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(send, -1 if last is None else last)
        self._owner, self._looked = owner, last is not None

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        if not self._looked:
            self._looked = True
            # Of these names alone: what else is logged with the writer has steps of its own.
            folder = getattr(self._owner, "log_dir", None) or getattr(self._owner, "logdir", None)
            if isinstance(folder, str) and find_spec("tensorboard") is not None:
                before = _put_before_names(self._owner)
                last = tensorboard.last_step(Path(folder), {before + name for name in metrics})
                self._steps = Steps(last, there=folder)
        super().log_metrics(metrics, step)


class _Further(_InFolder):
    """A logger whose place has rows already."""

    def __init__(self, logger: Logger, last: int | None) -> None:
        super().__init__(logger.log_metrics, last, logger)
        self._logger = logger

    def log_hyperparams(self, params: Mapping[str, object]) -> None:
        self._logger.log_hyperparams(params)

    def finalize(self, status: str) -> None:
        self._logger.finalize(status)


class _Hearing(_Further):
    """One that takes events too; those have ids, and may come again."""

    def log_event(self, event: Happening) -> None:
        cast("Hears", self._logger).log_event(event)


class _Writer(_InFolder):
    """A SummaryWriter of torch or of tensorboardX."""

    def __init__(self, writer: Any, last: int | None) -> None:  # noqa: ANN401
        super().__init__(self._add, last, writer)
        self._writer = writer

    def _add(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def log_hyperparams(self, params: Mapping[str, object]) -> None:
        if callable(add := getattr(self._writer, "add_text", None)):
            add("hyperparams", json.dumps(plain(params), indent=2))

    def finalize(self, status: str) -> None:
        if callable(flush := getattr(self._writer, "flush", None)):
            flush()


class _Log(_Adapted):
    """Anything with `log(dict, step=...)`; with a `config` that can be updated, the better."""

    def __init__(self, thing: Any, last: int) -> None:  # noqa: ANN401
        super().__init__(lambda metrics, step: thing.log(metrics, step=step), last)
        self._thing = thing

    def log_hyperparams(self, params: Mapping[str, object]) -> None:
        if callable(update := getattr(getattr(self._thing, "config", None), "update", None)):
            update(plain(params))
