"""Training: what each process of a job does.

All processes of a job are peers of one run: they share out every global batch, and each epoch ends
with an evaluation that they share out too. Losses and weights do not depend on how many there are.
Every process says where the run stands, so each slot's log is complete.

A checkpoint is saved after every epoch; the same training, started again with the same folder, goes
on from the newest one: after a preemption, a lost host, or to train for more epochs.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn import functional as F
from torch.optim import Optimizer

from manyhands.checkpoint.store import Store
from manyhands.collectives.instructions import StopReason
from manyhands.collectives.outcomes import Stopped
from manyhands.compat.deeppool.tables import Tables
from manyhands.compat.deeppool.terms import Place, Terms
from manyhands.core.errors import UsageError
from manyhands.data.loader import Loader
from manyhands.replica.options import RoundClosed
from manyhands.replica.run import Run, join
from manyhands.trainer.history import Diary, Watch

TERMINATED = 143  # as the shell says it of a process that SIGTERM has ended


def device_of(wanted: str | None, local_rank: int) -> torch.device:
    """This process's: the GPU of its slot, if it has one. Raises UsageError."""
    if wanted == "cpu" or (wanted is None and not torch.cuda.is_available()):
        return torch.device("cpu")
    if wanted not in (None, "cuda"):
        raise UsageError(f"the device {wanted!r}", hint="cpu or cuda")
    if not torch.cuda.is_available() or local_rank >= torch.cuda.device_count():
        raise UsageError(
            f"process {local_rank} of this machine has no GPU: torch sees "
            f"{torch.cuda.device_count()}",
            hint="a hostfile line for each, or --device cpu",
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def load_weights(folder: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Those of the newest checkpoint that a training has saved there. Raises UsageError."""
    found = Store(folder).load()
    tree: Any = None if found.checkpoint is None else found.checkpoint.tree
    if not isinstance(tree, dict) or "model" not in tree:
        raise UsageError(
            f"there is no checkpoint in {os.fspath(folder)}", hint="--save FOLDER writes some"
        )
    return cast("dict[str, Tensor]", tree["model"])


# -- the loop -----------------------------------------------------------------------------------


def train(
    terms: Terms,
    place: Place,
    tables: Tables,
    model: Module,
    optimizer: Callable[[Iterable[Parameter], float], Optimizer],
    say: Callable[[str], None],
) -> None:
    """Train to the last epoch; blocks. Raises SystemExit(143) if it was told to leave before.

    The model is the same in every process when this is called.
    """
    if len(tables.training) < terms.batch:
        raise UsageError(
            f"a global batch of {terms.batch}, and {len(tables.training)} samples to learn from",
            hint="a smaller batch, or more samples",
        )
    device = device_of(terms.device, place.local_rank)
    model.to(device, torch.float64 if terms.double else None)
    resumes = terms.save is not None and any(p.complete for p in Store(terms.save).places())
    if terms.load is not None and not resumes and terms.load != terms.save:
        model.load_state_dict(load_weights(terms.load))
        say(f"weights are those of {terms.load}")
    course = _Course(terms, place, tables, model, optimizer, device, say)
    with join(run=place.run, min_peers=place.world, seed=terms.seed) as run:
        course.follow(run)
    course.conclude(run)  # what there is to save has been, now


class _Course:
    """One process's way through a training."""

    def __init__(
        self,
        terms: Terms,
        place: Place,
        tables: Tables,
        model: Module,
        optimizer: Callable[[Iterable[Parameter], float], Optimizer],
        device: torch.device,
        say: Callable[[str], None],
    ) -> None:
        self._terms, self._place, self._tables = terms, place, tables
        self._model, self._device, self._say = model, device, say
        self._optimizer = optimizer(model.parameters(), terms.lr)
        self._diary = Diary(Watch(name="train/loss", mode="min", patience=None))
        self._began_s = time.monotonic()
        self._first_round = self._num_rounds = 0

    def follow(self, run: Run) -> None:
        """Until the last epoch is over, or this process is told to leave."""
        terms, tables = self._terms, self._tables
        run.register(diary=self._diary)
        both: dict[str, Any] = {"workers": terms.workers, "device": self._device}
        _, _, batches, _ = run.wrap(
            self._model,
            self._optimizer,
            Loader(tables.training, terms.batch, drop_last=True, **both),
            epochs=terms.epochs,
            evaluation=Loader(tables.evaluation, terms.batch, shuffle=False, **both),
            grain_size=terms.grain,
            checkpoints=terms.save,
            save_all=True,
            resume="auto" if terms.save is not None else False,
        )
        self._num_rounds = terms.epochs * len(batches)
        self._introduce(run)
        run.on_round(self._on_round)
        for _ in range(terms.epochs):
            for x, y in batches:
                self._learn(run, x, y)
            self._evaluate(run)
            if run.round_closed:
                self._end_epoch(run)

    def _learn(self, run: Run, x: Tensor, y: Tensor) -> None:
        loss, right = self._compute(x, y)
        run.mean(loss)
        run.mean(right, "accuracy")
        loss.backward()  # pyright: ignore[reportUnknownMemberType]
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _evaluate(self, run: Run) -> None:
        self._model.eval()
        with torch.no_grad():
            for x, y in run.evaluation:
                loss, right = self._compute(x, y)
                run.mean(loss)
                run.mean(right, "accuracy")
        self._model.train()

    def _compute(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if self._terms.double and x.is_floating_point():
            x = x.double()
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._terms.autocast):
            scores = self._model(x).flatten(0, -2)  # of texts: every byte of every stretch
            loss = F.cross_entropy(scores, y.flatten())
        right = (scores.argmax(-1) == y.flatten()).float().mean()
        return loss, right

    # -- what it says ---------------------------------------------------------------------------

    def _introduce(self, run: Run) -> None:
        terms, self._first_round = self._terms, run.round
        num = sum(p.numel() for p in self._model.parameters())
        self._say(
            f"{terms.name}: rank {self._place.rank} of {self._place.world} on {self._device}, "
            f"{num:,} parameters, {len(self._tables.training)} samples, global batch {terms.batch}"
            + (f", grains of {terms.grain}" if terms.grain else "")
        )
        if run.round:
            self._say(f"going on after round {run.round} of {self._num_rounds}, from {terms.save}")

    def _on_round(self, closed: RoundClosed) -> None:
        self._diary.add(closed.means, closed.weight)
        done = closed.round + 1
        if done % self._terms.every == 0:
            means = closed.means
            self._say(
                f"round {done}/{self._num_rounds}  loss {means['loss']:.6f}  "
                f"accuracy {means['accuracy']:.2%}"
            )

    def _end_epoch(self, run: Run) -> None:
        epoch = self._diary.end_epoch(run.evaluated)
        self._say(
            f"epoch {len(self._diary.epochs)}/{self._terms.epochs}  "
            f"loss {epoch['train/loss']:.6f}  accuracy {epoch['train/accuracy']:.2%}  "
            f"evaluation loss {epoch['val/loss']:.6f}  accuracy {epoch['val/accuracy']:.2%}"
        )

    def conclude(self, run: Run) -> None:
        """After the run: what has become of it. Raises SystemExit if that is not all."""
        came_late = any(isinstance(e, Stopped) and e.reason is StopReason.OVER for e in run.events)
        if run.round < self._num_rounds and not came_late:
            self._say(f"told to end after round {run.round} of {self._num_rounds}")
            raise SystemExit(TERMINATED)
        if self._terms.save is not None:
            self._say(f"saved in {self._terms.save}")
        num, took_s = run.round - self._first_round, time.monotonic() - self._began_s
        pace = "" if not num else f"{took_s / num * 1e3:.2f} ms/iter, {num / took_s:.2f} iter/s, "
        # The words and their order are those that DeepPool's users have scripts for.
        self._say(
            f"A training job {self._terms.name} is completed ({num} iters, {pace}"
            f"0.00 be img/s, {self._terms.batch} globalBatchSize)."
        )


def to_stdout(line: str) -> None:
    """At once, so that a log can be followed."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
