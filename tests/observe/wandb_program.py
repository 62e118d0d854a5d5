"""A program that logs with wandb, which leaves a process and threads behind until its end.

python -m tests.observe.wandb_program FOLDER ORDERS

ORDERS are a JSON list; for each of them rows are logged, and with "die" it kills itself. Without
any it prints what the files of all runs in the folder have; wandb writes them until the end of its
program.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import defaultdict
from pathlib import Path

import wandb
from wandb.proto import wandb_internal_pb2 as pb

from manyhands.observe import Desk, Wandb, adapt
from manyhands.observe.offline import records_in


def play(folder: Path, *, id: str, steps: list[int], value=0.5, own=False, die=False) -> None:
    row = {"train/loss": value}
    if own:
        with wandb.init(project="p", id=id, dir=folder) as run:
            logger = adapt(wandb)  # people have either at hand
            assert logger.run is adapt(run).run is run
            logger.log_hyperparams({"lr": 0.1})
            run.log({"theirs": 1})
            for step in steps:
                logger.log_metrics(row, step)
            logger.finalize("success")
            run.log({"theirs": 2})  # it is still the user's
        return
    made = Wandb("p", "name", {"mine": 1}, id=id, dir=folder)
    if die:
        for step in steps:
            made.log_metrics(row, step)
        os.kill(os.getpid(), signal.SIGKILL)
    with Desk([made]) as desk:  # in another thread than this
        desk.log_hyperparams({"lr": 0.1, "betas": (0.9, 0.99)})
        for step in steps:
            desk.log_metrics(row, step)
    assert desk.counts[0].failed == desk.counts[0].dropped == 0


def records(file: Path):
    for data in records_in(file.read_bytes()):
        record = pb.Record()
        record.ParseFromString(data)
        yield record


def read(folder: Path) -> dict:
    found = defaultdict(list)
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        rows, config, axes = [], {}, {}
        for record in records(file):
            kind = record.WhichOneof("record_type")
            if kind == "history":
                rows.append({key(i): json.loads(i.value_json) for i in record.history.item})
            elif kind == "config":
                config |= {key(i): json.loads(i.value_json) for i in record.config.update}
            elif kind == "run":
                config |= {key(i): json.loads(i.value_json) for i in record.run.config.update}
            elif kind == "metric":
                axes[record.metric.name or record.metric.glob_name] = record.metric.step_metric
        config.pop("_wandb", None)
        found[file.stem.removeprefix("run-")].append({"rows": rows, "config": config, "axes": axes})
    return found


def key(item) -> str:
    return item.key or "/".join(item.nested_key)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    orders = json.loads(sys.argv[2])
    for order in orders:
        play(folder, **order)
    if not orders:
        print(json.dumps(read(folder)))
