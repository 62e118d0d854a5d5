"""Backward: notices when a backward pass begins, and calls when all of it is done.

Only one that adds to `p.grad` is one: `torch.autograd.grad` is the user's own affair.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # pyright: ignore
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.nn import Module
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle


class Backward:
    """Watches one model's. `begun` is called before its first gradient is added, `done` after all.

    Under `no_sync` only `begun` is. The model's outputs tell which graph it is that must be done: a
    reentrant checkpoint runs inner ones, whose end is not the end. Where the forward was not the
    model's own (a method of it was called instead) the first gradient does.
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
        self._running = self._touched = False
        self.accumulated = False
        """A backward was done under `no_sync`. Whoever waits for the last one takes it back."""
        self._quiet = 0
        self._nodes = [get_gradient_edge(p).node for p in parameters]  # hooks live as long as these
        self._handles: list[RemovableHandle] = [
            model.register_forward_hook(_Listener(self._on_forward)),
            *(node.register_prehook(self._on_gradient) for node in self._nodes),
        ]

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
        self._running = self._touched = False

    def close(self) -> None:
        """The model is as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()

    def _on_forward(self, output: Any) -> None:  # noqa: ANN401
        if torch._C._current_graph_task_id() < 0:  # pyright: ignore
            self.reset()  # no backward is under way: one that has raised, and is tried again
        for tensor in _tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._on_output)  # pyright: ignore[reportUnknownMemberType]

    def _on_output(self, grad: Tensor) -> None:
        with self._lock:
            self._run()

    def _on_gradient(self, grads: Any) -> None:  # noqa: ANN401
        if self._touched:
            return  # called for every tensor of the model
        with self._lock:
            self._run()
            if not self._touched:
                self._begun()
                self._touched = True  # from here on others need not wait for this one

    def _run(self) -> None:
        if not self._running:
            self._running = True
            Variable._execution_engine.queue_callback(self._finish)  # pyright: ignore

    def _finish(self) -> None:
        touched = self._touched
        self.reset()
        if touched and self._quiet:
            self.accumulated = True
        elif touched:
            self._done()


class _Listener:
    """A forward hook that a copy of its module does not have: nobody watches the copy."""

    def __init__(self, told: Callable[[Any], None]) -> None:
        self._told = told

    @_disable_dynamo  # `model.compile()` would trace this too
    def __call__(self, module: Module, args: Any, output: Any) -> None:  # noqa: ANN401
        self._told(output)

    def __reduce__(self) -> tuple[type[_Listener], tuple[Callable[[Any], None]]]:
        return _Listener, (_ignore,)


def _ignore(output: Any) -> None:  # noqa: ANN401
    pass


def _tensors_in(output: Any) -> Iterator[Tensor]:  # noqa: ANN401
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            for field in fields(leaf):
                yield from _tensors_in(getattr(leaf, field.name))
