"""Trainer: the loop that most trainings have, over a run of any number of peers.

    trainer = mh.Trainer(model, optimizer, loss=nn.CrossEntropyLoss(), epochs=10)
    history = trainer.fit(train_loader, test_loader)

Whoever needs more writes a loop of their own: `manyhands.join`, `Run.wrap`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from manyhands.core.errors import UsageError
from manyhands.observe.base import FAILED, SUCCESS, of_epoch
from manyhands.observe.console import Console
from manyhands.observe.desk import Desk
from manyhands.replica.options import RoundClosed
from manyhands.replica.run import Run, join
from manyhands.trainer.facts import BadSamples, Pace, params_of
from manyhands.trainer.history import Diary, History, Watch
from manyhands.trainer.scribe import Scribe

Step = Callable[[Module, Any], Tensor | Mapping[str, Tensor | float]]


@dataclass(frozen=True, eq=False)
class Trainer:
    """What is trained, and how; the same at every peer. `fit` does it.

    Batches are moved to where the model's parameters are.
    """

    model: Module
    optimizer: Optimizer | Sequence[Optimizer]
    _: KW_ONLY
    epochs: int
    loss: Callable[[Any, Any], Tensor] | None = None
    """Of the model's output and the target, for batches that are pairs of input and target."""
    step: Step | None = None
    """Instead of it, for any batches: from (model, batch) to the loss, or to several values by
    name, one of them "loss". Each is a mean over the samples of the batch, as losses are."""
    evaluate: Callable[[Module], Mapping[str, float]] | None = None
    """Instead of the mean of `loss` or `step` over a second loader: called after every epoch, on
    one peer; if that dies, on another. For values that are no means over samples."""
    scheduler: Any = None
    """Or a list. One that waits for a plateau is given what is watched."""
    schedule: str = "epoch"
    """Whether schedulers step every "epoch", or every "round"."""
    clip: float | None = None
    """The norm that gradients have at most."""
    watch: str | None = None
    """The value of an epoch that counts: "val/loss" with an evaluation, else "train/loss"."""
    mode: str = "min"
    """Whether the least of it is best, or the greatest: "max"."""
    patience: int | None = None
    """Stop after so many epochs in which it has not improved."""
    loggers: Sequence[Any] | Desk | None = None
    """Whatever `manyhands.observe.adapt` takes; without any of your own, a line at the terminal.
    Used at one peer at a time, each by a thread of its own, and finalized at every peer. With
    time-outs and queues of your own: a Desk."""
    hyperparams: Mapping[str, object] = field(default_factory=dict[str, object])
    """More of what loggers are told at the start; what is said here is known already."""

    def __post_init__(self) -> None:
        if (self.loss is None) == (self.step is None):
            raise UsageError(
                "a Trainer takes either a loss or a step",
                hint="loss=nn.CrossEntropyLoss(), say, or step=FUNCTION_OF_MODEL_AND_BATCH",
            )
        counts = (self.epochs, 1 if self.patience is None else self.patience)
        if any(type(count) is not int or count < 1 for count in counts):
            said = f"epochs={self.epochs!r}, patience={self.patience!r}"
            raise UsageError(said, hint="whole numbers of 1 or more; patience may be None")
        for name, known in (("schedule", ("epoch", "round")), ("mode", ("min", "max"))):
            if getattr(self, name) not in known:
                hint = f"one of {', '.join(known)}"
                raise UsageError(f"{name}={getattr(self, name)!r}", hint=hint)
        if self.schedule == "round" and any(map(_is_plateau, _as_list(self.scheduler))):
            raise UsageError("a plateau is one of epochs", hint='leave schedule="epoch"')

    def fit(
        self,
        data: Any,  # noqa: ANN401
        evaluation: Any = None,  # noqa: ANN401
        *,
        run: Run | None = None,
        **options: Any,  # noqa: ANN401
    ) -> History:
        """Train on the loader, and after every epoch evaluate on the other one, if any.

        Batch sizes are those of all peers together. Each sample of the evaluation counts once,
        whoever dies. `run` is what `mh.join` returns, entered; without it, where and as whom is
        told by the environment. `options` go to `Run.wrap`: checkpoints, resume, grain_size, ...
        """
        if run is None:
            with join() as joined:
                return self.fit(data, evaluation, run=joined, **options)
        if self.evaluate is not None:
            if evaluation is not None:
                hint = "leave out evaluate=, or the second loader"
                raise UsageError("two ways to evaluate were given", hint=hint)
            evaluation = DataLoader[Any](cast("Any", [0]))  # one sample: one peer has it
        default = "train/loss" if evaluation is None else "val/loss"
        watch = Watch(name=self.watch or default, mode=self.mode, patience=self.patience)
        return _Fitting(self, run, Diary(watch)).fit(data, evaluation, options)


class _Fitting:
    """One call of `fit`."""

    def __init__(self, trainer: Trainer, run: Run, diary: Diary) -> None:
        self._trainer, self._run, self._diary = trainer, run, diary
        self._optimizers: list[Optimizer] = _as_list(trainer.optimizer)
        self._schedulers = _as_list(trainer.scheduler)
        loggers = [Console()] if trainer.loggers is None else trainer.loggers
        self._scribe = Scribe(run, loggers)
        self._rounds_per_epoch = 0
        self._pace = Pace()
        self._spoilt: BadSamples | None = None  # of what is evaluated

    def fit(self, data: Any, evaluation: Any, options: Mapping[str, Any]) -> History:  # noqa: ANN401
        trainer, run, diary = self._trainer, self._run, self._diary
        run.register(trainer=diary)
        _, _, loader, _ = run.wrap(
            trainer.model,
            self._optimizers,
            data,
            self._schedulers,
            epochs=trainer.epochs,
            evaluation=evaluation,
            **options,
        )
        if not trainer.model.training:  # else some of its layers may be meant not to
            trainer.model.train()
        self._rounds_per_epoch = len(loader)
        self._scribe.params = params_of(trainer, loader, options)
        self._pace.loader = loader
        spoilt = BadSamples(run, loader)
        run.on_round(self._on_round)
        status = FAILED
        try:
            for _ in range(trainer.epochs):
                for batch in loader:
                    if diary.stopped:
                        break  # the state that has come says so
                    spoilt.tell()
                    self._train(batch)
                if diary.stopped:
                    break
                if evaluation is not None:
                    self._evaluate()
                if run.round_closed:
                    self._end_epoch()
            status = SUCCESS
        finally:
            self._scribe.close(status)
        return History(epochs=tuple(diary.epochs), rounds=run.round, stopped=diary.stopped)

    # -- a round --------------------------------------------------------------------------------

    def _train(self, batch: Any) -> None:  # noqa: ANN401
        said = self._compute(batch)
        loss = said["loss"]
        if not isinstance(loss, Tensor):
            raise UsageError(f"the loss is a {type(loss).__name__}, not a tensor")
        for name, value in said.items():
            self._run.mean(value, name)
        loss.backward()  # pyright: ignore[reportUnknownMemberType]
        if self._trainer.clip is not None:
            self._run.clip_grad_norm_(self._trainer.clip)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if self._trainer.schedule == "round":
            for scheduler in self._schedulers:
                scheduler.step()

    def _compute(self, batch: Any) -> Mapping[str, Tensor | float]:  # noqa: ANN401
        trainer = self._trainer
        batch = _moved(batch, next(trainer.model.parameters()).device)
        if trainer.step is None:
            assert trainer.loss is not None
            inputs, targets = batch
            return {"loss": trainer.loss(trainer.model(inputs), targets)}
        said = trainer.step(trainer.model, batch)
        if isinstance(said, Tensor):
            return {"loss": said}
        if "loss" not in said:
            names = ", ".join(map(repr, said)) or "nothing"
            raise UsageError(f"a step gave {names}", hint='one of the values is called "loss"')
        return said

    def _on_round(self, closed: RoundClosed) -> None:
        self._diary.add(closed.means, closed.weight)
        epoch, at = divmod(closed.round, self._rounds_per_epoch)
        lr = self._optimizers[0].param_groups[0]["lr"]
        means = {f"train/{name}": mean for name, mean in closed.means.items()}
        row = {"epoch": epoch, **means, "lr": float(lr), **self._pace.take(closed.samples)}
        row["data/bad"] = float(self._scribe.num_bad)
        self._scribe.note(closed.round, row, whole=at + 1 < self._rounds_per_epoch)

    # -- an epoch -------------------------------------------------------------------------------

    def _evaluate(self) -> None:
        model, evaluate = self._trainer.model, self._trainer.evaluate
        if self._spoilt is None:
            self._spoilt = BadSamples(self._run, self._run.evaluation)
        with _in_evaluation(model):
            for batch in self._run.evaluation:
                self._spoilt.tell()
                said = self._compute(batch) if evaluate is None else evaluate(model)
                for name, value in said.items():
                    self._run.mean(value, name)

    def _end_epoch(self) -> None:
        evaluated = self._run.evaluated
        epoch = self._diary.end_epoch(evaluated)
        if self._trainer.schedule == "epoch":
            for scheduler in self._schedulers:
                scheduler.step(*([self._diary.watched()] if _is_plateau(scheduler) else []))
        self._diary.judge()
        rest = {of_epoch(n) if n.startswith("train/") else n: v for n, v in epoch.items()}
        self._scribe.add(self._run.round - 1, rest)
        self._pace.restart()  # an evaluation is no part of a round


@contextmanager
def _in_evaluation(model: Module) -> Generator[None]:
    """Layers act as they do in use, and nothing is remembered for a backward."""
    kept = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in kept:
            module.training = True


def _moved(batch: Any, device: torch.device) -> Any:  # noqa: ANN401
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {k: _moved(v, device) for k, v in cast("Mapping[Any, Any]", batch).items()}
    if isinstance(batch, list | tuple):
        items = [_moved(item, device) for item in cast("Sequence[Any]", batch)]
        kind = cast("type[Any]", type(cast("Any", batch)))
        return kind(*items) if hasattr(kind, "_fields") else kind(items)
    return batch


def _is_plateau(scheduler: Any) -> bool:  # noqa: ANN401
    return isinstance(scheduler, ReduceLROnPlateau)


def _as_list(thing: Any) -> list[Any]:  # noqa: ANN401
    if isinstance(thing, list | tuple):
        return list(cast("Sequence[Any]", thing))
    return [] if thing is None else [thing]
