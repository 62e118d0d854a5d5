"""Pipeline: a model that runs as a plan says, on this peer and the others.

    plan = mh.Plan.of_stages([(3, [0]), (2, [1])], microbatches=8)
    with mh.Pipeline(model, plan, loss_fn=F.cross_entropy,
                     optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3)) as pipe:
        for x, y in loader:
            loss = pipe.step(x, y)

All peers run the same program. Those of the first stage pass the inputs, those of the last one the
targets; whoever passes neither follows.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, Self, get_args

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from manyhands.core.errors import CheckpointError, LinkError, UsageError
from manyhands.core.plan import Plan, ScheduleName
from manyhands.stages.archive import Archive
from manyhands.stages.batch import Batch, Call, Mode, Opening, Tensors, heard, opening_of
from manyhands.stages.carrier import Carrier, carrier_for
from manyhands.stages.course import Course
from manyhands.stages.errors import PlanBroken, StepFailed
from manyhands.stages.layers import Model, Running
from manyhands.stages.mail import Mail
from manyhands.stages.part import MakeOptimizer, Part
from manyhands.stages.precision import casting, forget_casts, precision_of, said
from manyhands.stages.recent import Recent
from manyhands.stages.rehearsal import rehearse
from manyhands.stages.resume import again, gone, hint, named
from manyhands.stages.saving import Scheduler
from manyhands.stages.schedule import picture
from manyhands.stages.step import LossFn, LossIs, Step, check_count
from manyhands.stages.terms import Terms, agree, check_choice
from manyhands.stages.values import Table
from manyhands.stages.vote import Verdict, vote, words_of

Targets = Literal["last", "first"]
"""Which stage's peers are given the targets."""

MAX_TABLES = 1024
"""Kinds of batches that are remembered: one more is rehearsed, which takes about a forward."""

MAX_COURSES = 128
"""Kinds and sizes of batches of which it is remembered who does what."""


class Pipeline:
    """One peer's end of a plan. Not thread-safe; all peers call the same methods in one order.

    `model`: nn.Sequential, a list of modules or of (class, kwargs, input shape), or what `mh.cut`
    gives. Only this peer's layers are built or kept. `group` is a torch process group whose ranks
    are the plan's peers; without one, the default group, or nobody else. With `seed`, random
    numbers of a layer depend on (seed, step, microbatch, layer), in a wide stage on this peer's
    rows too, and on nothing else of the plan. `loss_is` says what `loss_fn` returns for some rows:
    "mean", their mean; "sum", something to be added up; "counted", a sum and what it is over,
    such as (the sum over all tokens that are not ignored, their number).
    """

    def __init__(
        self,
        model: Model,
        plan: Plan,
        *,
        loss_fn: LossFn | None = None,
        optimizer: MakeOptimizer | None = None,
        group: dist.ProcessGroup | Carrier | None = None,
        device: torch.device | str = "cpu",
        targets: Targets = "last",
        loss_is: LossIs = "mean",
        clip_norm: float | None = None,
        seed: int | None = None,
    ) -> None:
        check_choice("targets", targets, get_args(Targets))
        check_choice("loss_is", loss_is, get_args(LossIs))
        self.plan, self.device = plan, torch.device(device)
        self._first = plan.stages[0]
        self._loss_fn, self._targets_come_first = loss_fn, targets == "first"
        self._loss_is: LossIs = loss_is
        self._clip_norm, self._seed = clip_norm, seed
        self._has_optimizer = optimizer is not None
        self._carrier = carrier_for(group, self.device)
        self.me = self._carrier.rank
        self.num_steps = 0
        self._saved: tuple[str, int] | None = None  # the newest checkpoint
        self._training = True
        # All peers ask for the same kinds in the same order, so they forget the same ones.
        self._tables = Recent[Hashable, Table](MAX_TABLES)
        self._courses = Recent[Hashable, Course](MAX_COURSES)
        self._half: tuple[Step, Course] | None = None  # a forward without its backward
        self._broken: str | None = None  # why nothing goes on
        self._num_gone = 1  # then: one at least cannot go on
        terms = Terms(
            plan=plan.to_json(),
            loss_fn=loss_fn is not None,
            optimizer=optimizer is not None,
            targets=targets,
            loss_is=loss_is,
            clip_norm=clip_norm,
            seed=seed,
        )
        with self._carrying():
            agree(self._carrier, plan, terms)
            self._part = Part(
                model,
                plan,
                self._carrier,
                device=self.device,
                optimizer=optimizer,
                seed=seed or 0,
            )
        self._archive = Archive(plan, self._part, self._carrier)

    @property
    def optimizer(self) -> Optimizer | None:
        """Of this peer's parameters, if it has any: for learning rates and the like."""
        return self._part.optimizer

    @property
    def has_gradients(self) -> bool:
        """Whether a `backward` was made that no `apply` has used; the same on all peers."""
        return self._part.has_gradients

    def picture(self) -> str:
        """As text: which layers are where, and who works on which microbatch when."""
        return f"{self.plan.picture()}\n\n{picture(self.plan)}"

    def optimize(self, make: MakeOptimizer) -> None:
        """Another optimizer, without state, for this peer's parameters; each peer does it itself.

        Raises what the optimizer raises.
        """
        self._part.optimize(make)
        self._has_optimizer = True

    def reschedule(self, microbatches: int, schedule: ScheduleName) -> None:
        """Another schedule for the same stages; all peers call it, between two steps."""
        self.plan = self.plan.replace(microbatches=microbatches, schedule=schedule)

    def layers(self) -> Iterator[Running]:
        """This peer's, in order."""
        return self._part.layers()

    def train(self, mode: bool = True) -> Self:
        """As nn.Module.train; all peers call it."""
        self._training = mode
        self._part.train(mode)
        return self

    def eval(self) -> Self:
        """As nn.Module.eval; all peers call it."""
        return self.train(False)

    # -- steps ------------------------------------------------------------------------------------

    def step(
        self,
        inputs: Tensors | None = None,
        targets: Tensors | None = None,
        extra: Mapping[str, Tensor] | None = None,
    ) -> float:
        """Forward, backward, and the optimizer, on one batch; returns its loss, on every peer.

        Raises StepFailed, on every peer, when layers or loss of one of them failed: then none has
        applied the step, and running statistics are as before it. Raises PlanBroken when a peer is
        gone.
        """
        if self._loss_fn is None:
            raise UsageError("step() needs a loss", hint="Pipeline(..., loss_fn=...)")
        self._need_optimizer("step")
        with self._carrying(), torch.enable_grad():
            if self.has_gradients:
                raise UsageError("gradients wait for apply()", hint="call it, or zero()")
            step, batch, course = self._open("step", inputs, targets, extra, self._loss_fn)
            self._part.zero()
            step.run(course.duties)
            return self._finish(step, batch, apply=True)

    def evaluate(
        self,
        inputs: Tensors | None = None,
        targets: Tensors | None = None,
        extra: Mapping[str, Tensor] | None = None,
    ) -> float:
        """The loss of one batch, on every peer, without gradients."""
        if self._loss_fn is None:
            raise UsageError("evaluate() needs a loss", hint="Pipeline(..., loss_fn=...)")
        with self._carrying(), torch.no_grad():
            step, batch, course = self._open("evaluate", inputs, targets, extra, self._loss_fn)
            step.run(course.forwards)
            return self._finish(step, batch)

    def predict(
        self, inputs: Tensors | None = None, extra: Mapping[str, Tensor] | None = None
    ) -> Tensor | tuple[Tensor, ...] | None:
        """The output of one batch, without gradients: on each peer of the last stage its rows."""
        with self._carrying(), torch.no_grad():
            step, batch, course = self._open("predict", inputs, None, extra)
            step.run(course.forwards)
            self._finish(step, batch)
            return step.output()

    def forward(
        self, inputs: Tensors | None = None, extra: Mapping[str, Tensor] | None = None
    ) -> Tensor | tuple[Tensor, ...] | None:
        """The first half of a step, for a loop that computes its loss itself: as `predict`, but a
        `backward` must follow. All microbatches go forward before any goes back.
        """
        with self._carrying(), torch.enable_grad():
            step, batch, course = self._open("forward", inputs, None, extra)
            step.run(course.forwards)
            self._finish(step, batch, keep=True)
            self._half = step, course
            return step.output()

    def backward(self, gradients: Tensor | tuple[Tensor, ...] | None = None) -> None:
        """The second half: the gradients of what `forward` returned here, if it returned anything.

        Gradients of parameters add up until `apply`; after a StepFailed none are left, anywhere.
        """
        if self._half is None:
            raise UsageError("backward() without a forward()", hint="call forward(inputs) first")
        step, course = self._half
        self._half = None
        with self._carrying(), torch.enable_grad():
            given = (gradients,) if isinstance(gradients, Tensor) else gradients or ()
            step.run(course.backwards, given)
            step.finish()
            try:
                self._vote(step)
                self._part.has_gradients = True
            except StepFailed:
                self._undo(zero=True)  # some peers have added their gradients, some have not
                raise
            finally:
                self._forget()

    def apply(self) -> None:
        """The optimizer's step with the gradients that `backward` has made, then none are left."""
        self._need_optimizer("apply")
        with self._carrying(), casting(self.device, None):
            self._part.sum_gradients(None)
            self._apply(self._vote(None, self._squares()).squares)

    # -- checkpoints ------------------------------------------------------------------------------

    def save(
        self,
        url: str,
        extra: Mapping[str, Any] | None = None,
        *,
        keep: int = 3,
        scheduler: Scheduler | None = None,
    ) -> None:
        """Write a checkpoint to a folder or URL that all peers reach; all peers call it.

        The newest `keep` stay. `extra` is plain data, of the first peer. `scheduler` is this
        peer's, of its optimizer, if it has one. Raises CheckpointError, on all peers; the run can
        go on.
        """
        if keep < 1:
            raise UsageError(f"keep={keep} checkpoints", hint="at least one, the newest")
        with self._carrying():
            self._archive.save(url, self.num_steps, extra or {}, keep=keep, scheduler=scheduler)
            self._saved = url, self.num_steps

    def load(self, url: str, *, scheduler: Scheduler | None = None) -> dict[str, Any] | None:
        """Go on from the newest checkpoint that is whole, made by any plan; all peers call it.

        Returns its `extra`, or None when there is none. `scheduler` then is where that of whoever
        had these layers was. Raises CheckpointError when there are only broken ones.
        """
        with self._carrying():
            resumed = self._archive.load(url, scheduler=scheduler)
        if resumed is None:
            return None
        self._forget()
        self._part.zero()  # what waits for apply() is of other parameters
        self.num_steps = resumed.num_steps
        self._saved = url, self.num_steps
        return resumed.extra

    def _need_optimizer(self, what: str) -> None:
        if not self._has_optimizer:
            raise UsageError(
                f"{what}() needs an optimizer",
                hint="Pipeline(..., optimizer=lambda parameters: torch.optim.SGD(parameters, ...))",
            )

    # -- parts of a step --------------------------------------------------------------------------

    def _open(
        self,
        call: Call,
        inputs: Tensors | None,
        targets: Tensors | None,
        extra: Mapping[str, Tensor] | None,
        loss_fn: LossFn | None = None,
    ) -> tuple[Step, Batch, Course]:
        """Agree on what the step is about; rehearse it, if it is of a new kind."""
        if self._half is not None:
            raise UsageError("a forward() waits for its backward()")
        mode = Mode(call, self._training, precision_of(self.device))
        opening = self._heard(mode, inputs, targets, extra)
        lead = self.plan.peers[self._first.lead]
        if (opening.mode.call, opening.mode.training) != (call, self._training):
            # The others are in the middle of another thing: whatever this peer does, it ends here.
            raise PlanBroken(
                f"peer {lead} is in {opening.mode}, this one in {mode}: all peers make the same "
                "calls"
            )
        unfit = None
        if opening.mode.precision != mode.precision:
            unfit = UsageError(
                f"peer {lead} computes {said(opening.mode.precision)}, "
                f"peer {self.plan.peers[self.me]} {said(mode.precision)}",
                hint="all peers call the pipeline in the same `with torch.autocast(...)`, or none",
            )
        if opening.error is not None:
            raise UsageError(opening.error, hint=opening.hint)
        forget_casts(self.device)
        batch = Batch(opening, self.plan.microbatches, inputs, extra, targets, self.device)
        course = self._course(opening, batch, unfit)
        if self._training:
            self._part.note()
        step = Step(
            course,
            self._part.runners,
            Mail(self._carrier, course, self.device),
            batch,
            loss_fn=loss_fn,
            loss_is=self._loss_is,
            seeds=None if self._seed is None else (self._seed, self.num_steps),
            device=self.device,
        )
        if unfit is not None:
            step.fail(unfit, None)
        return step, batch, course

    def _heard(
        self,
        mode: Mode,
        inputs: Tensors | None,
        targets: Tensors | None,
        extra: Mapping[str, Tensor] | None,
    ) -> Opening:
        lead = self._first.lead
        own = None
        if self.me == lead:
            own = opening_of(mode, inputs, extra, targets if self._targets_come_first else None)
            if self._carrier.size == 1:
                return own
        words = None if own is None else msgspec.msgpack.encode(own)
        return heard(self._carrier.say(words, lead), self.plan.peers[lead], mode)

    def _course(self, opening: Opening, batch: Batch, unfit: UsageError | None) -> Course:
        mode, given = opening.mode, opening.given
        backward = mode.call in ("step", "forward")
        kind = (given, mode.training, mode.precision, backward)
        # Of a step in halves all microbatches go forward before any goes back.
        halves = mode.call == "forward"
        plan = self.plan.replace(schedule="afab") if halves else self.plan

        def table() -> Table:
            rows = batch.rows[0]
            parts = self.plan, self._part.runners, self._carrier
            return rehearse(*parts, given, rows, self.device, unfit=unfit)

        def course() -> Course:
            found = self._tables.get(kind, table)
            return Course(plan, self.me, found, batch.microbatches, backward=backward)

        return self._courses.get((kind, batch.rows, plan.schedule), course)

    def _finish(
        self, step: Step, batch: Batch, *, apply: bool = False, keep: bool = False
    ) -> float:
        """Agree on how it went, and apply it, or undo what was done."""
        step.finish()
        counted = step.has_loss and self._loss_is == "counted"
        with casting(self.device, None):
            squares = 0.0
            if apply:
                self._part.sum_gradients(batch)
                squares = self._squares()
            try:
                verdict = None
                if self._carrier.size > 1 or step.failure is not None:
                    verdict = self._vote(step, squares)
                    squares = verdict.squares
                count = 1.0
                if counted:
                    count = step.count if verdict is None else verdict.counted
                    check_count(count)
            except (StepFailed, UsageError):
                self._forget()
                self._undo(zero=apply)
                raise
            if not keep:
                self._forget()
            if apply:
                self._apply(squares, count)
        forget_casts(self.device)
        # Nobody to agree with: the loss is read last, so that a GPU is not waited for before.
        return (step.loss if verdict is None else verdict.loss) / count

    def _vote(self, step: Step | None, squares: float = 0.0) -> Verdict:
        failure = None if step is None else step.failure
        loss, count = 0.0, 0.0
        if step is not None and failure is None:
            loss, count = step.loss, step.count
        return vote(
            self._carrier,
            self.plan.peers,
            failure=failure,
            loss=loss,
            squares=squares,
            count=count,
        )

    def _undo(self, *, zero: bool) -> None:
        """A step that failed leaves no trace."""
        if self._training:
            self._part.put_back()
        if zero:
            self._part.zero()

    def _apply(self, squares: float, count: float = 1.0) -> None:
        factor = 1.0 / count
        if self._clip_norm is not None:
            clip = self._clip_norm / (squares**0.5 * factor + 1e-6)  # as torch clips
            factor *= 1.0 if clip > 1.0 else clip  # what is no number stays none, everywhere
        self._part.apply(factor)
        self.num_steps += 1

    def _squares(self) -> float:
        return 0.0 if self._clip_norm is None else self._part.squares()

    # -- life -------------------------------------------------------------------------------------

    @contextmanager
    def _carrying(self) -> Generator[None]:
        """What ends this peer's part in the middle of something ends the plan, for all peers.

        Errors that all peers have heard of, at a vote or an opening, end nothing.
        """
        if self._broken is not None:
            raise PlanBroken(self._broken, hint=self._again())
        try:
            yield
        except (StepFailed, CheckpointError, UsageError):
            raise
        except LinkError as error:
            raise self._break(error.message) from error
        except BaseException as error:
            text = error.message if isinstance(error, PlanBroken) else words_of(error)
            broken = self._break(f"peer {self.plan.peers[self.me]} gave up: {text}")
            self._carrier.give_up(f"{text} on peer {self.plan.peers[self.me]}")
            if isinstance(error, Exception):
                raise broken from error
            raise  # Ctrl-C, or the end of the program

    def _break(self, reason: str) -> PlanBroken:
        self._broken, self._num_gone = named(reason, self.plan.peers), len(gone(reason)) or 1
        return PlanBroken(self._broken, hint=self._again())

    def _again(self) -> str:
        saved = self._saved is not None
        command = again(
            len(self.plan.peers), os.environ, sys.argv, num_gone=self._num_gone, saved=saved
        )
        return hint(command, self._saved)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def zero(self) -> None:
        """Drop gradients that no `apply` has used; all peers call it."""
        self._part.zero()

    def close(self) -> None:
        """Drop what is held. The process group is the caller's. Idempotent."""
        self._forget()

    def _forget(self) -> None:
        self._part.forget()
        self._half = None
