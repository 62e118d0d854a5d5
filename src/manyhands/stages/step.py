"""Step: one batch through a plan, as one peer sees it: its actions in order, each with its mail.

If a layer raises, this peer goes on sending and receiving, with zeros: nobody waits for a peer that
has given up, and all hear at the vote what went wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from manyhands.core.errors import UsageError
from manyhands.core.plan import Plan
from manyhands.stages.batch import Batch
from manyhands.stages.chance import forked
from manyhands.stages.mail import Mail
from manyhands.stages.moves import Rows, rows_at
from manyhands.stages.runner import LOSS, Runner, Seeds
from manyhands.stages.schedule import Action
from manyhands.stages.traffic import Message, Traffic
from manyhands.stages.values import Table, Value, carried_name, target_name
from manyhands.stages.vote import Failure, failure_of
from manyhands.wire.tensors import dtype_named

LossFn = Callable[[Any, Any], Tensor]
_ONE_NUMBER = "a loss function returns one number, a tensor"
_AHEAD = 3  # actions whose inputs are asked for while an action runs


class Step:
    """Actions of one batch. `loss` is this peer's part of the sum; `failure` its first error."""

    def __init__(
        self,
        plan: Plan,
        me: int,
        runners: Mapping[int, Runner],
        table: Table,
        traffic: Traffic,
        mail: Mail,
        batch: Batch,
        *,
        loss_fn: LossFn | None = None,
        loss_is_mean: bool = True,
        seeds: tuple[int, int] | None = None,
        device: torch.device,
    ) -> None:
        self._plan, self._stages, self._me = plan, plan.stages, me
        self._runners, self._table, self._traffic, self._mail = runners, table, traffic, mail
        self._batch, self._loss_fn, self._mean = batch, loss_fn, loss_is_mean
        self._seeds, self._device = seeds, device
        self._last = len(self._stages) - 1
        self._losses: list[Tensor] = []
        self.failure: Failure | None = None
        self.outputs: dict[int, dict[str, Tensor]] = {}  # of the last stage, by microbatch

    @property
    def loss(self) -> float:
        """The sum of this peer's losses, as scaled."""
        return float(torch.stack(self._losses).sum()) if self._losses else 0.0

    def run(
        self,
        actions: Sequence[Action],
        gradients: Callable[[int, Rows], Mapping[str, Tensor]] | None = None,
    ) -> None:
        """In this order. `gradients` of the last stage's outputs, where no loss gives them.

        Raises what the carrier raises; what layers raise is a failure.
        """
        with nullcontext() if self._seeds is None else forked(self._device):
            for index, action in enumerate(actions):
                self._mail.expect(actions[index : index + 1 + _AHEAD])
                rows = self._rows(action)
                if len(rows) and action.direction == "F":
                    self._forward(action, rows)
                elif len(rows):
                    self._backward(action, rows, gradients)

    def fail(self, error: Exception, action: Action | None) -> None:
        """Note the first error."""
        if self.failure is None:
            at = "before the step" if action is None else f"in {self._said(action)}"
            self.failure = failure_of(error, action, at)

    def _said(self, action: Action) -> str:
        stage = self._stages[action.stage]
        first, last = self._plan.layers[stage.first].name, self._plan.layers[stage.end - 1].name
        way = "forward" if action.direction == "F" else "backward"
        layers = f"layer {first}" if first == last else f"layers {first} to {last}"
        return f"the {way} of {layers}, microbatch {action.microbatch}"

    def _rows(self, action: Action) -> Rows:
        stage = self._stages[action.stage]
        return rows_at(stage, self._me, self._batch.rows[action.microbatch])

    # -- forward ----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        self._mail.finish()

    def _forward(self, action: Action, rows: Rows) -> None:
        inputs = self._collect(action)
        made: Mapping[str, Tensor] = {}
        if self.failure is None:
            try:
                made = self._compute(action, rows, inputs)
            except Exception as error:  # noqa: BLE001  (told to everybody at the vote)
                self.fail(error, action)
        for message in self._traffic.sent(self._me, action):
            self._mail.put(message, self._piece(message, made, inputs, rows))

    def _compute(
        self, action: Action, rows: Rows, inputs: dict[str, Tensor]
    ) -> Mapping[str, Tensor]:
        stage, microbatch = action.stage, action.microbatch
        if stage == 0:
            inputs |= self._batch.inputs(microbatch, rows)
            if self._table.given.targets:
                inputs |= self._batch.targets(microbatch, rows)
        targets: dict[str, Tensor] = {}
        finish = None
        if stage == self._last and self._loss_fn is not None:
            targets = self._targets(microbatch, rows, inputs)
            finish = self._finish(targets, len(rows))
        seeds = None if self._seeds is None else Seeds(*self._seeds, microbatch, rows.start)
        given = {name: t for name, t in inputs.items() if name not in targets}
        made = self._runners[stage].forward(
            microbatch, given, self._table, seeds=seeds, finish=finish
        )
        if stage == self._last:
            if finish is not None:
                self._losses.append(made[LOSS])
            else:
                self.outputs[microbatch] = dict(made)
        return made

    def _targets(
        self, microbatch: int, rows: Rows, inputs: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        if self._table.given.targets:
            names = [target_name(index) for index in range(len(self._table.given.targets))]
            return {name: inputs[name] for name in names}
        targets = self._batch.targets(microbatch, rows)
        if not targets:
            raise UsageError(
                "this peer computes the loss and was given no targets",
                hint="pass them to step() on the peers of the last stage, or say "
                'targets="first" and pass them with the inputs',
            )
        return targets

    def _finish(self, targets: Mapping[str, Tensor], num_rows: int) -> Callable[[Any], Tensor]:
        parts = tuple(targets.values())
        given = self._table.given
        single = given.single_target if given.targets else self._batch.single_target
        factor = num_rows / self._batch.num_rows if self._mean else 1.0

        def finish(output: Any) -> Tensor:  # noqa: ANN401
            assert self._loss_fn is not None
            loss = self._loss_fn(output, parts[0] if single else parts)
            if not isinstance(loss, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise UsageError(f"the loss is {loss!r:.200}", hint=_ONE_NUMBER)
            if loss.numel() != 1:
                raise UsageError(f"the loss has shape {tuple(loss.shape)}", hint=_ONE_NUMBER)
            return loss.reshape(()) * factor

        return finish

    # -- backward ---------------------------------------------------------------------------------

    def _backward(
        self,
        action: Action,
        rows: Rows,
        gradients: Callable[[int, Rows], Mapping[str, Tensor]] | None,
    ) -> None:
        stage, microbatch = action.stage, action.microbatch
        wanted = self._sums(action)
        made: Mapping[str, Tensor] = {}
        if self.failure is None:
            try:
                if stage == self._last and gradients is not None:
                    wanted |= gradients(microbatch, rows)
                made = self._runners[stage].backward(microbatch, wanted, self._table)
            except Exception as error:  # noqa: BLE001  (told to everybody at the vote)
                self.fail(error, action)
        for message in self._traffic.sent(self._me, action):
            self._mail.put(message, self._piece(message, made, {}, rows))

    def _sums(self, action: Action) -> dict[str, Tensor]:
        """Gradients of a stage's outputs: those of all consumers, in order, added up."""
        pieces: dict[tuple[Value, int], list[Tensor]] = {}
        for message in self._traffic.needed(self._me, action):
            tensor = self._mail.take(message)
            pieces.setdefault((message.value, message.consumer), []).append(tensor)
        sums: dict[str, Tensor] = {}
        for (value, _), parts in pieces.items():
            if value.kind.whole:
                total = parts[0]
                for part in parts[1:]:
                    total = total + part
            else:
                total = joined(parts)
            before = sums.get(value.name)
            sums[value.name] = total if before is None else before + total
        return sums

    # -- mail -------------------------------------------------------------------------------------

    def _collect(self, action: Action) -> dict[str, Tensor]:
        pieces: dict[str, list[Tensor]] = {}
        for message in self._traffic.needed(self._me, action):
            pieces.setdefault(message.value.name, []).append(self._mail.take(message))
        return {name: joined(parts) for name, parts in pieces.items()}

    def _piece(
        self,
        message: Message,
        made: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
        rows: Rows,
    ) -> Tensor:
        """What a message carries; after a failure, zeros of the size that is waited for."""
        kind = message.value.kind
        tensor = made.get(message.value.name, inputs.get(message.value.name))
        if tensor is None:
            shape = kind.shape if kind.whole else (len(message.rows), *kind.shape)
            return torch.zeros(shape, dtype=dtype_named(kind.dtype), device=self._device)
        return tensor if kind.whole else tensor[message.rows.within(rows)]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Rows of several, in order; a single one as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


def output_names(table: Table, last: int) -> list[str]:
    """Those of what the last stage gives."""
    return [carried_name(last, index) for index in range(len(table.rehearsed[last].carried))]
