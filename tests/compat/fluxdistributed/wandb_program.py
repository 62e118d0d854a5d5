"""The README's logging with wandb, which leaves a process and threads behind until its end.

python -m tests.compat.fluxdistributed.wandb_program FOLDER

Prints what the training returned as its history, and what wandb was given.
"""

import json
import sys

import wandb
from torch.nn import functional as F

from manyhands.compat.fluxdistributed import WandbLogger, prepare_training, train, with_logger
from tests.compat.fluxdistributed.models import SGD, data, mlp


class Watched:
    """A run of wandb whose rows are remembered."""

    def __init__(self, run):
        self.run, self.rows = run, []

    def __getattr__(self, name):
        return getattr(self.run, name)

    def log(self, row, **how):
        self.rows.append(row)
        self.run.log(row, **how)


if __name__ == "__main__":
    folder, runs, init = sys.argv[1], [], wandb.init

    def watched(**how):
        runs.append(Watched(init(**how)))
        return runs[-1]

    wandb.init = watched
    lg = WandbLogger(
        project="DDP",
        name="Resnet-34",
        config={"saveweights": False, "cycles": 100},
        step_increment=10,
        dir=folder,
    )
    setup, buffer = prepare_training(mlp(), data(), ["cpu"] * 2, SGD, 4, cycles=4)
    with with_logger(lg):
        result = train(F.cross_entropy, setup, buffer, log_every=2)
    (run,) = runs
    print(
        json.dumps(
            {
                "history": result.history,
                "rows": run.rows,
                "config": dict(run.config),
                "called": [run.project, run.name],
            }
        )
    )
