"""Cost: what a layer takes, what a peer can give. Plain values that can be written as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite

import msgspec

from manyhands.core.plan import PlanError

VERSION = 1


class Variable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A named tensor that a layer gives to later ones, or takes, for one microbatch."""

    name: str
    num_bytes: int
    kept: bool = False  # it is among what the layer keeps for its backward, and counted there


class LayerCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one layer takes; times and activations are those of one microbatch."""

    name: str
    forward_s: float = 0.0
    backward_s: float = 0.0
    parameter_bytes: int = 0  # buffers too
    gradient_bytes: int | None = None  # None: as many as parameters; a frozen layer has none
    optimizer_bytes: int = 0
    activation_bytes: int = 0  # what is kept from its forward to its backward
    output_bytes: int = 0
    input_bytes: int = 0  # of the first layer; what enters a later one is the output before it
    gives: tuple[Variable, ...] = ()
    takes: tuple[Variable, ...] = ()  # extra inputs too

    def __post_init__(self) -> None:
        numbers = [(field, getattr(self, field)) for field in _NUMBERS]
        crossing = (*self.gives, *self.takes)
        for field, value in [*numbers, *((v.name, v.num_bytes) for v in crossing)]:
            if value is not None and not (isfinite(value) and value >= 0):
                raise PlanError(f"layer {self.name} has {field}={value}", hint="expected >= 0")

    @property
    def time_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s

    @property
    def state_bytes(self) -> int:
        """What is there all the time: parameters, gradients, the optimizer's tensors."""
        gradients = self.parameter_bytes if self.gradient_bytes is None else self.gradient_bytes
        return self.parameter_bytes + gradients + self.optimizer_bytes


_NUMBERS = [f for f in LayerCost.__struct_fields__ if f not in ("name", "gives", "takes")]


class PeerPower(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one peer can give. A peer of speed 2 takes half the time that the costs say."""

    name: str
    memory_bytes: int | None = None  # free ones; None: as many as are asked for
    speed: float = 1.0

    def __post_init__(self) -> None:
        if self.memory_bytes is not None and self.memory_bytes < 0:
            raise PlanError(
                f"peer {self.name} has {self.memory_bytes} bytes of free memory",
                hint="0 or more; None: as many as are asked for",
            )
        if not (isfinite(self.speed) and self.speed > 0):
            raise PlanError(f"peer {self.name} has a speed of {self.speed}", hint="1 is the usual")


class _Version(msgspec.Struct):
    manyhands_profile: int


class _Written(msgspec.Struct, forbid_unknown_fields=True):
    manyhands_profile: int
    layers: tuple[LayerCost, ...]


def write_costs(costs: Iterable[LayerCost]) -> str:
    """As JSON; `read_costs` gives equal ones back."""
    return msgspec.json.encode(_Written(VERSION, tuple(costs))).decode()


def read_costs(text: str | bytes) -> tuple[LayerCost, ...]:
    """Raises PlanError for what is no profile, or one that a newer release wrote."""
    try:
        version = msgspec.json.decode(text, type=_Version).manyhands_profile
        if version > VERSION:
            raise PlanError(
                f"this profile is of format {version}, this release reads up to {VERSION}",
                hint="update manyhands, or measure the layers again",
            )
        return msgspec.json.decode(text, type=_Written).layers
    except (msgspec.DecodeError, UnicodeError, OverflowError, RecursionError) as error:
        raise PlanError(
            f"this is no profile: {str(error)[:400]}",
            hint="what write_costs gives is expected, unchanged and whole",
        ) from None
