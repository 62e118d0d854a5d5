"""Gradients: what a pass contributes to its round, and where the mean of the round is put.

The tensors of a contribution are the gradient of every parameter, then the change of every float
buffer, then the other buffers. Of those there is no mean: they come from the pass that has the
first sample of the round. On the CPU a gradient is lent to the engine as it is, and the mean is
read into the same memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import LBFGS

from manyhands.collectives.results import Result, has_mean
from manyhands.collectives.staging import Staging
from manyhands.core.errors import UsageError

if TYPE_CHECKING:
    from torch.optim import Optimizer


class Named(NamedTuple):
    """A tensor and what the model calls it."""

    name: str
    tensor: Tensor


def parameters_of(model: Module, optimizers: Sequence[Optimizer]) -> list[Named]:
    """All that is trained, in the model's order; each once, however often it is tied.

    Raises UsageError for parameters of an optimizer that the model does not have: nobody could say
    which of another peer's they are; and for an optimizer that a round is not enough for.
    """
    named = [Named(n, p) for n, p in model.named_parameters() if p.requires_grad]
    known = {id(p) for p in model.parameters()}
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS):
            raise UsageError(
                "LBFGS calls its closure several times a step, and a round has one backward",
                hint="take an optimizer that steps without a closure, Adam or SGD say",
            )
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
        self._parameters = [p for _, p in parameters]
        self._frozen = [Named(n, p) for n, p in model.named_parameters() if not p.requires_grad]
        slots = {name: _Slot(*owner_of(model, name)) for name, _ in model.named_buffers()}
        means = [name for name, slot in slots.items() if has_mean(slot.tensor)]
        others = [name for name in slots if name not in means]
        self._buffers = [slots[name] for name in means]
        self._others = [slots[name] for name in others]
        self.names = [*self._names, *means, *others]
        """Of the tensors of a contribution."""
        self._held: list[Tensor | None] = [None] * len(self._parameters)
        self._begun = False  # a backward of this pass: what it found in p.grad is held
        self._means: list[tuple[Tensor, int]] = []  # what is in p.grad, and in which version
        self._spent: set[int] = set()  # ids of those whose p.grad no step needs: used, or zeros
        self._loaded: Mapping[str, Tensor | None] | None = None  # not in p.grad yet
        self._lent: list[Tensor] | None = None  # of the round's first pass; the engine reads them
        self._staging = Staging()
        self._before: list[Tensor] = []  # float buffers as they were when the round began
        self._before_others: list[Tensor] = []

    @property
    def num_parameters(self) -> int:
        """How many of the tensors are gradients; buffers follow."""
        return len(self._parameters)

    @property
    def num_tensors(self) -> int:
        """Of a contribution."""
        return len(self.names)

    @property
    def like(self) -> list[Tensor]:
        """Tensors of the shape of a contribution."""
        buffers = [slot.tensor for slot in (*self._buffers, *self._others)]
        return [t.detach() for t in (*self._parameters, *buffers)]

    # -- buffers ------------------------------------------------------------------------------

    @torch.no_grad()
    def begin_round(self) -> None:
        """Buffers are as all peers have them, and gradients where a state that has come had any.

        Raises UsageError if more is trained than was.
        """
        for name, p in self._frozen:
            if p.requires_grad:
                raise UsageError(
                    f"{name} did not require a gradient when the run was joined, and does now",
                    hint="wrap a model with all that will ever be trained, and freeze it after "
                    "that: what has no gradient is left alone",
                )
        self.show_loaded()
        self._means.clear()  # the user may have let go of them
        self._lent = None  # of a round from which nothing was learnt
        self._before = [slot.tensor.clone() for slot in self._buffers]
        self._before_others = [slot.tensor.clone() for slot in self._others]

    @torch.no_grad()
    def undo_buffers(self) -> None:
        """Buffers are as they were when the round began."""
        for slot, before in zip(self._buffers, self._before, strict=True):
            slot.restore(before)
        for slot, before in zip(self._others, self._before_others, strict=True):
            slot.restore(before)

    # -- gradients ----------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Before the first gradient of a pass is there: what was accumulated earlier is put aside.

        It belongs to the user, who has not stepped yet; the mean will be added to it.
        """
        if self._begun:
            return
        self._begun = True
        for i, p in enumerate(self._parameters):
            self._held[i] = p.grad
            if p.grad is not None:
                p.grad = None

    @torch.no_grad()
    def contribution(
        self, factor: float, share: float, *, first: bool
    ) -> tuple[list[Tensor], list[bool]]:
        """What this pass gives, and which of it there was anything of: its gradients times
        `factor`, changes of buffers times `share`. `first`: it has the round's first sample.

        The gradients are lent: they must stay as they are until the round is committed.
        """
        used = [p.grad is not None for p in self._parameters]
        tensors = [self._lend(i) for i in range(len(self._parameters))]
        if factor != 1.0:
            torch._foreach_mul_(tensors, factor)  # pyright: ignore
        changed: list[Tensor] = []
        for slot, before in zip(self._buffers, self._before, strict=True):
            # Not its value: of a constant even the last bit must stay, and it may be infinite.
            same = slot.tensor == before
            change = (slot.tensor - before).masked_fill_(same, 0.0).mul_(share)
            changed.append(~same.all())
            tensors.append(change.contiguous())
        used += _ask(changed)
        for slot in self._others:
            used.append(first)
            tensors.append(slot.copied() if first else _empty_like(slot.tensor).zero_())
        if self._lent is None:
            self._lent = tensors
        return tensors, used

    def _lend(self, i: int) -> Tensor:
        p = self._parameters[i]
        grad = p.grad
        if grad is None:
            return torch.zeros(p.shape, dtype=p.dtype, device=p.device)
        if grad.layout is not torch.strided:
            raise UsageError(
                f"the gradient of {self._names[i]} is sparse, and rounds add up dense ones",
                hint="nn.Embedding(..., sparse=False), and an optimizer for dense gradients",
            )
        if not grad.is_contiguous():
            return grad.detach().contiguous()
        return grad.detach() if grad.requires_grad else grad

    def nothing(self) -> list[Tensor]:
        """A contribution of weight 0: its values do not travel, only its form counts."""
        return [torch.empty(t.shape, dtype=t.dtype) for t in self.like]

    @torch.no_grad()
    def undo(self) -> None:
        """A pass that does not close its round: its gradient is in the bank, and reads as zeros."""
        if not self._begun:
            return
        self._begun = False
        for i, p in enumerate(self._parameters):
            held, self._held[i] = self._held[i], None
            if p.grad is not None:
                if held is None:
                    self._spent.add(id(p))
                p.grad = torch.zeros_like(p) if held is None else held
            else:
                p.grad = held

    @torch.no_grad()
    def adopt(self, result: Result, used: Sequence[bool]) -> None:
        """p.grad := the mean over the round, and buffers too; nothing where nobody had any."""
        room = self._lent if self._lent is not None else self._room()
        self._lent, self._begun = None, False
        self._read(result, room)
        helds = self._held.copy()
        self._held[:] = [None] * len(helds)
        for i, (p, held) in enumerate(zip(self._parameters, helds, strict=True)):
            if not used[i]:
                p.grad = held
                continue
            self._spent.discard(id(p))
            mean = room[i]
            if mean is p.grad and held is None:
                continue  # read into where it was
            mean = mean.view(p.shape)
            p.grad = mean if held is None else held.add_(mean)
        self._means.clear()
        if not any(held is not None for held in helds):
            self._means += [(grad, grad._version) for grad in self._grads()]
        first = len(self._parameters)
        for i, slot in enumerate(self._buffers):
            slot.tensor.copy_(self._before[i])
            if used[first + i]:
                slot.tensor.add_(room[first + i].view(slot.tensor.shape))
        first += len(self._buffers)
        for i, slot in enumerate(self._others):
            value = room[first + i].view(slot.tensor.shape) if used[first + i] else None
            slot.set(self._before_others[i] if value is None else value)

    def _read(self, result: Result, room: list[Tensor]) -> None:
        """Into tensors of any device: to a GPU by memory that it reads without help."""
        if result.alone or not any(tensor.is_cuda for tensor in room):
            result.read_into(room)
        else:
            self._staging.send(room, result.read_into)

    # -- what is accumulated ------------------------------------------------------------------

    def stepped(self, optimizer: Optimizer) -> None:
        """What is in p.grad has been used, and only its memory is left."""
        self._spent.update(id(p) for group in optimizer.param_groups for p in group["params"])

    def state_dict(self) -> dict[str, Tensor | None]:
        """Gradients that no step has used yet: who goes on from here needs them, if the user adds
        up several rounds. None where there is one that was used, and is zero or soon will be.

        All peers say the same, whoever of them has stepped here and whoever has joined since: each
        sends a newcomer some pieces of it.
        """
        if self._loaded is not None:
            return dict(self._loaded)
        found: dict[str, Tensor | None] = {}
        for name, p, held in zip(self._names, self._parameters, self._held, strict=True):
            grad = held if self._begun else p.grad
            if grad is not None:
                found[name] = None if id(p) in self._spent else grad
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """What p.grad will be from the next round on. Raises UsageError.

        Not before: a state is that between two bodies, and a loop that comes to them by way of
        epochs which are over zeroes on its way what others have added up since.
        """
        loaded: dict[str, Tensor | None] = {}
        for name, p in zip(self._names, self._parameters, strict=True):
            if name not in state_dict:
                continue
            value = state_dict[name]
            if value is not None and not (isinstance(value, Tensor) and value.shape == p.shape):
                raise UsageError(f"the state is one of another model: the gradient of {name}")
            loaded[name] = value
        self._loaded = loaded

    @torch.no_grad()
    def show_loaded(self) -> None:
        """p.grad := what was loaded, if it is not there yet."""
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            return
        self._spent.clear()
        for name, p in zip(self._names, self._parameters, strict=True):
            if name not in loaded:
                p.grad = None
                continue
            value = loaded[name]
            if value is None:
                self._spent.add(id(p))
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            p.grad = grad.zero_() if value is None else grad.copy_(value)

    # -- values -------------------------------------------------------------------------------

    def values(self) -> list[Tensor]:
        """Parameters and buffers as they are: lent, in the form of a contribution."""
        return [tensor.contiguous() for tensor in self.like]

    @torch.no_grad()
    def adopt_values(self, result: Result) -> None:
        """Parameters and buffers := another peer's."""
        slots = (*self._buffers, *self._others)
        # Parameters take the values where they are; a graph may refer to a buffer that stays.
        room = [p.detach() if p.is_contiguous() else _empty_like(p) for p in self._parameters]
        room += [_empty_like(slot.tensor) for slot in slots]
        self._read(result, room)
        for p, value in zip(self._parameters, room, strict=False):
            if not p.is_contiguous():
                p.copy_(value)
        for slot, value in zip(slots, room[len(self._parameters) :], strict=True):
            slot.set(value)

    def are_means(self) -> bool:
        """Whether p.grad is the mean of the round, and nothing was added or changed since."""
        grads = self._grads()
        return len(grads) == len(self._means) and all(
            grad is mean and grad._version == version
            for grad, (mean, version) in zip(grads, self._means, strict=True)
        )

    @torch.no_grad()
    def norm(self, dtype: torch.dtype | None = None) -> float:
        """Of p.grad as it is, added up in this dtype or in its own."""
        norms = torch._foreach_norm(self._grads(), 2, dtype)  # pyright: ignore
        return math.hypot(*(float(norm) for norm in norms))

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """p.grad *= factor."""
        torch._foreach_mul_(self._grads(), factor)  # pyright: ignore

    def forget(self) -> None:
        """The round starts over: nothing of this peer's is lent to it any more."""
        self._lent = None
        self._means.clear()

    def _grads(self) -> list[Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]

    def _room(self) -> list[Tensor]:
        """The gradient of a pass without samples is nobody's: its memory takes the mean."""
        room: list[Tensor] = []
        for p in self._parameters:
            grad = p.grad
            usable = grad is not None and grad.is_contiguous()
            room.append(grad.detach() if usable and grad is not None else _empty_like(p))
        buffers = (*self._buffers, *self._others)
        return [*room, *(_empty_like(slot.tensor) for slot in buffers)]


def _empty_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _ask(flags: Sequence[Tensor]) -> list[bool]:
    """What these say; a GPU is asked once for all of them."""
    if not flags:
        return []
    if len({flag.device for flag in flags}) > 1:
        return [bool(flag) for flag in flags]
    return cast("list[bool]", torch.stack(list(flags)).tolist())  # pyright: ignore


class _Slot(NamedTuple):
    """Where a buffer is. A module may put another tensor there: `self.mean = 0.9 * self.mean`."""

    module: Module
    name: str

    @property
    def tensor(self) -> Tensor:
        return self.module.get_buffer(self.name)

    def copied(self) -> Tensor:
        """As it is now."""
        return self.tensor.clone(memory_format=torch.contiguous_format)

    def restore(self, value: Tensor) -> None:
        """A tensor that was put there in torch's inference mode takes no values outside of it."""
        if self.tensor.is_inference():
            setattr(self.module, self.name, value.clone())
        else:
            self.tensor.copy_(value)

    def set(self, value: Tensor) -> None:
        """Unless it is that: a graph may refer to a constant. (A GPU is not waited for.)"""
        if self.tensor.is_cuda or not torch.equal(self.tensor, value):
            self.tensor.copy_(value)


def owner_of(model: Module, path: str) -> tuple[Module, str]:
    """The module that has what the model calls so, and its name there."""
    at, _, name = path.rpartition(".")
    return model.get_submodule(at), name
