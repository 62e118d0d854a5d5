"""Gradients: what a pass contributes to its round, and where the mean of the round is put.

The tensors of a contribution are the gradient of every parameter, then every float buffer. On the
CPU a gradient is lent to the engine as it is, and the mean is read into the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from manyhands.core.errors import UsageError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from manyhands.collectives.results import Result


class Named(NamedTuple):
    """A tensor and what the model calls it."""

    name: str
    tensor: Tensor


def parameters_of(model: Module, optimizers: Sequence[Optimizer]) -> list[Named]:
    """All that is trained, in the model's order; each once, however often it is tied.

    Raises UsageError for parameters of an optimizer that the model does not have: nobody could say
    which of another peer's they are.
    """
    named = [Named(n, p) for n, p in model.named_parameters() if p.requires_grad]
    known = {id(p) for p in model.parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if id(p) not in known:
                    raise UsageError(
                        f"{type(optimizer).__name__} has a parameter of shape {tuple(p.shape)} "
                        "that is not one of the model's",
                        hint="make it a parameter of the model, or of a module around both",
                    )
    if not named:
        raise UsageError("the model has no parameter that is trained", hint="requires_grad_()")
    return named


class Gradients:
    """Those of one model. Used by the thread that runs its backward."""

    def __init__(self, model: Module, parameters: Sequence[Named]) -> None:
        self._names = [name for name, _ in parameters]
        self._parameters: list[Parameter] = [p for _, p in parameters]  # type: ignore[misc]
        self._buffers = [b for _, b in model.named_buffers() if b.is_floating_point()]
        self._others = [b for _, b in model.named_buffers() if not b.is_floating_point()]
        self._held: list[Tensor | None] = [None] * len(self._parameters)
        self._accumulated = False
        self._lent: list[Tensor] | None = None  # of the round's first pass; the engine reads them
        self._before: list[Tensor] = []  # float buffers as they were when the round began
        self._before_others: list[Tensor] = []

    @property
    def num_parameters(self) -> int:
        """How many of the tensors are gradients; buffers follow."""
        return len(self._parameters)

    @property
    def like(self) -> list[Tensor]:
        """Tensors of the shape of a contribution."""
        return [t.detach() for t in (*self._parameters, *self._buffers)]

    # -- buffers ------------------------------------------------------------------------------

    @torch.no_grad()
    def begin_round(self) -> None:
        """Buffers are as all peers have them."""
        self._before = [b.clone() for b in self._buffers]
        self._before_others = [b.clone() for b in self._others]

    @torch.no_grad()
    def undo_buffers(self) -> None:
        """Buffers are as they were when the round began."""
        for b, before in zip(self._buffers, self._before, strict=True):
            b.copy_(before)
        for b, before in zip(self._others, self._before_others, strict=True):
            b.copy_(before)

    # -- gradients ----------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Before the first gradient of a pass is there: what was accumulated earlier is put aside.

        It belongs to the user, who has not stepped yet; the mean will be added to it.
        """
        for i, p in enumerate(self._parameters):
            self._held[i] = p.grad
            if p.grad is not None:
                p.grad = None

    @torch.no_grad()
    def contribution(self, factor: float) -> tuple[list[Tensor], list[bool]]:
        """What this pass gives, times `factor`, and which of it there was anything of.

        The gradients are lent: they must stay as they are until the round is committed.
        """
        used = [p.grad is not None for p in self._parameters]
        tensors = [self._lend(i) for i in range(len(self._parameters))]
        for b, before in zip(self._buffers, self._before, strict=True):
            used.append(not torch.equal(b, before))
            tensors.append(b.to("cpu", copy=True).contiguous())
        if factor != 1.0:
            torch._foreach_mul_(tensors, factor)  # pyright: ignore
        if self._lent is None:
            self._lent = tensors
        return tensors, used

    def _lend(self, i: int) -> Tensor:
        p = self._parameters[i]
        grad = p.grad
        if grad is None:
            return torch.zeros(p.shape, dtype=p.dtype)
        if grad.layout is not torch.strided:
            raise UsageError(
                f"the gradient of {self._names[i]} is sparse, and rounds add up dense ones",
                hint="nn.Embedding(..., sparse=False), and an optimizer for dense gradients",
            )
        if grad.device.type == "cpu" and grad.is_contiguous():
            return grad.detach()
        return grad.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)

    def nothing(self) -> list[Tensor]:
        """A contribution of weight 0: its values do not travel, only its form counts."""
        return [torch.empty(t.shape, dtype=t.dtype) for t in self.like]

    @torch.no_grad()
    def undo(self) -> None:
        """A pass that does not close its round: its gradient is in the bank, and reads as zeros."""
        for i, p in enumerate(self._parameters):
            held, self._held[i] = self._held[i], None
            if p.grad is not None:
                p.grad = torch.zeros_like(p) if held is None else held
            else:
                p.grad = held

    @torch.no_grad()
    def adopt(self, result: Result, used: Sequence[bool]) -> None:
        """p.grad := the mean over the round, and buffers too; nothing where nobody had any."""
        room = self._lent if self._lent is not None else self._room()
        self._lent = None
        self._accumulated = any(held is not None for held in self._held)
        result.read_into(room)
        for i, p in enumerate(self._parameters):
            held, self._held[i] = self._held[i], None
            if not used[i]:
                p.grad = held
                continue
            mean = room[i].view(p.shape)
            if p.device.type != "cpu":
                mean = mean.to(p.device, non_blocking=True)
            p.grad = mean if held is None else held.add_(mean)
        first = len(self._parameters)
        for i, b in enumerate(self._buffers):
            # One that nobody changed is a constant: a mean of equals may be off in the last bit.
            b.copy_(room[first + i].view(b.shape) if used[first + i] else self._before[i])

    @property
    def accumulated(self) -> bool:
        """Whether p.grad is not the mean alone: the user had not stepped since the one before."""
        return self._accumulated

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """p.grad *= factor."""
        grads = [p.grad for p in self._parameters if p.grad is not None]
        torch._foreach_mul_(grads, factor)  # pyright: ignore

    def forget(self) -> None:
        """The round starts over: nothing of this peer's is lent to it any more."""
        self._lent = None

    def _room(self) -> list[Tensor]:
        """The gradient of a pass without samples is nobody's: its memory takes the mean."""
        room: list[Tensor] = []
        for p in self._parameters:
            grad = p.grad
            usable = grad is not None and grad.device.type == "cpu" and grad.is_contiguous()
            room.append(grad.detach() if usable and grad is not None else _empty_like(p))
        return [*room, *(_empty_like(b) for b in self._buffers)]


def _empty_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)
