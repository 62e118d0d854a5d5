"""Cost: how much memory a layer will take, found without having it."""

from __future__ import annotations

import math

import torch
from torch import nn

from manyhands.core.errors import UsageError
from manyhands.stages.layers import Spec

_COPIES = 4  # of a trained parameter: itself, its gradient, and the two averages of Adam
_VALUE_BYTES = 4


def cost_of(spec: Spec, said: str) -> int:
    """Bytes of parameters, gradients, optimizer, buffers, and of its inputs as the shapes say.

    Raises UsageError, `said` first, when the class does not take these arguments.
    """
    try:
        module = _outline(spec)
    except (TypeError, ValueError, UsageError) as error:
        raise UsageError(f"{said} cannot be built with {dict(spec.kwargs)!r}: {error}") from error
    trained = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    fixed = sum(p.nbytes for p in module.parameters() if not p.requires_grad)
    buffers = sum(buffer.nbytes for buffer in module.buffers())
    inputs = sum(math.prod(shape) for shape in spec.shapes) * _VALUE_BYTES
    return _COPIES * trained + fixed + buffers + inputs


def _outline(spec: Spec) -> nn.Module:
    try:
        with torch.device("meta"):
            return spec.kind(**spec.kwargs)
    except (RuntimeError, NotImplementedError):
        # A constructor that looks at values needs some: for as long as they are counted.
        with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
            return spec.build()
