"""Step: one batch through a plan, as one peer sees it: its duties in order, each with its mail.

If a layer raises, this peer goes on sending and receiving, with zeros: nobody waits for a peer that
has given up, and all hear at the vote what went wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal, cast

import torch
from torch import Tensor

from manyhands.core.errors import UsageError
from manyhands.stages.batch import Batch
from manyhands.stages.chance import forked
from manyhands.stages.course import Course, Duty
from manyhands.stages.mail import Mail
from manyhands.stages.moves import Rows
from manyhands.stages.runner import LOSS, Runner, Seeds
from manyhands.stages.schedule import Action
from manyhands.stages.traffic import Message
from manyhands.stages.vote import Failure, failure_of
from manyhands.wire.tensors import dtype_named

LossFn = Callable[[Any, Any], Any]
"""From the output and the targets of some rows to their loss; or, counted, to (sum, count)."""

LossIs = Literal["mean", "sum", "counted"]
"""The mean over the rows; a sum, added up as it is; (a sum, how many it is over)."""

_ONE_NUMBER = "a loss function returns one number, a tensor"
_TWO_NUMBERS = 'with loss_is="counted" a loss function returns (the sum, how many it is over)'
_AHEAD = 3  # actions whose inputs are asked for while an action runs


class Step:
    """One batch. `loss` and `count` are this peer's parts of sums, `failure` is its first error."""

    def __init__(
        self,
        course: Course,
        runners: Mapping[int, Runner],
        mail: Mail,
        batch: Batch,
        *,
        loss_fn: LossFn | None = None,
        loss_is: LossIs = "mean",
        seeds: tuple[int, int] | None = None,
        device: torch.device,
    ) -> None:
        self._course, self._table, self._last = course, course.table, course.last
        self._runners, self._mail = runners, mail
        self._batch, self._loss_fn, self._loss_is = batch, loss_fn, loss_is
        self._seeds, self._device = seeds, device
        self._losses: list[Tensor] = []
        self._counts: dict[int, Tensor | float] = {}  # by microbatch
        self.has_loss = loss_fn is not None
        self.failure: Failure | None = None
        self._outputs: dict[int, Mapping[str, Tensor]] = {}  # of the last stage, by microbatch

    @property
    def loss(self) -> float:
        """The sum of this peer's losses, as scaled."""
        return float(torch.stack(self._losses).sum()) if self._losses else 0.0

    @property
    def count(self) -> float:
        """What this peer's losses are sums over, together."""
        return sum(map(float, self._counts.values()))

    def run(
        self,
        duties: Sequence[Duty],
        gradients: tuple[Tensor, ...] | None = None,
    ) -> None:
        """In this order. `gradients` of what `output` gave, where no loss gives them.

        Raises what the carrier raises; what layers raise is a failure.
        """
        with nullcontext() if self._seeds is None else forked(self._device):
            for index, duty in enumerate(duties):
                if self._course.places:
                    self._mail.expect(duties[index : index + 1 + _AHEAD])
                if duty.action.direction == "F":
                    self._forward(duty)
                else:
                    self._backward(duty, gradients)

    def fail(self, error: Exception, action: Action | None) -> None:
        """Note the first error."""
        if self.failure is None:
            at = "before the step" if action is None else f"in {self._course.said(action)}"
            self.failure = failure_of(error, action, at)

    def output(self) -> Tensor | tuple[Tensor, ...] | None:
        """What the last stage gave, this peer's rows of all microbatches; None if it has none."""
        if not self._outputs:
            return None
        made = self._outputs.values()
        parts = tuple(joined([of[name] for of in made]) for name in self._course.output_names())
        return parts[0] if self._table.rehearsed[self._last].single else parts

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        self._mail.finish()

    # -- forward ----------------------------------------------------------------------------------

    def _forward(self, duty: Duty) -> None:
        inputs = self._collect(duty) if duty.needed else {}
        made: Mapping[str, Tensor] = {}
        if self.failure is None:
            try:
                made = self._compute(duty, inputs)
            except Exception as error:  # noqa: BLE001  (told to everybody at the vote)
                self.fail(error, duty.action)
        for message in duty.sent:
            self._mail.put(message, self._piece(message, made, inputs, duty.rows))

    def _compute(self, duty: Duty, inputs: dict[str, Tensor]) -> Mapping[str, Tensor]:
        _, stage, microbatch = duty.action
        if stage == 0:
            inputs |= self._batch.inputs(duty.span)
            if self._table.targets:
                inputs |= self._batch.targets(duty.span)
        given, finish = inputs, None
        if stage == self._last and self._loss_fn is not None:
            targets = self._targets(duty.span, inputs)
            finish = self._finish(self._loss_fn, tuple(targets.values()), duty)
            if self._table.targets:  # they are the loss's, not the layers'
                given = {name: t for name, t in inputs.items() if name not in targets}
        seeds = None
        if self._seeds is not None:
            seeds = Seeds(*self._seeds, microbatch, duty.rows.start)
        made = self._runners[stage].forward(
            microbatch, given, self._table, seeds=seeds, finish=finish
        )
        if stage == self._last:
            if finish is not None:
                self._losses.append(made[LOSS])
            else:
                self._outputs[microbatch] = made
        return made

    def _targets(self, span: slice, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self._table.targets:
            return {name: inputs[name] for name in self._table.targets}
        targets = self._batch.targets(span)
        if not targets:
            raise UsageError(
                "this peer computes the loss and was given no targets",
                hint="pass them to step() on the peers of the last stage, or say "
                'targets="first" and pass them with the inputs',
            )
        return targets

    def _finish(
        self, loss_fn: LossFn, targets: tuple[Tensor, ...], duty: Duty
    ) -> Callable[[Any], Tensor]:
        given = self._table.given
        single = given.single_target if given.targets else self._batch.single_target
        wanted = targets[0] if single else targets
        factor = len(duty.rows) / self._batch.num_rows if self._loss_is == "mean" else 1.0

        def finish(output: Any) -> Tensor:  # noqa: ANN401
            loss, count = loss_fn(output, wanted), None
            if self._loss_is == "counted":
                loss, count = _counted(loss)
                # A stage that is computed anew comes here twice, and counts once.
                self._counts[duty.action.microbatch] = count
            loss = _number(loss)
            if torch.is_grad_enabled() and not loss.requires_grad:
                _check_cut_off(output, count)
            return loss * factor

        return finish

    # -- backward ---------------------------------------------------------------------------------

    def _backward(self, duty: Duty, gradients: tuple[Tensor, ...] | None) -> None:
        _, stage, microbatch = duty.action
        wanted = self._sums(duty) if duty.needed else {}
        made: Mapping[str, Tensor] = {}
        if self.failure is None:
            try:
                if stage == self._last and gradients is not None:
                    wanted |= self._cut(microbatch, gradients)
                made = self._runners[stage].backward(microbatch, wanted, self._table)
            except Exception as error:  # noqa: BLE001  (told to everybody at the vote)
                self.fail(error, duty.action)
        for message in duty.sent:
            self._mail.put(message, self._piece(message, made, {}, duty.rows))

    def _cut(self, microbatch: int, gradients: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """A microbatch's rows of them, by name. Raises UsageError."""
        names, span = self._course.output_names(), self._course.output_spans[microbatch]
        if len(gradients) != len(names):
            raise UsageError(
                f"{len(gradients)} gradients for {len(names)} outputs",
                hint="give backward() one for each tensor that forward() returned",
            )
        parts = zip(names, gradients, strict=True)
        return {name: gradient[span].to(self._device) for name, gradient in parts}

    def _sums(self, duty: Duty) -> dict[str, Tensor]:
        """Gradients of a stage's outputs: those of all consumers, in order, added up."""
        pieces: dict[tuple[str, int], list[Tensor]] = {}
        whole: set[str] = set()
        for message in duty.needed:
            name = message.value.name
            pieces.setdefault((name, message.consumer), []).append(self._mail.take(message))
            if message.value.kind.whole:
                whole.add(name)
        sums: dict[str, Tensor] = {}
        for (name, _), parts in pieces.items():
            if name in whole:
                total = parts[0]
                for part in parts[1:]:
                    total = total + part
            else:
                total = joined(parts)
            before = sums.get(name)
            sums[name] = total if before is None else before + total
        return sums

    # -- mail -------------------------------------------------------------------------------------

    def _collect(self, duty: Duty) -> dict[str, Tensor]:
        pieces: dict[str, list[Tensor]] = {}
        for message in duty.needed:
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


def check_count(count: float) -> None:
    """Of a counted loss, over all peers, who have added up the same. Raises UsageError."""
    if not count > 0:
        raise UsageError(
            f"the loss of this batch is over {count:g}: there is nothing to average over",
            hint="leave out batches in which nothing counts",
        )


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Rows of several, in order; a single one as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


def _number(loss: Any) -> Tensor:  # noqa: ANN401  (what a user's function returned)
    """The loss as a tensor without dimensions. Raises UsageError."""
    if not isinstance(loss, Tensor):
        raise UsageError(f"the loss is {loss!r:.200}", hint=_ONE_NUMBER)
    if loss.dim() == 0:
        return loss
    if loss.numel() != 1:
        raise UsageError(f"the loss has shape {tuple(loss.shape)}", hint=_ONE_NUMBER)
    return loss.reshape(())


def _check_cut_off(output: Any, count: Tensor | float | None) -> None:  # noqa: ANN401
    """Of a loss without a gradient: raises UsageError where one was there to be had."""
    parts = cast("tuple[Tensor, ...]", output if isinstance(output, tuple) else (output,))
    nothing = count is not None and not float(count)  # then any zero will do
    if any(part.requires_grad for part in parts) and not nothing:
        raise UsageError(
            "the loss has no gradient, and nothing would be learned",
            hint="compute it of the output by operations of torch: no detach(), item(), no_grad()",
        )


def _counted(made: Any) -> tuple[Any, Tensor | float]:  # noqa: ANN401  (what a user returned)
    """A sum, and what it is over: a number that nobody has to wait for yet. Raises UsageError."""
    pair = cast("tuple[Any, ...]", made) if isinstance(made, tuple) else ()
    if len(pair) != 2:
        raise UsageError(f"the loss is {made!r:.200}", hint=_TWO_NUMBERS)
    loss, count = pair
    if isinstance(count, Tensor) and count.numel() == 1:
        return loss, count.detach()
    if isinstance(count, int | float):
        return loss, count
    raise UsageError(f"the loss is over {count!r:.200}", hint=_TWO_NUMBERS)
