"""Gates: optimizers and schedulers act when a round is committed, and only then."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any


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
            inner = vars(thing)[method]
            setattr(thing, method, self._guarded(inner))
            self._undo.append(lambda: setattr(thing, method, inner))
            return
        # Not an attribute of the instance: a scheduler's state_dict would have it.
        kind: type = type(thing)
        guarded = self._guarded(getattr(kind, method))
        facts = {method: guarded, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
        thing.__class__ = type(kind.__name__, (kind,), facts)
        self._undo.append(lambda: setattr(thing, "__class__", kind))

    def _guarded(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(inner)
        def guarded(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            return inner(*args, **kwargs) if self.open else None

        return guarded

    def release(self) -> None:
        """All things are as they were. Idempotent."""
        while self._undo:
            self._undo.pop()()
