"""A trainer in a process of its own: what the crew forks. It says what it does by a pipe."""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings
from dataclasses import asdict

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import torch  # noqa: E402
from torch import nn  # noqa: E402

import manyhands.collectives.rounds  # noqa: E402, F401  (loaded before the fork)
from manyhands.compat import deepbooster  # noqa: E402
from manyhands.core.errors import ManyhandsError  # noqa: E402

deepbooster.Trainer  # noqa: B018  (likewise)
torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # likewise: it loads half of torch


class Net(nn.Module):
    """Says which line it sees, by the line's first value, and stops where it is told to."""

    def __init__(self, seed: int, options: dict) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.norm = nn.BatchNorm1d(4) if options.get("norm") else None
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Parameter(
            torch.full((2,), float(options.get("frozen", 1))), requires_grad=False
        )
        self.seen = lambda: None

    def forward(self, x):
        self.seen()
        x = self.layers[1](self.layers[0](x))
        return self.layers[2](x if self.norm is None else self.norm(x))


OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
}


def make(options: dict) -> tuple[Net, torch.optim.Optimizer]:
    net = Net(options["seed"], options)
    return net, OPTIMIZERS[options.get("optimizer", "adam")](net.parameters())


def weights_of(net: nn.Module) -> dict:
    return {name: value.tolist() for name, value in net.state_dict().items()}


def run(pipe, log: str, options: dict) -> None:
    """Make a trainer of `options`; say "seen", the line, at each forward; then how it ended."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, force=True)
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    net, optimizer = make(options)
    stops, fails, seen = options.get("stops", ()), options.get("fails"), -1

    def on_line() -> None:
        nonlocal seen
        seen += 1
        pipe.send({"seen": seen})
        if seen in stops:
            pipe.recv()
        if seen == fails:
            raise RuntimeError("of the user's own")

    net.seen = on_line
    try:
        trainer = deepbooster.Trainer(
            net,
            nn.MSELoss(),
            optimizer,
            device="cpu",
            transformer=torch.Tensor,
            apply_transformer_to_label=True,
            **options["trainer"],
        )
        for _ in range(options.get("trainings", 1)):
            report = trainer.start()
            pipe.send({"report": asdict(report), "weights": weights_of(net)})
    except (ManyhandsError, RuntimeError) as error:
        pipe.send({"error": type(error).__name__, "text": str(error)})
    left = [t.name for t in threading.enumerate() if t is not threading.current_thread()]
    pipe.send({"threads": left})
    pipe.close()
