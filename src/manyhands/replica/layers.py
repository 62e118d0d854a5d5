"""Layers: those whose output for a sample depends on more than the sample."""

from __future__ import annotations

import logging

from torch.nn import Module, MultiheadAttention, RNNBase, RReLU
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage]

log = logging.getLogger(__name__)


def warn_of_chance(model: Module) -> None:
    """Say which layers of a model, trained without grains, see their batch or chance."""
    found = {type(module).__name__ for module in model.modules() if _sees(module)}
    if found:
        log.warning(
            "%s see their batch or chance: without grain_size=N the run is the same at any "
            "number of peers only statistically",
            ", ".join(sorted(found)),
        )


def _sees(module: Module) -> bool:
    """Some draw only if they are told to drop anything."""
    if isinstance(module, RNNBase | MultiheadAttention):
        return module.dropout > 0
    return isinstance(module, _BatchNorm | _DropoutNd | RReLU)


def least_rows(model: Module) -> int:
    """Samples that it needs of a batch that is to have more: one has no variance."""
    return 2 if any(isinstance(module, _BatchNorm) for module in model.modules()) else 1
