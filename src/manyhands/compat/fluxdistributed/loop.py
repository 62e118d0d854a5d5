"""Loop: what each device does from the first step to the last, in step with all others.

    compute ──► vote ──► out of memory anywhere? ──► undo, and split, skip or raise: all alike
                  └────► weigh, add up, optimizer ──► confirm ──► failed on some? ──► heal

Threads of one process and processes of many run the same loop: `everybody` is whoever adds up,
`crew` those of them that hold a replica. Whatever is decided follows from what all were told.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from manyhands.compat.fluxdistributed.ballot import Verdict, confirm, share, vote
from manyhands.compat.fluxdistributed.buffer import Kept, Slot, check_nans
from manyhands.compat.fluxdistributed.errors import BadGradient, Bystander, TrainingBroken
from manyhands.compat.fluxdistributed.feed import Batch, Feed
from manyhands.compat.fluxdistributed.metrics import Judge, check_classes, is_of_classes
from manyhands.compat.fluxdistributed.optimizers import Pace, rate_of
from manyhands.compat.fluxdistributed.saving import Standing, Terms, Where, save
from manyhands.compat.fluxdistributed.step import (
    LossFn,
    compute,
    cut,
    each,
    give_back,
    is_short,
    update,
)
from manyhands.core.errors import CheckpointError, LinkError, UsageError
from manyhands.data.calendar import Calendar
from manyhands.data.memory import is_out_of_memory
from manyhands.stages.carrier import Carrier
from manyhands.stages.chance import seed_of

log = logging.getLogger(__name__)

_ALONE = (
    "this device had a single row of the step: where a layer (BatchNorm1d) takes none alone, "
    "drop_last=True leaves out the rows at the end of an epoch that do not fill a step"
)
OnOom = Literal["skip", "split", "raise"]
Log = Callable[[Mapping[str, float], int], None]


@dataclass(frozen=True, kw_only=True)
class Course:
    """What all devices know of a training."""

    loss: LossFn
    steps: int
    terms: Terms
    calendar: Calendar
    names: tuple[str, ...]  # of the devices of the crew
    on_oom: OnOom = "skip"
    log_every: int = 10
    eval_every: int = 50
    save: Where | None = None
    mixed: bool = False  # devices of several kinds, whose arithmetic differs in the last bits


@dataclass(kw_only=True)
class Replica:
    """One device's model, and what belongs to it."""

    model: nn.Module
    optimizer: Optimizer
    pace: Pace
    slot: Slot
    device: torch.device
    chance: bool = True  # no other replica draws from its generator

    def state(self) -> dict[str, Any]:
        """For a checkpoint, or for another replica; not copied."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "pace": self.pace.state(),
            "kinds": self._kinds(),
        }

    def load(self, tree: Any) -> None:  # noqa: ANN401
        """What `state` gave, here or in another training. Raises UsageError, before anything is
        done, for the state of another kind of optimizer or scheduler.
        """
        was, now = tree.get("kinds"), self._kinds()  # older checkpoints do not say
        if was is not None and was != now:
            raise UsageError(
                f"the checkpoint is of a training with {_said(was)}; this one has {_said(now)}",
                hint="go on with the same classes for opt and sched; or begin anew with its "
                "weights: model.load_state_dict(load_weights(FOLDER))",
            )
        self.model.load_state_dict(tree["model"])
        # An optimizer takes tensors as they are, and another replica may have taken these.
        self.optimizer.load_state_dict(copy.deepcopy(tree["optimizer"]))
        self.pace.load(copy.deepcopy(tree["pace"]))

    def _kinds(self) -> dict[str, str]:
        return {"optimizer": type(self.optimizer).__name__, "sched": self.pace.kind}


@dataclass(kw_only=True)
class Outcome:
    """How it went; the history is the first device's."""

    standing: Standing
    history: list[dict[str, float]] = field(default_factory=list[dict[str, float]])


class Loop:
    """One device's. `run` blocks; all devices call it."""

    def __init__(
        self,
        course: Course,
        replica: Replica,
        feed: Feed,
        *,
        everybody: Carrier,
        crew: Carrier,
        standing: Standing,
        judge: Judge | None,
        log_row: Log | None,
    ) -> None:
        self._course, self._replica, self._feed = course, replica, feed
        self._everybody, self._crew = everybody, crew
        self._now, self._judge = standing, judge
        self._log = log_row if crew.rank == 0 else None
        self._history: list[dict[str, float]] = []
        self._num_bad = 0
        self._since, self._rows_since, self._waited = time.monotonic(), 0, 0.0

    def run(self) -> Outcome:
        """Take the steps that are left. Raises TrainingBroken, and what a device raised."""
        course, now = self._course, self._now
        if not self._replica.model.training:  # else some of its layers may be meant not to
            self._replica.model.train()
        while now.step < course.steps:
            loss = self._step(self._feed.take())
            now.step += 1
            self._account(loss)
        vote(self._everybody, self._replica.slot.layout, done=True)
        self._save(last=True)
        return Outcome(standing=now, history=self._history)

    # -- one step ---------------------------------------------------------------------------------

    def _step(self, batch: Batch) -> float | None:
        """The loss over all devices; None if the step was skipped."""
        replica = self._replica
        replica.pace.before(self._now.step)
        before = Kept()
        try:
            verdict = self._agreed(batch, before)
            whole = verdict is None or not is_short(self._check)
        except BaseException:
            before.restore(replica.model)  # as after the last step, which all have
            raise
        if verdict is not None:
            self._apply(whole=whole)
            self._rows_since += verdict.total
        replica.pace.after()
        return None if verdict is None else verdict.loss

    def _agreed(self, batch: Batch, before: Kept) -> Verdict | None:
        """The mean gradient of all devices is in the slot; None if there is nothing to apply."""
        replica = self._replica
        while (verdict := self._attempt(batch, before)).short:
            before.restore(replica.model)
            give_back(replica.device)
            if not self._try_again(verdict):
                return None
        if not verdict.total:
            return None  # all its samples are bad
        slot = replica.slot
        slot.weigh(batch.rows / verdict.total, verdict.given_by(self._everybody.rank))
        slot.add_up(self._everybody, verdict.used)
        return verdict

    def _attempt(self, batch: Batch, before: Kept) -> Verdict:
        replica, own, value = self._replica, None, 0.0
        try:
            before.take(replica.model)
            value = self._computed(batch, before)
        except Exception as error:
            if not is_out_of_memory(error):
                if batch.rows == 1 and "more than 1 value per channel" in str(error):
                    error.add_note(_ALONE)
                raise
            own = error
            if self._course.on_oom != "raise":
                error.__traceback__ = None  # its frames hold what took the memory
        try:
            verdict = vote(
                self._everybody,
                replica.slot.layout,
                rows=batch.rows,
                loss=value,
                bad=self._feed.num_bad,
                short=own is not None,
                used=() if own is not None else replica.slot.used,
            )
        except LinkError:
            if own is not None:  # the others may have ended for this very reason
                raise own from None
            raise
        if verdict.short and self._course.on_oom == "raise":
            if own is not None:
                raise own
            raise Bystander(f"{self._short(verdict)} ran out of memory in step {self._now.step}")
        self._num_bad = verdict.bad
        return verdict

    def _computed(self, batch: Batch, before: Kept) -> float:
        replica = self._replica
        if not batch.rows:
            replica.slot.mark(replica.model, 0, before)
            return 0.0
        if replica.chance:
            self._seed()

        of_classes = is_of_classes(self._course.loss)

        def check(output: Any, start: int, stop: int) -> None:  # noqa: ANN401
            check_classes(output, cut(batch.y, start, stop), of_classes=of_classes)

        x, y = each((batch.x, batch.y), lambda tensor: tensor.to(replica.device))
        return compute(
            self._course.loss,
            replica.slot,
            replica.model,
            *(x, y, before),
            pieces=self._now.pieces,
            check=check,
        )

    def _seed(self) -> None:
        """So that dropout draws the same again after a resume."""
        seed = seed_of(self._course.terms.seed, self._now.step, self._crew.rank) >> 1
        if self._replica.device.type == "cuda":
            with torch.cuda.device(self._replica.device):
                torch.cuda.manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)

    def _try_again(self, verdict: Verdict) -> bool:
        """Whether the step is tried again, in smaller pieces; else it is skipped. All alike."""
        now = self._now
        rows = self._course.calendar.num_samples(now.step)
        most = -(-rows // self._crew.size)  # of any device
        if self._course.on_oom == "split" and now.pieces < most:
            now.pieces = min(2 * now.pieces, most)
            self._warn(
                f"{self._short(verdict)} ran out of memory in step {now.step}: from now on all "
                f"devices compute their rows in {now.pieces} pieces"
            )
            return True
        now.skipped += 1
        self._warn(
            f"{self._short(verdict)} ran out of memory: step {now.step} is skipped on all devices, "
            f"with its {rows} samples"
        )
        return False

    def _check(self) -> None:
        gradients = self._replica.slot.gradients()
        bad = [name for name, gradient in gradients.items() if check_nans(gradient)]
        if bad:
            raise BadGradient(
                f"the mean gradient of step {self._now.step} has NaNs, in {len(bad)} of "
                f"{len(gradients)} tensors: {', '.join(bad[:4])}",
                hint="no replica has taken it; a smaller learning rate, or data without NaNs?",
            )

    def _apply(self, *, whole: bool) -> None:
        """The step; not `whole` is what ran out of memory on the way to it, as others may not."""
        replica = self._replica
        failed = not whole or is_short(
            lambda: update(replica.optimizer, replica.model, replica.slot)
        )
        ranks = confirm(self._everybody, failed=failed)
        if ranks:
            self._heal(ranks, failed=failed)
        if self._course.mixed:
            self._level()

    def _heal(self, ranks: tuple[int, ...], *, failed: bool) -> None:
        """Some have half a step: they get the state of one that has all of it."""
        offset = self._everybody.size - self._crew.size
        broken = {rank - offset for rank in ranks}
        named = ", ".join(self._course.names[rank] for rank in sorted(broken))
        whole = [rank for rank in range(self._crew.size) if rank not in broken]
        if not whole:
            raise TrainingBroken(
                f"the optimizer of {named} ran out of memory in step {self._now.step}, and left "
                "no replica that is whole",
                hint="go on from the last checkpoint (resume=...), with less on the device",
            )
        self._warn(
            f"the optimizer of {named} ran out of memory in step {self._now.step}; its replica "
            f"is taken from {self._course.names[whole[0]]}"
        )
        mine = self._replica.state() if self._crew.rank == whole[0] else None
        tree = share(self._crew, mine, whole[0])
        if failed:
            give_back(self._replica.device)
            for parameter in self._replica.model.parameters():
                parameter.grad = None
            self._replica.load(tree)

    def _level(self) -> None:
        """The first replica's values for all: theirs differ by rounding."""
        peers = range(self._crew.size)
        with torch.no_grad():
            for tensor in self._replica.model.state_dict().values():
                value = tensor.contiguous()
                self._crew.spread(value, 0, peers).wait()
                tensor.copy_(value)

    # -- accounts ---------------------------------------------------------------------------------

    def _account(self, loss: float | None) -> None:
        """Log, evaluate and save where it is time. One row has it all: loggers take a step once."""
        course, now = self._course, self._now
        row: dict[str, float] = {}
        if now.step % course.log_every == 0:
            row |= {} if loss is None else {"train/loss": loss}
            row |= self._figures()
        last = now.step == course.steps
        halt = now.step % course.eval_every == 0
        if (halt or last) and self._judge is not None:
            row |= self._evaluated()
        if row:
            self._keep(row)
        if halt and not last:
            self._save()

    def _figures(self) -> dict[str, float]:
        time_s, rows = time.monotonic(), self._rows_since
        passed, self._since, self._rows_since = time_s - self._since, time_s, 0
        waited, self._waited = self._feed.wait_s - self._waited, self._feed.wait_s
        return {
            "lr": rate_of(self._replica.optimizer),
            "epoch": float(self._course.calendar.span(self._now.step - 1).epoch),
            "perf/samples_per_s": rows / max(passed, 1e-9),
            "data/wait_s": waited,
            "data/bad": float(self._num_bad),
            "oom/skipped": float(self._now.skipped),
        }

    def _evaluated(self) -> dict[str, float]:
        assert self._judge is not None
        found = self._judge.scores(
            self._replica.model,
            self._replica.device,
            self._crew,
            pieces=self._now.pieces,
            on_oom=self._course.on_oom,
        )
        if not found:
            self._warn(
                f"a device ran out of memory in the evaluation after step {self._now.step}, "
                "which is left out"
            )
        if "val/loss" in found:
            self._replica.pace.scored(found["val/loss"])
        return found

    def _keep(self, row: dict[str, float]) -> None:
        self._history.append({"step": float(self._now.step), **row})
        if self._log is not None:
            self._log(row, self._now.step)

    def _save(self, *, last: bool = False) -> None:
        where = self._course.save
        if where is None or self._crew.rank:
            return
        try:
            save(where, self._course.terms, self._now, self._replica.state())
        except CheckpointError as error:
            if last:
                raise
            self._warn(f"no checkpoint of step {self._now.step}: {error.message}")

    def _short(self, verdict: Verdict) -> str:
        offset = self._everybody.size - self._crew.size
        return ", ".join(self._course.names[rank - offset] for rank in verdict.short)

    def _warn(self, text: str) -> None:
        if self._crew.rank == 0:
            log.warning("%s", text)


def _said(kinds: Mapping[str, str]) -> str:
    return f"{kinds['optimizer']} and {kinds['sched'] or 'no torch scheduler'}"
