"""Backward: notices when a backward pass begins, and calls when all of it is done.

Not under `no_sync`: gradients of further backwards are simply added up by torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd import Variable
from torch.nn import Module
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle


class Backward:
    """Watches one model's. `begun` is called before the first gradient is there, `done` after all.

    The model's outputs tell that a backward begins. Where the forward was not the model's own (a
    method of it was called instead) the first gradient of a parameter does.
    """

    def __init__(
        self,
        model: Module,
        parameters: Sequence[Tensor],
        begun: Callable[[], None],
        done: Callable[[], None],
    ) -> None:
        self._begun, self._done = begun, done
        self._lock = threading.Lock()  # gradients of several devices come in several threads
        self._running = False
        self._quiet = 0
        self._handles: list[RemovableHandle] = [model.register_forward_hook(self._on_forward)]
        self._handles += [p.register_hook(self._on_gradient) for p in parameters]

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Backwards in here only accumulate."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    def reset(self) -> None:
        """A backward that has raised will not be done."""
        self._running = False

    def close(self) -> None:
        """The model is as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _on_forward(self, module: Module, args: Any, output: Any) -> None:  # noqa: ANN401
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._on_gradient)

    def _on_gradient(self, grad: Tensor) -> None:
        with self._lock:
            if self._running or self._quiet:
                return
            self._running = True
        # Of the outermost graph: a reentrant checkpoint runs inner ones, whose end is not the end.
        Variable._execution_engine.queue_callback(self._finish)  # pyright: ignore
        self._begun()

    def _finish(self) -> None:
        self._running = False
        self._done()
