"""FluxDistributed's interface: data parallel over devices (threads) or processes. Supervised.

    from manyhands.compat.fluxdistributed import prepare_training, train, train_solutions

    key = train_solutions(tree, "LOC_train_solution.csv", range(1000))
    setup, buffer = prepare_training(model, key, None, opt, 96, epochs=2)
    result = train(torch.nn.functional.cross_entropy, setup, buffer, val=val)

docs/fluxdistributed.md has the rest: what is the same, and what is mended.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from manyhands.compat.fluxdistributed.buffer import (
        Buffer,
        check_nans,
        ensure_synced,
        sync_buffer,
    )
    from manyhands.compat.fluxdistributed.errors import (
        BadGradient,
        NotSynced,
        TrainingBroken,
        WorkersFailed,
    )
    from manyhands.compat.fluxdistributed.launch import start
    from manyhands.compat.fluxdistributed.logs import WandbLogger, with_logger
    from manyhands.compat.fluxdistributed.metrics import log_loss_and_acc, showpreds, topkaccuracy
    from manyhands.compat.fluxdistributed.pictures import minibatch, preprocess
    from manyhands.compat.fluxdistributed.processes import connect, getgrads, syncgrads
    from manyhands.compat.fluxdistributed.saving import load_weights
    from manyhands.compat.fluxdistributed.setup import Setup, prepare_training
    from manyhands.compat.fluxdistributed.step import train_step, update
    from manyhands.compat.fluxdistributed.training import Result, train
    from manyhands.data.imagenet import labels, makepaths, train_solutions

__all__ = [
    "BadGradient",
    "Buffer",
    "NotSynced",
    "Result",
    "Setup",
    "TrainingBroken",
    "WandbLogger",
    "WorkersFailed",
    "check_nans",
    "connect",
    "ensure_synced",
    "getgrads",
    "labels",
    "load_weights",
    "log_loss_and_acc",
    "makepaths",
    "minibatch",
    "prepare_training",
    "preprocess",
    "showpreds",
    "start",
    "sync_buffer",
    "syncgrads",
    "topkaccuracy",
    "train",
    "train_solutions",
    "train_step",
    "update",
    "with_logger",
]

# Loaded at first use, as everywhere: the package is imported by what needs no torch.
_IMAGENET = "manyhands.data.imagenet"
_LAZY = {
    "BadGradient": ".errors",
    "Buffer": ".buffer",
    "NotSynced": ".errors",
    "Result": ".training",
    "Setup": ".setup",
    "TrainingBroken": ".errors",
    "WandbLogger": ".logs",
    "WorkersFailed": ".errors",
    "check_nans": ".buffer",
    "connect": ".processes",
    "ensure_synced": ".buffer",
    "getgrads": ".processes",
    "labels": _IMAGENET,
    "load_weights": ".saving",
    "log_loss_and_acc": ".metrics",
    "makepaths": _IMAGENET,
    "minibatch": ".pictures",
    "prepare_training": ".setup",
    "preprocess": ".pictures",
    "showpreds": ".metrics",
    "start": ".launch",
    "sync_buffer": ".buffer",
    "syncgrads": ".processes",
    "topkaccuracy": ".metrics",
    "train": ".training",
    "train_solutions": _IMAGENET,
    "train_step": ".step",
    "update": ".step",
    "with_logger": ".logs",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_LAZY[name], __name__), name)
    globals()[name] = value
    return value
