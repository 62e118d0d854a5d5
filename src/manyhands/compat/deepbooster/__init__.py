"""DeepBooster's interface: notebooks that average gradients through RabbitMQ, on our engine.

    from manyhands.compat import deepbooster

    trainer = deepbooster.Trainer(model=..., criterion=..., optimizer=..., device=...,
                                  n_epoch=..., ignition_queue=..., my_queue=...,
                                  trainers_queues=[...], url_parameters=..., chunk_path=...,
                                  transformer=torch.Tensor, apply_transformer_to_label=True)
    trainer.start()

docs/deepbooster.md says what differs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from manyhands.compat.deepbooster.dataset import Dataset
    from manyhands.compat.deepbooster.errors import (
        ChunkError,
        DeviceMissing,
        QueueInUse,
        TrainingBegun,
        TrainingBroken,
    )
    from manyhands.compat.deepbooster.launcher import Launcher
    from manyhands.compat.deepbooster.report import Lost, Report, Skipped
    from manyhands.compat.deepbooster.trainer import Trainer

__all__ = [
    "ChunkError",
    "Dataset",
    "DeviceMissing",
    "Launcher",
    "Lost",
    "QueueInUse",
    "Report",
    "Skipped",
    "Trainer",
    "TrainingBegun",
    "TrainingBroken",
]

# Loaded at first use: a Launcher needs no torch.
_LAZY = {
    "ChunkError": "errors",
    "Dataset": "dataset",
    "DeviceMissing": "errors",
    "Launcher": "launcher",
    "Lost": "report",
    "QueueInUse": "errors",
    "Report": "report",
    "Skipped": "report",
    "Trainer": "trainer",
    "TrainingBegun": "errors",
    "TrainingBroken": "errors",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value
