"""Cost: how much memory a layer will take, found without having it."""

from __future__ import annotations

import math

import torch
from torch import nn

from manyhands.core.errors import UsageError
from manyhands.planner.cost import LayerCost
from manyhands.stages.layers import Spec

_OPTIMIZER_TENSORS = 2  # for each parameter, as Adam has; which one will come is not known yet
_VALUE_BYTES = 4


def cost_of(spec: Spec, name: str) -> LayerCost:
    """What is there all the time, and its inputs as the shapes say; no times.

    Raises UsageError, `name` first, when the class does not take these arguments.
    """
    try:
        module = _outline(spec)
    except (TypeError, ValueError, UsageError) as error:
        raise UsageError(f"{name} cannot be built with {dict(spec.kwargs)!r}: {error}") from error
    parameters = list(module.parameters())
    trained = sum(p.nbytes for p in parameters if p.requires_grad)
    inputs = sum(math.prod(shape) for shape in spec.shapes) * _VALUE_BYTES
    return LayerCost(
        name=name,
        parameter_bytes=sum(t.nbytes for t in [*parameters, *module.buffers()]),
        gradient_bytes=trained,
        optimizer_bytes=_OPTIMIZER_TENSORS * trained,
        activation_bytes=inputs,
    )


def _outline(spec: Spec) -> nn.Module:
    try:
        return spec.outline()
    except (RuntimeError, NotImplementedError):
        # A constructor that looks at values needs some: for as long as they are counted.
        with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
            return spec.build()
