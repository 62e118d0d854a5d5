"""Batch: what a step is about, as all peers agree on it, and this peer's rows of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import msgspec
import torch
from torch import Tensor

from manyhands.core.errors import UsageError
from manyhands.stages.moves import Rows, cut_batch
from manyhands.stages.rehearsal import kind_of
from manyhands.stages.values import Given, carried_name, target_name

Tensors = Tensor | Sequence[Tensor]
_GIVE = "pass them to step() on every peer of the first stage; others may, and ignore them"


Call = Literal["step", "evaluate", "predict", "forward"]


class Opening(msgspec.Struct, frozen=True):
    """What the first peer of the first stage says of a step, before it; which call it is in."""

    call: Call
    training: bool
    num_rows: int
    given: Given
    error: str | None = None
    hint: str | None = None


def opening_of(
    call: Call,
    training: bool,
    inputs: Tensors | None,
    extra: Mapping[str, Tensor] | None,
    targets: Tensors | None,
) -> Opening:
    """Of what this peer was given; what is wrong with it is for everybody to hear."""
    nothing = Given((), True, ())
    if inputs is None:
        return Opening(
            call,
            training,
            0,
            nothing,
            "the first peer of the first stage was given no inputs",
            _GIVE,
        )
    try:
        carried, single = _parts("the input", inputs)
        wanted, single_target = ((), True) if targets is None else _parts("the target", targets)
        _check_extra(extra)
        num_rows = _count("the input", carried[0])
        for what, tensor in [
            *(("the input", part) for part in carried),
            *(("the target", part) for part in wanted),
            *((f"extra input {name!r}", part) for name, part in (extra or {}).items()),
        ]:
            if (count := _count(what, tensor)) != num_rows:
                raise UsageError(f"{what} has {count} rows, the input {num_rows}")
    except UsageError as error:
        return Opening(call, training, 0, nothing, error.message, error.hint)
    kinds = [kind_of(part.detach()) for part in carried]
    given = Given(
        tuple(kinds),
        single,
        tuple((name, kind_of(tensor.detach())) for name, tensor in (extra or {}).items()),
        tuple(kind_of(part.detach()) for part in wanted),
        single_target,
    )
    return Opening(call, training, num_rows, given)


def _parts(what: str, given: Any) -> tuple[tuple[Tensor, ...], bool]:  # noqa: ANN401
    if isinstance(given, Tensor):
        return (given,), True
    items = cast("Sequence[Any]", given) if isinstance(given, tuple | list) else ()
    parts = tuple(items)
    if not parts or not all(isinstance(part, Tensor) for part in parts):
        raise UsageError(
            f"{what} is a {type(cast('object', given)).__name__}",
            hint="a tensor, or a tuple of tensors",
        )
    return cast("tuple[Tensor, ...]", parts), False


def _check_extra(extra: object) -> None:
    if extra is not None and not isinstance(extra, Mapping):
        raise UsageError(
            f"the extra inputs are a {type(extra).__name__}", hint="a dict of tensors by name"
        )
    for name, given in cast("Mapping[str, Any]", extra or {}).items():
        if not isinstance(given, Tensor):
            raise UsageError(
                f"extra input {name!r} is a {type(given).__name__}", hint="each is a tensor"
            )


def _count(what: str, tensor: Tensor) -> int:
    if tensor.dim() == 0 or len(tensor) == 0:
        raise UsageError(f"{what} is a tensor of shape {tuple(tensor.shape)}: it has no rows")
    return len(tensor)


class Batch:
    """The tensors that this peer was given, a microbatch's rows at a time.

    They are looked at when they are needed: what is wrong with them is a failure of the step.
    """

    def __init__(
        self,
        opening: Opening,
        num_microbatches: int,
        inputs: Tensors | None,
        extra: Mapping[str, Tensor] | None,
        targets: Tensors | None,
        device: torch.device,
    ) -> None:
        self._device = device
        self.num_rows = opening.num_rows
        self.microbatches = cut_batch(opening.num_rows, num_microbatches)
        self._given = opening.given
        self._inputs, self._extra, self._targets = inputs, extra, targets
        self.single_target = targets is None or isinstance(targets, Tensor)

    @property
    def rows(self) -> tuple[int, ...]:
        """How many each microbatch has."""
        return tuple(len(span) for span in self.microbatches)

    def inputs(self, microbatch: int, rows: Rows) -> dict[str, Tensor]:
        """By name, for the first stage. Raises UsageError."""
        if self._inputs is None:
            raise UsageError("this peer is in the first stage and was given no inputs", hint=_GIVE)
        parts, _ = _parts("the input", self._inputs)
        wanted = [name for name, _ in self._given.extra]
        if len(parts) != len(self._given.carried) or sorted(self._extra or {}) != sorted(wanted):
            raise UsageError(
                "this peer was given other inputs than the first one of its stage",
                hint="every peer of the first stage passes the whole batch to step()",
            )
        return self._cut("input", named_inputs(parts, self._extra), microbatch, rows)

    def targets(self, microbatch: int, rows: Rows) -> dict[str, Tensor]:
        """By name, for whoever has them. Raises UsageError."""
        if self._targets is None:
            return {}
        parts, _ = _parts("the target", self._targets)
        return self._cut("target", named_targets(parts), microbatch, rows)

    def _cut(
        self, what: str, tensors: Mapping[str, Tensor], microbatch: int, rows: Rows
    ) -> dict[str, Tensor]:
        for name, tensor in tensors.items():
            if tensor.dim() == 0 or len(tensor) != self.num_rows:
                said = f"the {what}" if name.startswith("#") else f"extra input {name!r}"
                raise UsageError(
                    f"{said} has shape {tuple(tensor.shape)} where the batch has {self.num_rows} "
                    "rows",
                    hint="every peer that passes tensors to a step passes a whole batch, the same",
                )
        start = self.microbatches[microbatch].start
        span = slice(start + rows.start, start + rows.end)
        return {name: tensor[span].to(self._device) for name, tensor in tensors.items()}


def named_inputs(inputs: Tensors | None, extra: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """As the first stage takes them."""
    if inputs is None:
        return {}
    parts = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    named = {carried_name(-1, index): part for index, part in enumerate(parts)}
    return {name: tensor.detach() for name, tensor in {**named, **(extra or {})}.items()}


def named_targets(targets: Tensors | None) -> dict[str, Tensor]:
    """As the loss takes them."""
    if targets is None:
        return {}
    parts = (targets,) if isinstance(targets, Tensor) else tuple(targets)
    return {target_name(index): part.detach() for index, part in enumerate(parts)}
