"""Runner: one stage's layers on this peer, forward and backward, a microbatch at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from manyhands.core.errors import UsageError
from manyhands.stages.buffers import preserved
from manyhands.stages.chance import Drawn, forked, seed_of, set_seed
from manyhands.stages.layers import Carried, Running
from manyhands.stages.precision import casting, precision_of
from manyhands.stages.values import Table, carried_name
from manyhands.stages.variables import Scope, scoped

LOSS = "#loss"
"""The output of a stage that ends in a loss: its gradient is its own."""


class Seeds(NamedTuple):
    """What the random numbers of a layer depend on, beside its index.

    Of the plan, only on where the rows of this peer begin: peers of a wide stage that drew the same
    numbers would drop the same places of different rows.
    """

    seed: int
    step: int
    microbatch: int
    first_row: int = 0

    def of(self, layer: int) -> int:
        """A layer's. Peers that begin with the first row draw what a single one draws."""
        place = (self.step, self.microbatch, layer)
        return seed_of(self.seed, *place, *([self.first_row] if self.first_row else []))


class _Held(NamedTuple):
    """What a forward leaves for its backward."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor] | None  # with their graphs; None: to be computed anew
    again: Callable[[], dict[str, Tensor]] | None = None


class Runner:
    """The layers of one stage. Not thread-safe."""

    def __init__(self, stage: int, layers: Sequence[Running], *, recompute: bool) -> None:
        self.stage, self.layers = stage, tuple(layers)
        self._recompute = recompute
        self._held: dict[int, _Held] = {}

    def modules(self) -> list[nn.Module]:
        """Those of its layers."""
        return [layer.module for layer in self.layers]

    def forward(
        self,
        microbatch: int,
        inputs: dict[str, Tensor],
        table: Table,
        *,
        seeds: Seeds | None = None,
        finish: Callable[[Carried], Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """The stage's outputs by name, cut off from their graphs; with `finish`, its loss.

        `inputs` are this peer's rows of all that the table says the stage uses. While gradients are
        on, what `backward` needs is held.
        """
        if not torch.is_grad_enabled():
            return self._run(inputs, table, seeds, finish)
        for value in table.used_by[self.stage]:
            if value.kind.grad:
                inputs[value.name].requires_grad_()
        if self._recompute:
            held, outputs = self._without_graph(inputs, table, seeds, finish)
        else:
            outputs = self._run(inputs, table, seeds, finish)
            held = _Held(inputs, outputs)
        self._held[microbatch] = held
        return {name: tensor.detach() for name, tensor in outputs.items()}

    def _without_graph(
        self,
        inputs: dict[str, Tensor],
        table: Table,
        seeds: Seeds | None,
        finish: Callable[[Carried], Tensor] | None,
    ) -> tuple[_Held, dict[str, Tensor]]:
        device = _device_of(inputs)
        precision = precision_of(device)
        drawn = Drawn(device) if seeds is None else None

        def again() -> dict[str, Tensor]:
            chance = forked(device) if drawn is None else drawn.again()
            with preserved(self.modules()), chance, casting(device, precision):
                return self._run(inputs, table, seeds, finish)

        with torch.no_grad():
            outputs = self._run(inputs, table, seeds, finish)
        return _Held(inputs, None, again), outputs

    def backward(
        self, microbatch: int, gradients: Mapping[str, Tensor], table: Table
    ) -> dict[str, Tensor]:
        """The gradients of the stage's inputs by name, from those of its outputs.

        Those of parameters are added to `.grad`.
        """
        inputs, outputs, again = self._held.pop(microbatch)
        if outputs is None:
            assert again is not None
            outputs = again()
        # Of a variable without rows, only one of the stage's peers may have been asked.
        roots = {
            name: gradients.get(name)
            for name, tensor in outputs.items()
            if tensor.requires_grad and (name == LOSS or name in gradients)
        }
        if roots:
            with casting(_device_of(inputs), None):
                torch.autograd.backward([outputs[name] for name in roots], list(roots.values()))
        used = table.used_by[self.stage]
        return {v.name: _gradient_of(inputs[v.name]) for v in used if v.kind.grad} if used else {}

    def forget(self) -> None:
        """Whatever is held for backwards that will not come."""
        self._held.clear()

    def _run(
        self,
        inputs: Mapping[str, Tensor],
        table: Table,
        seeds: Seeds | None,
        finish: Callable[[Carried], Tensor] | None,
    ) -> dict[str, Tensor]:
        if table.rehearsed[self.stage].copied:
            inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        scope = Scope({name: t for name, t in inputs.items() if not name.startswith("#")})
        carried = table.carried_into(self.stage, inputs)
        num_rows = len(carried[0] if isinstance(carried, tuple) else carried)
        with scoped(scope):
            for layer in self.layers:
                if seeds is not None:
                    set_seed(seeds.of(layer.index))
                carried = layer.run(carried, scope)
        scope.check()
        if finish is not None:
            outputs = {LOSS: finish(carried)}
        elif isinstance(carried, tuple):
            outputs = {carried_name(self.stage, i): part for i, part in enumerate(carried)}
        else:
            outputs = {carried_name(self.stage, 0): carried}
        if table.made_by[self.stage]:
            for value in table.made_by[self.stage]:
                if value.name in scope.values:
                    outputs[value.name] = scope.values[value.name]
            self._check(outputs, table, num_rows)
        return outputs

    def _check(self, outputs: Mapping[str, Tensor], table: Table, num_rows: int) -> None:
        """What was rehearsed is what the receivers have made room for, and send gradients of."""
        who = f"{self.layers[-1].said} or one before it"
        for value in table.made_by[self.stage]:
            tensor = outputs.get(value.name)
            if tensor is None:
                continue  # an input that is handed on as it came
            shape = tuple(tensor.shape if value.kind.whole else tensor.shape[1:])
            if shape != value.kind.shape or str(tensor.dtype) != f"torch.{value.kind.dtype}":
                raise UsageError(
                    f"{who} gave {tensor.dtype} of shape {tuple(tensor.shape)} where {value.kind} "
                    "was agreed for these inputs",
                    hint="what crosses between stages must depend on the shape of the inputs only",
                )
            if not value.kind.whole and len(tensor) != num_rows:
                raise UsageError(
                    f"{who} was given {num_rows} rows, and {len(tensor)} came out",
                    hint="layers of a plan keep the rows of the batch: mask those of no use",
                )
            if torch.is_grad_enabled() and tensor.requires_grad and not value.kind.grad:
                raise UsageError(
                    f"{who} gave a tensor that needs a gradient, where none was agreed",
                    hint="freeze and unfreeze layers before their Pipeline is made",
                )


def _gradient_of(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _device_of(inputs: Mapping[str, Tensor]) -> torch.device:
    return next(iter(inputs.values())).device
