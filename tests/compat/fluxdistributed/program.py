"""What test_processes starts: a training with two workers. In each, all of this runs.

python program.py WHAT FOLDER [DEVICES]
"""

import os
import signal
import sys

import torch
from torch import nn
from torch.nn import functional as F

from manyhands.compat.fluxdistributed import prepare_training, start, train
from manyhands.core.errors import UsageError
from tests.compat.fluxdistributed.models import SGD, data, mlp

WORKERS = 2


class Breaks(nn.Module):
    """Raises in the second worker, in its third step."""

    def __init__(self):
        super().__init__()
        self.inner, self.count = mlp(), 0

    def forward(self, x):
        self.count += 1
        if self.count == 3 and worker == 2:
            raise ZeroDivisionError("in the third step")
        return self.inner(x)


worker = int(os.environ.get("MANYHANDS_FLUX_WORKER", "0"))


def main(what, folder, devices="1"):
    torch.set_num_threads(1)
    if what == "alone":
        alone(int(devices))
    if worker:
        print(f"worker {worker} is {os.getpid()}", flush=True)
        if what == "absent" and worker == 2:
            sys.exit(3)
        if what == "elsewhere" and worker == 2:
            return
    model = mlp(seed=worker)  # not the same: the first worker's counts
    if what == "breaks":
        model = Breaks()
    if what == "twice":
        refused(model, workers=0)
    result = start(
        *(F.cross_entropy, model, data(52), SGD, 4),
        workers=WORKERS,
        devices=["cpu"],
        log_every=1,
        **{"cycles": 10**9} if what in ("for ever", "breaks") else {"epochs": 2},
    )
    assert not worker, "a worker does not come back"
    if what == "twice":
        refused(model, workers=WORKERS, cycles=3)
    ((device, trained),) = result.models
    torch.save(trained.state_dict(), f"{folder}/{device}.pt")
    print(f"done: {result.steps} steps, {len(result.history)} rows", flush=True)


def refused(model, **options):
    try:
        start(F.cross_entropy, model, data(52), SGD, 4, **options)
    except UsageError as error:
        print(f"refused: {error}", flush=True)
    else:
        raise AssertionError("it was started")


def alone(num_devices):
    """Without workers, and without an end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background has none
    devices = ["cpu"] * num_devices
    setup, buffer = prepare_training(mlp(), data(52), devices, SGD, 4, cycles=10**9)
    train(F.cross_entropy, setup, buffer, log_every=1)


if __name__ == "__main__":
    main(*sys.argv[1:])
