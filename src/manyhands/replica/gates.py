"""Gates: optimizers and schedulers act when a round is committed, and only then."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from functools import wraps
from typing import Any, cast

from manyhands.core.errors import UsageError

_STEPS = ("step", "_maybe_opt_step")  # methods of scalers that step an optimizer


class Gate:
    """Open from the commit of a round until the next pass begins.

    `registered` is what belongs to the run's state: a scaler that steps must be among it.
    """

    def __init__(self, registered: Collection[object] = ()) -> None:
        self.open = False
        self.missed = False
        """Something was called while it was closed. Whoever lets a pass begin takes it back."""
        self._registered = registered
        self._undo: list[Callable[[], None]] = []

    def guard(self, thing: Any, method: str, acted: Callable[[], None] | None = None) -> None:  # noqa: ANN401
        """`thing.method()` does nothing while the gate is closed. `release` undoes it.

        The user keeps the same object: whatever refers to it, schedulers say, goes on to. `acted`
        is called when it has done something.
        """
        if method in vars(thing):  # a scheduler has put its own there, to count calls
            inner = cast("Callable[..., Any]", vars(thing)[method])
            setattr(thing, method, self._guarded(thing, inner, acted))
            self._undo.append(lambda: setattr(thing, method, inner))
            return
        # Not an attribute of the instance: a scheduler's state_dict would have it.
        kind = cast("type[Any]", type(thing))
        guarded = self._guarded(thing, getattr(kind, method), acted)
        facts = {method: guarded, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
        thing.__class__ = type(kind.__name__, (kind,), facts)
        self._undo.append(lambda: setattr(thing, "__class__", kind))

    def _guarded(
        self,
        thing: Any,  # noqa: ANN401
        inner: Callable[..., Any],
        acted: Callable[[], None] | None,
    ) -> Callable[..., Any]:
        looked = False

        @wraps(inner)
        def guarded(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            nonlocal looked
            if not looked:
                looked = True
                self._look_at(_whose_call())
            if self.open:
                found = inner(*args, **kwargs)
                if acted is not None:
                    acted()
                return found
            if any(callable(given) and given is not thing for given in (*args, *kwargs.values())):
                raise UsageError(
                    "step(closure) would run a backward that nobody waits for",
                    hint="run loss.backward() in the loop, then step() without a closure",
                )
            self.missed = True
            return None

        return guarded

    def _look_at(self, scaler: Any) -> None:  # noqa: ANN401
        """If whoever calls is a scaler that the run does not know, refuse it: gradients of several
        scales would be added up, and too large ones refused for ever, since nobody lowers it. An
        optimizer does not know its scaler: only its call shows that there is one.
        """
        if not (hasattr(scaler, "unscale_") and hasattr(scaler, "get_scale")):
            return
        if scaler.is_enabled() and not any(_has(thing, scaler) for thing in self._registered):
            raise UsageError(
                f"a {type(scaler).__name__} steps the optimizer, and the run does not know of it",
                hint="run.register(scaler=scaler) before wrap(): all peers then have one scale, "
                "and skip a step together",
            )

    def release(self) -> None:
        """All things are as they were. Idempotent."""
        self.open = True  # for a scheduler made since, that has kept the guarded method
        while self._undo:
            self._undo.pop()()


def _has(registered: object, scaler: object) -> bool:
    """Whether it is the scaler, or one of a wrapper that saves and loads it."""
    within = getattr(registered, "__dict__", {}).values()
    return registered is scaler or any(thing is scaler for thing in within)


def _whose_call() -> Any:  # noqa: ANN401
    """The object whose `step` has called the function that asks; None if it was none.

    Of other callers nothing is looked at: before Python 3.13 a frame whose locals were asked for
    keeps them as they were until it ends, and that of a training loop has batches and outputs.
    """
    frame = inspect.currentframe()
    for _ in range(2):
        frame = None if frame is None else frame.f_back
    if frame is None or frame.f_code.co_name not in _STEPS:
        return None
    return frame.f_locals.get("self")
