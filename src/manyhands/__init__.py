"""Train one PyTorch model with every machine you can reach."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from manyhands._version import __version__

if TYPE_CHECKING:
    from manyhands import data as data
    from manyhands.collectives.backend.hooks import compressed
    from manyhands.collectives.backend.script import group
    from manyhands.core.errors import (
        Excluded,
        LinkBroken,
        LinkError,
        LinkTimeout,
        ManyhandsError,
        PeerGone,
        Refused,
    )
    from manyhands.core.peers import PeerId, PeerState, View
    from manyhands.core.plan import Plan, PlanError
    from manyhands.links.base import Delivery, Gap, Link, LinkSettings, open_link
    from manyhands.links.hub import Hub
    from manyhands.links.messages import Gone, Leaving, Ready, Resign, Terms
    from manyhands.replica.options import RoundClosed
    from manyhands.replica.run import Run, join
    from manyhands.stages.cut import cut
    from manyhands.stages.dealing import partition
    from manyhands.stages.errors import PlanBroken, StepFailed
    from manyhands.stages.pipeline import Pipeline
    from manyhands.stages.variables import VariableError, pop, stash, variables
    from manyhands.trainer.trainer import Trainer

__all__ = [
    "Delivery",
    "Excluded",
    "Gap",
    "Gone",
    "Hub",
    "Leaving",
    "Link",
    "LinkBroken",
    "LinkError",
    "LinkSettings",
    "LinkTimeout",
    "ManyhandsError",
    "PeerGone",
    "PeerId",
    "PeerState",
    "Pipeline",
    "Plan",
    "PlanBroken",
    "PlanError",
    "Ready",
    "Refused",
    "Resign",
    "RoundClosed",
    "Run",
    "StepFailed",
    "Terms",
    "Trainer",
    "VariableError",
    "View",
    "__version__",
    "compressed",
    "cut",
    "group",
    "join",
    "open_link",
    "partition",
    "pop",
    "stash",
    "variables",
]

_ROOMS = frozenset({"data"})  # modules that are part of the public face, loaded at first use

# Loaded at first use, so that `import manyhands` is fast and loads no torch.
_LAZY = {
    "Refused": "manyhands.core.errors",
    "PeerGone": "manyhands.core.errors",
    "LinkTimeout": "manyhands.core.errors",
    "LinkError": "manyhands.core.errors",
    "LinkBroken": "manyhands.core.errors",
    "Excluded": "manyhands.core.errors",
    "Delivery": "manyhands.links.base",
    "Gap": "manyhands.links.base",
    "Gone": "manyhands.links.messages",
    "Hub": "manyhands.links.hub",
    "Leaving": "manyhands.links.messages",
    "Link": "manyhands.links.base",
    "LinkSettings": "manyhands.links.base",
    "ManyhandsError": "manyhands.core.errors",
    "PeerId": "manyhands.core.peers",
    "PeerState": "manyhands.core.peers",
    "Pipeline": "manyhands.stages.pipeline",
    "Plan": "manyhands.core.plan",
    "PlanBroken": "manyhands.stages.errors",
    "PlanError": "manyhands.core.plan",
    "Ready": "manyhands.links.messages",
    "Resign": "manyhands.links.messages",
    "RoundClosed": "manyhands.replica.session",
    "Run": "manyhands.replica.run",
    "StepFailed": "manyhands.stages.errors",
    "Terms": "manyhands.links.messages",
    "Trainer": "manyhands.trainer.trainer",
    "VariableError": "manyhands.stages.variables",
    "View": "manyhands.core.peers",
    "compressed": "manyhands.collectives.backend.hooks",
    "cut": "manyhands.stages.cut",
    "group": "manyhands.collectives.backend.script",
    "join": "manyhands.replica.run",
    "open_link": "manyhands.links.base",
    "partition": "manyhands.stages.dealing",
    "pop": "manyhands.stages.variables",
    "stash": "manyhands.stages.variables",
    "variables": "manyhands.stages.variables",
}


def __getattr__(name: str) -> object:
    if name in _ROOMS:
        return import_module(f"manyhands.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'manyhands' has no attribute {name!r}")
    value: object = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def _tell_torch() -> None:
    """If torch is loaded, it has looked for its backends already, perhaps before us."""
    if "torch.distributed" in sys.modules:
        from manyhands.collectives.backend.register import register

        register()


_tell_torch()


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_ROOMS})
