"""Rehearsal: the stages run once on zeros, so that all peers know what will cross between them.

Stage after stage, its first peer runs the layers on zeros of the right shape and tells everybody
what came out. What does not fit together is found here, by all peers alike, before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec
import torch
from torch import Tensor

from manyhands.core.errors import UsageError
from manyhands.core.plan import Plan, PlanError
from manyhands.stages.buffers import preserved
from manyhands.stages.carrier import Carrier
from manyhands.stages.chance import forked
from manyhands.stages.layers import Carried
from manyhands.stages.moves import rows_at, split_rows
from manyhands.stages.runner import Runner
from manyhands.stages.values import Given, Kind, Rehearsed, Table, tabulate
from manyhands.stages.variables import INPUTS, Scope, VariableError, scoped, version_of
from manyhands.stages.vote import sayable, words_of
from manyhands.wire.tensors import dtype_named


def rehearse(
    plan: Plan,
    runners: Mapping[int, Runner],
    carrier: Carrier,
    given: Given,
    num_rows: int,
    device: torch.device,
    *,
    unfit: UsageError | None = None,
) -> Table:
    """For a microbatch of so many rows. Raises PlanError or VariableError, on all peers alike.

    `unfit`: why this peer cannot say what it would do.
    """
    rehearsed: list[Rehearsed] = []
    known = dict(given.extra)
    givers = dict.fromkeys(known, INPUTS)
    carried, single = given.carried, given.single
    for stage in plan.stages:
        said = None
        if carrier.rank == stage.lead:
            shares = split_rows(num_rows, stage.split)
            rows = len(rows_at(stage, stage.lead, num_rows)) or max(map(len, shares))
            trial = _Trial(runners[stage.index], rows, device)
            did = trial.wrong(unfit) if unfit else trial.run(carried, single, known, givers)
            said = msgspec.msgpack.encode(did)
        did = msgspec.msgpack.decode(carrier.say(said, stage.lead), type=Rehearsed)
        if did.error is not None:
            kind = VariableError if did.wrong_variable else PlanError
            raise kind(did.error, hint=did.hint)
        rehearsed.append(did)
        known |= {name: kind for name, (kind, _) in did.stashed.items()}
        givers |= {name: who for name, (_, who) in did.stashed.items()}
        carried, single = did.carried, did.single
    return tabulate(plan, given, rehearsed)


class _Trial:
    """One stage, on zeros."""

    def __init__(self, runner: Runner, rows: int, device: torch.device) -> None:
        self._runner, self._rows, self._device = runner, rows, device
        self._at = runner.layers[0].said

    def run(
        self,
        carried: tuple[Kind, ...],
        single: bool,
        known: Mapping[str, Kind],
        givers: Mapping[str, str],
    ) -> Rehearsed:
        """What came out, or what is wrong: a result either way, for everybody to hear."""
        with preserved(self._runner.modules()), forked(self._device):
            try:
                return self._attempt(carried, single, known, givers, copied=False)
            except Exception as error:  # noqa: BLE001  (told to everybody)
                if not isinstance(error, RuntimeError) or "in-place" not in words_of(error):
                    return self.wrong(error)
            try:  # a layer writes into what it is given, which is not its own
                return self._attempt(carried, single, known, givers, copied=True)
            except Exception as error:  # noqa: BLE001  (told to everybody)
                return self.wrong(error)

    def _attempt(
        self,
        carried: tuple[Kind, ...],
        single: bool,
        known: Mapping[str, Kind],
        givers: Mapping[str, str],
        *,
        copied: bool,
    ) -> Rehearsed:
        given: list[tuple[Tensor, int]] = []  # with the version that it has when it is given

        def zeros(kind: Kind) -> Tensor:
            shape = kind.shape if kind.whole else (self._rows, *kind.shape)
            made = torch.zeros(shape, dtype=dtype_named(kind.dtype), device=self._device)
            made.requires_grad_(kind.grad and torch.is_grad_enabled())
            given.append((made.clone() if copied else made, version_of(made)))
            return given[-1][0]

        def maker(kind: Kind) -> Callable[[], Tensor]:
            return lambda: zeros(kind)

        scope = Scope()
        scope.values = _Lazy({name: maker(kind) for name, kind in known.items()})
        scope.stashed = dict(givers)
        parts = tuple(zeros(kind) for kind in carried)
        now: Carried = parts[0] if single else parts
        with scoped(scope):
            for layer in self._runner.layers:
                self._at = layer.said
                now = layer.run(now, scope)
        scope.check()
        parts = now if isinstance(now, tuple) else (now,)
        return Rehearsed(
            carried=tuple(self._kind_of(part, f"{self._at} returned") for part in parts),
            single=not isinstance(now, tuple),
            stashed={
                name: (self._stashed(scope, name, who), who)
                for name, who in scope.stashed.items()
                if name not in givers
            },
            popped=tuple(scope.popped),
            copied=copied or any(version_of(tensor) != version for tensor, version in given),
        )

    def _stashed(self, scope: Scope, name: str, who: str) -> Kind:
        said = f"{who} stashed as {name!r}"
        return self._kind_of(scope.values[name], said, whole=name in scope.whole)

    def _kind_of(self, tensor: Tensor, said: str, *, whole: bool = False) -> Kind:
        if not whole and (tensor.dim() == 0 or len(tensor) != self._rows):
            raise PlanError(
                f"{said} a tensor of shape {tuple(tensor.shape)} for {self._rows} rows",
                hint="dimension 0 of what crosses between layers are the rows of the batch; a "
                "variable that belongs to all of them is stashed with whole=True",
            )
        return kind_of(tensor, whole=whole)

    def wrong(self, error: Exception) -> Rehearsed:
        """For everybody to hear."""
        if isinstance(error, UsageError):
            wrong_variable = isinstance(error, VariableError)
            hint = error.hint and sayable(error.hint)
            message = sayable(error.message)
            return Rehearsed(error=message, hint=hint, wrong_variable=wrong_variable)
        return Rehearsed(
            error=f"{self._at} cannot take what it is given: {words_of(error)}",
            hint="compare what the layer before gives with what this one expects",
        )


def kind_of(tensor: Tensor, *, whole: bool = False) -> Kind:
    """What it is like."""
    return Kind(
        tuple(tensor.shape if whole else tensor.shape[1:]),
        str(tensor.dtype).removeprefix("torch."),
        tensor.requires_grad,
        whole,
    )


class _Lazy(dict[str, Any]):
    """Tensors that are made when they are asked for."""

    def __getitem__(self, name: str) -> Tensor:
        value = super().__getitem__(name)
        if not isinstance(value, Tensor):
            value = self[name] = cast("Callable[[], Tensor]", value)()
        return value
