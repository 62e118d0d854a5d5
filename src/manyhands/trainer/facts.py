"""Facts: what a row says of a round beside its means, and a log of its training."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from manyhands._version import __version__
from manyhands.replica.run import Run

if TYPE_CHECKING:
    from manyhands.trainer.trainer import Trainer


class Pace:
    """How fast rounds go, and what reading them costs: as this peer sees it."""

    def __init__(self) -> None:
        self.loader: Any = None  # that of the loop
        self._begun_s: float | None = None  # the round under way
        self._waited_s = 0.0  # up to then

    def take(self, samples: int) -> dict[str, float]:
        """A round is over: of all peers together, samples a second; of this one, the rest."""
        now_s, begun_s, self._begun_s = time.monotonic(), self._begun_s, time.monotonic()
        found: dict[str, float] = {}
        if begun_s is not None and now_s > begun_s:
            found["perf/samples_per_s"] = samples / (now_s - begun_s)
        waited_s = float(self.loader.wait_s)
        found["data/wait_s"] = waited_s - self._waited_s
        self._waited_s = waited_s
        bad = getattr(self.loader, "bad", None)  # of one that can go on without some samples
        return found if bad is None else found | {"data/bad": float(len(bad))}

    def restart(self) -> None:
        """The next round begins now."""
        self._begun_s = time.monotonic()


def params_of(
    trainer: Trainer,
    run: Run,
    loader: Any,  # noqa: ANN401
    options: Mapping[str, Any],
) -> dict[str, object]:
    """What the training was told, for `Logger.log_hyperparams`."""
    given = trainer.optimizer
    optimizers = [given] if isinstance(given, torch.optim.Optimizer) else list(given)
    first = optimizers[0].param_groups[0]
    params: dict[str, object] = {
        "model": type(trainer.model).__name__,
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "optimizer": ", ".join(type(optimizer).__name__ for optimizer in optimizers),
        **{name: value for name, value in first.items() if isinstance(value, int | float)},
        "epochs": trainer.epochs,
        "batch": loader.batch_size,
        "samples": len(loader.dataset),
        "clip": trainer.clip,
        "patience": trainer.patience,
        "schedule": trainer.schedule,
        "peers": len(run.roster),
        "manyhands": __version__,
        "torch": torch.__version__,
    }
    params |= {name: value for name, value in options.items() if name != "checkpoints"}
    return params | dict(trainer.hyperparams)
