"""Trainers as processes, forked from one that has loaded torch; and one process as the oracle."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from manyhands.core.address import parse_address
from manyhands.links.amqp import login_of
from manyhands.links.amqp.queues import post, set_up
from tests.compat.deepbooster import program

PATIENCE_S = 60.0
_names = itertools.count()


class Process:
    """One trainer. It has said `said` so far."""

    def __init__(self, context, folder: Path, options: dict) -> None:
        self.name = options["trainer"]["my_queue"]
        self._log = folder / f"{self.name}-{next(_names)}.log"
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=program.run, args=(theirs, self._log, options))
        self._process.start()
        theirs.close()
        self.said: list[dict] = []

    def until(self, key: str, value=None):
        """The first value of that key which it says from now on."""
        while True:
            assert self._pipe.poll(PATIENCE_S), self.report()
            try:
                said = self._pipe.recv()
            except EOFError:
                raise AssertionError(self.report()) from None
            self.said.append(said)
            if key in said and value in (None, said[key]):
                return said[key]

    def go(self) -> None:
        self._pipe.send("go")

    @property
    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def kill(self) -> None:
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join(PATIENCE_S)

    def result(self) -> tuple[dict, dict]:
        """Its report and weights, once it has ended in good order."""
        report = self.until("report")
        weights = self.said[-1]["weights"]
        return report, weights

    def end(self) -> None:
        assert self.until("threads") == [], self.report()
        self._process.join(PATIENCE_S)
        assert self._process.exitcode == 0, self.report()

    def close(self) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join(PATIENCE_S)
        self._process.close()
        self._pipe.close()

    def report(self) -> str:
        return f"{self.name} has said {self.said[-8:]}; its log:\n{self.log[-6000:]}"


class Crew:
    """Trainers t0, t1, ... of one training, with names of their own."""

    def __init__(self, context, broker, folder: Path, num: int) -> None:
        self._context, self._folder = context, folder
        mark = f"{os.getpid()}-{next(_names)}"
        self.queues = [f"t{k}-{mark}" for k in range(num)]
        self.ignitions = [f"start{k}-{mark}" for k in range(num)]
        self.url = broker.url()
        self.login = login_of(parse_address(self.url))
        self.started: list[Process] = []

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *details) -> None:
        for process in self.started:
            process.close()

    def options(self, k: int, *, seed=None, n_epoch=2, **more) -> dict:
        trainer = {
            "n_epoch": n_epoch,
            "ignition_queue": self.ignitions[k],
            "my_queue": self.queues[k],
            "trainers_queues": self.queues,
            "url_parameters": self.url,
            "chunk_path": str(self._folder / f"chunk{k}.jsonl"),
        }
        trainer |= more.pop("trainer", {})
        return {"seed": k if seed is None else seed, "trainer": trainer, **more}

    def start(self, k: int, **options) -> Process:
        process = Process(self._context, self._folder, self.options(k, **options))
        self.started.append(process)
        return process

    def ignite(self, *places: int, body: bytes = b"go") -> None:
        queues = [self.ignitions[k] for k in places or range(len(self.queues))]
        set_up(self.login, queues)
        post(self.login, dict.fromkeys(queues, body))


def write_chunk(path: Path, lines: Sequence[tuple[list, list]]) -> Path:
    samples = [json.dumps({"input": x, "label": y}) for x, y in lines]
    path.write_text("".join(f"{sample}\n" for sample in samples))
    return path


def random_lines(seed: int, num: int, rows: int = 5) -> list[tuple[list, list]]:
    made = torch.Generator().manual_seed(seed)
    return [
        (torch.rand(rows, 3, generator=made).tolist(), torch.rand(rows, 1, generator=made).tolist())
        for _ in range(num)
    ]


def train_alone(
    options: dict, chunks: Sequence[Sequence], n_epoch: int, *, until: dict[int, int] | None = None
) -> dict:
    """What one process gets: the mean over the next line of every chunk that has one.

    `until`: a trainer that is gone before that step of all.
    """
    until, step = until or {}, 0
    with default_double():
        net, optimizer = program.make(options)
        criterion = nn.MSELoss()
        for _ in range(n_epoch):
            line = 0
            while True:
                here = [c for k, c in enumerate(chunks) if step < until.get(k, 1 << 30)]
                if line >= max(map(len, here)):
                    break
                given = [c[line] for c in here if line < len(c) and c[line] is not None]
                optimizer.zero_grad()
                if given:
                    losses = [criterion(net(torch.Tensor(x)), torch.Tensor(y)) for x, y in given]
                    (sum(losses) / len(losses)).backward()
                    optimizer.step()
                line, step = line + 1, step + 1
    return program.weights_of(net)


@contextmanager
def default_double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def check_close(weights: dict, expected: dict) -> None:
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            torch.tensor(weights[name], dtype=torch.float64),
            torch.tensor(value, dtype=torch.float64),
            rtol=0,
            atol=1e-12,
            msg=lambda text, name=name: f"{name}: {text}",
        )
