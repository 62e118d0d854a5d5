"""Wandb: rows in Weights & Biases, online or offline. It takes the package `wandb`.

wandb drops rows whose step goes back, and what else the program logs has steps of its own. So a
row carries its step as a value, "step", that all charts have as their axis, and one that is known
to be there already is not sent again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from manyhands.observe.base import MissingExtra, Steps, plain

_AXIS = "step"


class Wandb:
    """A run of its own: `options` go to `wandb.init`, which is called with the first row.

    With an `id` a run that is resumed goes on in the same one; what was the last step is known from
    there, and offline from a file in its folder. Raises MissingExtra, and what wandb raises.
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
            try:
                import wandb
            except ImportError as error:
                raise MissingExtra("wandb", "wandb") from error
            if self._dir is not None:
                self._dir.mkdir(parents=True, exist_ok=True)
            place = None if self._dir is None else str(self._dir)
            # The package has no types for what it is given by name.
            run = cast("Any", wandb).init(dir=place, config=self._config, **self._options)
            self._rows = Rows(run, self._mark_of(run))
        return self._rows

    def _mark_of(self, run: Any) -> Path:  # noqa: ANN401
        """The file of the last step: beside the folders of its runs, which are new each time."""
        return Path(run.settings.wandb_dir) / f"manyhands-{run.id}.step"


class Rows:
    """Rows for a run that is there: one of the user's, who finishes it.

    `mark` is a file that has the last step which was sent.
    """

    def __init__(self, run: Any, mark: Path | None = None) -> None:  # noqa: ANN401
        self.run = run
        self._mark = mark
        self._steps = Steps(max(_number(run.summary.get(_AXIS)), _read(mark)))
        run.define_metric(_AXIS, hidden=True)
        run.define_metric("*", step_metric=_AXIS)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        if not self._steps.is_new(step):
            return
        if self._mark is not None:
            # Before it is sent: of a killed process a row may be missing, but none is there twice.
            self._mark.write_text(f"{step}\n")
        self.run.log({**metrics, _AXIS: step})

    def log_hyperparams(self, params: Mapping[str, object]) -> None:
        self.run.config.update(plain(params), allow_val_change=True)

    def finalize(self, status: str) -> None:
        pass


def _read(mark: Path | None) -> int:
    if mark is None or not mark.exists():
        return -1
    text = mark.read_text().strip()
    return int(text) if text.isdigit() else -1  # a file that was cut short says nothing


def _number(value: object) -> int:
    return int(value) if isinstance(value, int | float) else -1
