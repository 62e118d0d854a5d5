"""Wandb: rows in Weights & Biases, online or offline. It takes the package `wandb`.

wandb drops rows whose step goes back, and what else the program logs has steps of its own. So a
row carries its step as a value, "step", that the charts of its values have as their axis, and one
that is known to be there already is not sent again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manyhands.observe.base import Steps, load, plain, require
from manyhands.observe.offline import last_step

_AXIS = "step"


class Wandb:
    """A run of its own: `options` go to `wandb.init`, which is called with the first row.

    With an `id` a run that is resumed goes on in the same one; which rows it has is known from
    there, and offline from its files. Making one raises MissingExtra; logging, what wandb raises.
    """

    def __init__(
        self,
        project: str | None = None,
        name: str | None = None,
        config: Mapping[str, object] | None = None,
        *,
        id: str | None = None,
        dir: str | os.PathLike[str] | None = None,
        **options: Any,  # noqa: ANN401  (wandb's own)
    ) -> None:
        require("wandb")
        self._config = dict(config or {})
        self._options = {"project": project, "name": name, **options}
        if id is not None:
            self._options |= {"id": id, "resume": options.get("resume", "allow")}
        self._dir = None if dir is None else Path(dir)
        self._rows: Rows | None = None

    @property
    def run(self) -> Any:  # noqa: ANN401  (a package that may be missing)
        """wandb's own object, for what else you want to log. The first use opens it."""
        return self._open().run

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._open().log_metrics(metrics, step)

    def log_hyperparams(self, params: Mapping[str, object]) -> None:
        self._open().log_hyperparams(params)

    def finalize(self, status: str) -> None:
        if self._rows is not None:
            rows, self._rows = self._rows, None
            rows.run.finish(exit_code=0 if status == "success" else 1)

    def _open(self) -> Rows:
        if self._rows is None:
            wandb = load("wandb")
            if self._dir is not None:
                self._dir.mkdir(parents=True, exist_ok=True)
            place = None if self._dir is None else str(self._dir)
            self._rows = Rows(wandb.init(dir=place, config=self._config, **self._options))
        return self._rows


class Rows:
    """Rows for a run that is there: one of the user's, who finishes it."""

    def __init__(self, run: Any) -> None:  # noqa: ANN401
        self.run = run
        known = run.summary.get(_AXIS)  # of one that was resumed, as the server has it
        there = int(known) if isinstance(known, int | float) else -1
        here = last_step(Path(run.settings.wandb_dir), run.id, _AXIS)
        self._steps = Steps(max(there, here), there=f"run {run.id} of wandb")
        self._defined: set[str] = set()
        run.define_metric(_AXIS, hidden=True)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        if not self._steps.is_new(step):
            return
        for name in metrics.keys() - self._defined:  # no others: the rest of the run is the user's
            self.run.define_metric(name, step_metric=_AXIS)
        self._defined.update(metrics)
        self.run.log({**metrics, _AXIS: step})

    def log_hyperparams(self, params: Mapping[str, object]) -> None:
        self.run.config.update(plain(params), allow_val_change=True)

    def finalize(self, status: str) -> None:
        pass
