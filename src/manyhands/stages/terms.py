"""Terms: what all peers of a plan must have said alike, compared before anything is sent.

Peers that hold different plans would wait for messages that nobody sends.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import msgspec
from torch import nn

from manyhands.core.errors import UsageError
from manyhands.core.plan import Plan, PlanError, Stage
from manyhands.stages.carrier import Carrier
from manyhands.stages.vote import together

_ALIKE = "all peers run the same program: give each the same model, plan and options"

Form = tuple[str, tuple[int, ...], str, bool]
"""A parameter or buffer: its name, shape and dtype, and whether it is trained."""


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What a Pipeline is made with, as far as it must be the same everywhere."""

    plan: str
    loss_fn: bool
    optimizer: bool
    targets: str
    loss_is: str
    clip_norm: float | None
    seed: int | None

    def __post_init__(self) -> None:
        clip, seed = self.clip_norm, self.seed
        # Types too: they are told to all peers, as JSON.
        if clip is not None and not (type(clip) in (int, float) and 0 < clip < math.inf):
            raise UsageError(f"clip_norm={clip!r:.100}", hint="a number above 0, or None")
        if seed is not None and not (type(seed) is int and -(1 << 63) <= seed < 1 << 63):
            raise UsageError(f"seed={seed!r:.100}", hint="an int of 64 bits, or None")


def agree(carrier: Carrier, plan: Plan, own: Terms) -> None:
    """Raises UsageError or PlanError where terms are others than the first peer's, StepFailed on
    all other peers.
    """
    said = carrier.say(msgspec.json.encode(own) if carrier.rank == 0 else None, 0)
    first = msgspec.json.decode(said, type=Terms)

    def compare() -> None:
        _check_size(plan, carrier.size)
        for name in Terms.__struct_fields__:
            here, there = getattr(own, name), getattr(first, name)
            if here == there:
                continue
            if name == "plan":
                there_plan = Plan.from_json(there)
                raise PlanError(
                    f"the first peer has another plan: {_difference(plan, there_plan)}", hint=_ALIKE
                )
            raise UsageError(
                f"the first peer has {_said(name, there)}, this one {_said(name, here)}",
                hint=_ALIKE,
            )

    # Names are those of the plan, which is not agreed yet.
    together(carrier, tuple(map(str, range(carrier.size))), compare)


def agree_forms(
    carrier: Carrier, plan: Plan, stages: Iterable[tuple[Stage, Iterable[nn.Module]]]
) -> None:
    """That peers of these stages have the same parameters and buffers: they are added up.

    All peers call it, those of other stages with no modules. Raises as `agree` does.
    """
    found: list[tuple[Stage, list[Form], list[Form]]] = []
    for stage, modules in stages:
        own = [form for module in modules for form in _forms(module)]
        said = msgspec.json.encode(own) if carrier.rank == stage.lead else None
        first = msgspec.json.decode(carrier.say(said, stage.lead), type=list[Form])
        if carrier.rank in stage.peers:
            found.append((stage, own, first))

    def compare() -> None:
        for stage, own, first in found:
            if own != first:
                differ = next(
                    (pair for pair in zip(own, first, strict=False) if pair[0] != pair[1]), None
                )
                what = f"{differ[0]} and {differ[1]}" if differ else f"{len(own)} and {len(first)}"
                raise PlanError(
                    f"layers {plan.layers[stage.first].name} to {plan.layers[stage.end - 1].name} "
                    f"have other parameters here than on peer {plan.peers[stage.lead]}: {what}",
                    layer=stage.first,
                    hint=_ALIKE,
                )

    together(carrier, plan.peers, compare)


def _forms(module: nn.Module) -> Iterable[Form]:
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        dtype = str(tensor.dtype).removeprefix("torch.")
        yield name, tuple(tensor.shape), dtype, tensor.requires_grad


def _said(name: str, value: Any) -> str:  # noqa: ANN401
    if isinstance(value, bool):
        return f"{name} given" if value else f"no {name}"
    return f"{name}={value!r}"


def _difference(here: Plan, there: Plan) -> str:
    for index, (own, other) in enumerate(zip(here.layers, there.layers, strict=False)):
        if own != other:
            return (
                f"layer {index} is {other.name} on {list(other.peers)} there, "
                f"{own.name} on {list(own.peers)} here"
            )
    for name in ("microbatches", "schedule", "recompute", "peers"):
        if getattr(here, name) != getattr(there, name):
            return f"{name} is {getattr(there, name)!r} there, {getattr(here, name)!r} here"
    return f"{len(there.layers)} layers there, {len(here.layers)} here"


def _check_size(plan: Plan, size: int) -> None:
    if len(plan.peers) != size:
        raise PlanError(
            f"the plan is for {len(plan.peers)} peers, the group has {size}",
            hint="make a plan for the peers that are here"
            if size > 1
            else "call torch.distributed.init_process_group first",
        )


def check_choice(name: str, given: str, known: tuple[str, ...]) -> None:
    """Raises UsageError for what is not among them."""
    if given not in known:
        raise UsageError(f"{name}={given!r}", hint=f"there are: {', '.join(map(repr, known))}")
