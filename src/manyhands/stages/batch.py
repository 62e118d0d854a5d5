"""Batch: what a step is about, as all peers agree on it, and this peer's rows of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import msgspec
import torch
from torch import Tensor

from manyhands.core.errors import UsageError
from manyhands.stages.errors import PlanBroken
from manyhands.stages.moves import cut_batch
from manyhands.stages.rehearsal import kind_of
from manyhands.stages.values import Given, Kind, carried_name, target_name
from manyhands.stages.variables import INPUTS, check_name

Tensors = Tensor | Sequence[Tensor]
_GIVE = "pass them to step() on every peer of the first stage; others may, and ignore them"


Call = Literal["step", "evaluate", "predict", "forward"]


class Mode(msgspec.Struct, frozen=True):
    """In which call a peer is, and how it computes."""

    call: Call
    training: bool
    precision: str | None = None  # the type to which autocast casts, if it is on

    def __str__(self) -> str:
        return f"{self.call}() in {'training' if self.training else 'evaluation'} mode"


class Opening(msgspec.Struct, frozen=True):
    """What the first peer of the first stage says of a step, before it."""

    mode: Mode
    num_rows: int
    given: Given
    error: str | None = None
    hint: str | None = None


def opening_of(
    mode: Mode,
    inputs: Tensors | None,
    extra: Mapping[str, Tensor] | None,
    targets: Tensors | None,
) -> Opening:
    """Of what this peer was given; what is wrong with it is for everybody to hear."""
    nothing = Given((), True, ())
    if inputs is None:
        said = "the first peer of the first stage was given no inputs"
        return Opening(mode, 0, nothing, said, _GIVE)
    try:
        carried, single = _parts("the input", inputs)
        wanted, single_target = ((), True) if targets is None else _parts("the target", targets)
        _check_extra(extra)
        num_rows = _count("the input", carried[0])
        _check_rows("the input", carried[1:], num_rows)
        _check_rows("the target", wanted, num_rows)
        for name, tensor in (extra or {}).items():
            _check_rows(f"extra input {name!r}", (tensor,), num_rows)
    except UsageError as error:
        return Opening(mode, 0, nothing, error.message, error.hint)
    given = Given(
        tuple(map(_kind_of, carried)),
        single,
        tuple((name, _kind_of(tensor)) for name, tensor in (extra or {}).items()),
        tuple(map(_kind_of, wanted)),
        single_target,
    )
    return Opening(mode, num_rows, given)


def heard(words: bytes, lead: str, mode: Mode) -> Opening:
    """What that peer said. Raises PlanBroken if it is no opening: the peer is somewhere else."""
    try:
        return msgspec.msgpack.decode(words, type=Opening)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise PlanBroken(
            f"peer {lead} does not begin a step, this one is in {mode}: all peers make the same "
            "calls, save() and load() too"
        ) from None


def _kind_of(tensor: Tensor) -> Kind:
    """Of what a user gives: no gradient goes back to it."""
    kind = kind_of(tensor)
    return Kind(kind.shape, kind.dtype) if kind.grad else kind


def _check_rows(what: str, tensors: Sequence[Tensor], num_rows: int) -> None:
    for tensor in tensors:
        if (count := _count(what, tensor)) != num_rows:
            raise UsageError(
                f"{what} has {count} rows, the input {num_rows}",
                hint="dimension 0 of each are the rows of one batch",
            )


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
        check_name(name, INPUTS)
        if not isinstance(given, Tensor):
            raise UsageError(
                f"extra input {name!r} is a {type(given).__name__}", hint="each is a tensor"
            )


def _count(what: str, tensor: Tensor) -> int:
    if tensor.dim() == 0 or len(tensor) == 0:
        raise UsageError(
            f"{what} is a tensor of shape {tuple(tensor.shape)}: it has no rows",
            hint="dimension 0 are the rows, at least one",
        )
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
        self.rows = tuple(map(len, self.microbatches))  # how many each of them has
        self._given = opening.given
        self._inputs, self._extra, self._targets = inputs, extra, targets
        self._checked_inputs: dict[str, Tensor] | None = None
        self._checked_targets: dict[str, Tensor] | None = None
        self.single_target = targets is None or isinstance(targets, Tensor)

    def inputs(self, span: slice) -> dict[str, Tensor]:
        """These rows, by name, for the first stage. Raises UsageError."""
        if self._checked_inputs is None:
            self._checked_inputs = self._named_inputs()
        return self._cut(self._checked_inputs, span)

    def targets(self, span: slice) -> dict[str, Tensor]:
        """These rows, by name, for whoever has them. Raises UsageError."""
        if self._checked_targets is None:
            self._checked_targets = self._named_targets()
        return self._cut(self._checked_targets, span)

    def _named_inputs(self) -> dict[str, Tensor]:
        if self._inputs is None:
            raise UsageError("this peer is in the first stage and was given no inputs", hint=_GIVE)
        parts, _ = _parts("the input", self._inputs)
        wanted = [name for name, _ in self._given.extra]
        if len(parts) != len(self._given.carried) or sorted(self._extra or {}) != sorted(wanted):
            raise UsageError(
                "this peer was given other inputs than the first one of its stage",
                hint="every peer of the first stage passes the whole batch to step()",
            )
        kinds = [(carried_name(-1, index), kind) for index, kind in enumerate(self._given.carried)]
        named = named_inputs(parts, self._extra)
        return self._checked("input", named, dict([*kinds, *self._given.extra]))

    def _named_targets(self) -> dict[str, Tensor]:
        parts = () if self._targets is None else _parts("the target", self._targets)[0]
        if len(parts) < len(self._given.targets):
            raise UsageError(
                "this peer was given other targets than the first one of its stage",
                hint="every peer of the first stage passes the whole batch to step()",
            )
        kinds = {target_name(index): kind for index, kind in enumerate(self._given.targets)}
        return self._checked("target", named_targets(parts), kinds)

    def _checked(
        self, what: str, tensors: dict[str, Tensor], kinds: Mapping[str, Kind]
    ) -> dict[str, Tensor]:
        """`kinds` as the first peer of the first stage said."""
        for name, tensor in tensors.items():
            said = f"the {what}" if name.startswith("#") else f"extra input {name!r}"
            kind = kinds.get(name)
            if tensor.dim() == 0 or len(tensor) != self.num_rows:
                raise UsageError(
                    f"{said} has shape {tuple(tensor.shape)} where the batch has {self.num_rows} "
                    "rows",
                    hint="every peer that passes tensors to a step passes a whole batch, the same",
                )
            if kind is not None and kind != _kind_of(tensor):
                raise UsageError(
                    f"{said} is {_kind_of(tensor)} here and {kind} at the first peer of the first "
                    "stage",
                    hint="every peer of a stage passes tensors of the same dtype and shape",
                )
        return tensors

    def _cut(self, tensors: Mapping[str, Tensor], span: slice) -> dict[str, Tensor]:
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
