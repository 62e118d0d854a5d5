"""BossMan's interface: one model cut over remote workers, with variables that cross them.

    from manyhands.compat.bossman import BossMan, wrapped_linear

    workers = await BossMan.setup_host(2)
    boss = BossMan(workers, [(nn.Linear, {"in_features": 1, "out_features": 512}, (32, 1)), ...])
    await boss.distribute_model()
    await boss.send_optimizer(torch.optim.Adam, {"lr": 3e-3})

and on each worker `python -m manyhands.worker`, with MODEL_HOST and MODEL_PORT. docs/bossman.md
has the rest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from manyhands.compat.bossman.boss import BossMan
    from manyhands.compat.bossman.crew import Crew, Worker
    from manyhands.compat.bossman.errors import NoWorkers, WorkerFailed, WorkerRefused
    from manyhands.compat.bossman.layers import wrapped_linear

__all__ = [
    "BossMan",
    "Crew",
    "NoWorkers",
    "Worker",
    "WorkerFailed",
    "WorkerRefused",
    "wrapped_linear",
]

# Loaded at first use, as everywhere: the package is imported by what needs no torch.
_LAZY = {
    "BossMan": "boss",
    "Crew": "crew",
    "NoWorkers": "errors",
    "Worker": "crew",
    "WorkerFailed": "errors",
    "WorkerRefused": "errors",
    "wrapped_linear": "layers",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value
