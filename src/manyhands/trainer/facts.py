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


BAD_SAMPLE = "bad sample"


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
        return found

    def restart(self) -> None:
        """The next round begins now."""
        self._begun_s = time.monotonic()


class BadSamples:
    """Tells all peers of the ones that this peer has met in one loader, each once."""

    def __init__(self, run: Run, loader: Any) -> None:  # noqa: ANN401
        self._run, self._loader = run, loader
        self._told = 0

    def tell(self) -> None:
        """Those that are new."""
        bad = self._loader.bad
        for one in bad[self._told :]:
            self._run.tell(BAD_SAMPLE, one.message)
        self._told = len(bad)


def params_of(
    trainer: Trainer,
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
        "manyhands": __version__,
        "torch": torch.__version__,
    }
    params |= {name: value for name, value in options.items() if name != "checkpoints"}
    return params | dict(trainer.hyperparams)
