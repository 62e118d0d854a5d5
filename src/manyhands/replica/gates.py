"""Gates: optimizers and schedulers act when a round is committed, and only then."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, cast

from manyhands.core.errors import UsageError


class Gate:
    """Open from the commit of a round until the next pass begins."""

    def __init__(self) -> None:
        self.open = False
        self._undo: list[Callable[[], None]] = []

    def guard(self, thing: Any, method: str) -> None:  # noqa: ANN401
        """`thing.method()` does nothing while the gate is closed. `release` undoes it.

        The user keeps the same object: whatever refers to it, schedulers say, goes on to.
        """
        if method in vars(thing):  # a scheduler has put its own there, to count calls
            inner = cast("Callable[..., Any]", vars(thing)[method])
            setattr(thing, method, self._guarded(thing, inner))
            self._undo.append(lambda: setattr(thing, method, inner))
            return
        # Not an attribute of the instance: a scheduler's state_dict would have it.
        kind = cast("type[Any]", type(thing))
        guarded = self._guarded(thing, getattr(kind, method))
        facts = {method: guarded, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
        thing.__class__ = type(kind.__name__, (kind,), facts)
        self._undo.append(lambda: setattr(thing, "__class__", kind))

    def _guarded(self, thing: Any, inner: Callable[..., Any]) -> Callable[..., Any]:  # noqa: ANN401
        @wraps(inner)
        def guarded(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if self.open:
                return inner(*args, **kwargs)
            if any(callable(given) and given is not thing for given in (*args, *kwargs.values())):
                raise UsageError(
                    "step(closure) would run a backward that nobody waits for",
                    hint="run loss.backward() in the loop, then step() without a closure",
                )
            return None

        return guarded

    def release(self) -> None:
        """All things are as they were. Idempotent."""
        self.open = True  # for a scheduler made since, that has kept the guarded method
        while self._undo:
            self._undo.pop()()
