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
import re
import shlex
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Self

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from manyhands.core.address import redact
from manyhands.core.errors import CheckpointError, LinkError, UsageError
from manyhands.core.plan import Plan, ScheduleName
from manyhands.stages.archive import Archive
from manyhands.stages.batch import Batch, Call, Opening, Tensors, opening_of
from manyhands.stages.carrier import Carrier, carrier_for
from manyhands.stages.errors import PlanBroken, StepFailed
from manyhands.stages.layers import Model, Running
from manyhands.stages.mail import Mail
from manyhands.stages.moves import Rows, rows_at
from manyhands.stages.part import MakeOptimizer, Part
from manyhands.stages.rehearsal import rehearse
from manyhands.stages.schedule import Action, Orders, orders_of, picture
from manyhands.stages.step import LossFn, Step, joined, output_names
from manyhands.stages.terms import Terms, agree
from manyhands.stages.traffic import Traffic
from manyhands.stages.values import Given, Table
from manyhands.stages.vote import Verdict, vote, words_of


class _Course(NamedTuple):
    """Everything about a step that depends on the plan and the kind of its inputs only."""

    orders: Orders
    table: Table
    traffic: Traffic


class Pipeline:
    """One peer's end of a plan. Not thread-safe; all peers call the same methods in one order.

    `model`: nn.Sequential, a list of modules or of (class, kwargs, input shape), or what `mh.cut`
    gives. Only this peer's layers are built or kept. `group` is a torch process group whose ranks
    are the plan's peers; without one, the default group, or nobody else. With `seed`, random
    numbers of a layer depend on (seed, step, microbatch, layer), in a wide stage on this peer's
    rows too, and on nothing else of the plan.
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
        targets: Literal["last", "first"] = "last",
        loss_is: Literal["mean", "sum"] = "mean",
        clip_norm: float | None = None,
        seed: int | None = None,
    ) -> None:
        self.plan, self.device = plan, torch.device(device)
        self._loss_fn, self._targets_come_first = loss_fn, targets == "first"
        self._loss_is_mean, self._clip_norm, self._seed = loss_is == "mean", clip_norm, seed
        self._has_optimizer = optimizer is not None
        self._carrier = carrier_for(group, self.device)
        self.me = self._carrier.rank
        self.num_steps = 0
        self._saved: tuple[str, int] | None = None  # the newest checkpoint
        self._training = True
        self._tables: dict[tuple[Given, bool, bool], Table] = {}
        self._courses: dict[tuple[Any, ...], _Course] = {}
        self._half: tuple[Step, Batch, _Course] | None = None  # a forward without its backward
        self._broken: str | None = None  # why nothing goes on
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
        applied the step. Raises PlanBroken when a peer is gone.
        """
        if self._loss_fn is None:
            raise UsageError("step() needs a loss", hint="Pipeline(..., loss_fn=...)")
        self._need_optimizer("step")
        with self._carrying(), torch.enable_grad():
            batch, course = self._open(inputs, targets, extra, call="step")
            step = self._step(batch, course, self._loss_fn)
            self._part.zero()
            step.run(course.orders[self.me])
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
            batch, course = self._open(inputs, targets, extra, call="evaluate")
            step = self._step(batch, course, self._loss_fn)
            step.run(_forwards(course.orders[self.me]))
            return self._finish(step, batch, apply=False)

    def predict(
        self, inputs: Tensors | None = None, extra: Mapping[str, Tensor] | None = None
    ) -> Tensor | tuple[Tensor, ...] | None:
        """The output of one batch, without gradients: on each peer of the last stage its rows."""
        with self._carrying(), torch.no_grad():
            batch, course = self._open(inputs, None, extra, call="predict")
            step = self._step(batch, course, None)
            step.run(_forwards(course.orders[self.me]))
            self._finish(step, batch, apply=False)
            return self._output(step, course)

    def forward(
        self, inputs: Tensors | None = None, extra: Mapping[str, Tensor] | None = None
    ) -> Tensor | tuple[Tensor, ...] | None:
        """The first half of a step, for a loop that computes its loss itself: as `predict`, but a
        `backward` must follow. All microbatches go forward before any goes back.
        """
        with self._carrying(), torch.enable_grad():
            batch, course = self._open(inputs, None, extra, call="forward")
            step = self._step(batch, course, None)
            step.run(_forwards(course.orders[self.me]))
            self._finish(step, batch, apply=False, keep=True)
            self._half = step, batch, course
            return self._output(step, course)

    def backward(self, gradients: Tensor | tuple[Tensor, ...] | None = None) -> None:
        """The second half: the gradients of what `forward` returned here, if it returned anything.

        Gradients of parameters add up until `apply`; after a StepFailed none are left, anywhere.
        """
        if self._half is None:
            raise UsageError("backward() without a forward()", hint="call forward(inputs) first")
        step, batch, course = self._half
        self._half = None
        with self._carrying(), torch.enable_grad():
            step.run(
                [action for action in course.orders[self.me] if action.direction == "B"],
                self._cutter(batch, course, gradients),
            )
            step.finish()
            try:
                self._vote(step, 0.0)
            except StepFailed:
                self._part.zero()  # some peers have added theirs, some have not
                raise
            finally:
                self._forget()

    def apply(self) -> None:
        """The optimizer's step with the gradients that `backward` has made, then none are left."""
        self._need_optimizer("apply")
        with self._carrying():
            self._part.sum_gradients(None)
            self._apply(self._vote(None, self._squares()).squares)

    # -- checkpoints ------------------------------------------------------------------------------

    def save(self, url: str, extra: Mapping[str, Any] | None = None, *, keep: int = 3) -> None:
        """Write a checkpoint to a folder or URL that all peers reach; all peers call it.

        The newest `keep` stay. `extra` is plain data, of the first peer. Raises CheckpointError, on
        all peers; the run can go on.
        """
        if keep < 1:
            raise UsageError(f"keep={keep} checkpoints", hint="at least one, the newest")
        with self._carrying():
            self._archive.save(url, self.num_steps, extra or {}, keep=keep)
            self._saved = url, self.num_steps

    def load(self, url: str) -> dict[str, Any] | None:
        """Go on from the newest checkpoint that is whole, made by any plan; all peers call it.

        Returns its `extra`, or None when there is none. Raises CheckpointError when there are only
        broken ones.
        """
        with self._carrying():
            resumed = self._archive.load(url)
        if resumed is None:
            return None
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
        inputs: Tensors | None,
        targets: Tensors | None,
        extra: Mapping[str, Tensor] | None,
        *,
        call: Call,
    ) -> tuple[Batch, _Course]:
        """Agree on what the step is about; rehearse it, if it is of a new kind."""
        if self._half is not None:
            raise UsageError("a forward() waits for its backward()")
        first = self.plan.stages[0]
        said = None
        if self.me == first.lead:
            routed = targets if self._targets_come_first else None
            said = msgspec.msgpack.encode(opening_of(call, self._training, inputs, extra, routed))
        opening = msgspec.msgpack.decode(self._carrier.say(said, first.lead), type=Opening)
        if (opening.call, opening.training) != (call, self._training):
            # The others are in the middle of another thing: whatever this peer does, it ends here.
            lead = self.plan.peers[first.lead]
            raise PlanBroken(
                f"peer {lead} is in {_said(opening.call, opening.training)}, "
                f"this one in {_said(call, self._training)}: all peers make the same calls"
            )
        if opening.error is not None:
            raise UsageError(opening.error, hint=opening.hint)
        batch = Batch(opening, self.plan.microbatches, inputs, extra, targets, self.device)
        return batch, self._course(opening.given, batch, backward=call in ("step", "forward"))

    def _course(self, given: Given, batch: Batch, *, backward: bool) -> _Course:
        key = (given, self._training, backward)
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = rehearse(
                self.plan, self._part.runners, self._carrier, given, batch.rows[0], self.device
            )
        of_batch = (*key, batch.rows, self.plan.schedule)
        course = self._courses.get(of_batch)
        if course is None:
            orders = orders_of(self.plan)
            traffic = Traffic(self.plan, orders, table, batch.rows, backward=backward)
            course = self._courses[of_batch] = _Course(orders, table, traffic)
        return course

    def _step(self, batch: Batch, course: _Course, loss_fn: LossFn | None) -> Step:
        return Step(
            self.plan,
            self.me,
            self._part.runners,
            course.table,
            course.traffic,
            Mail(self._carrier, course.traffic, self.device),
            batch,
            loss_fn=loss_fn,
            loss_is_mean=self._loss_is_mean,
            seeds=None if self._seed is None else (self._seed, self.num_steps),
            device=self.device,
        )

    def _finish(self, step: Step, batch: Batch, *, apply: bool, keep: bool = False) -> float:
        step.finish()
        if self._carrier.size == 1 and step.failure is None:
            # Nobody to agree with: the loss is read last, so that a GPU is not waited for before.
            if not keep:
                self._forget()
            if apply:
                self._apply(self._squares())
            return step.loss
        squares = 0.0
        if apply:
            self._part.sum_gradients(batch)
            squares = self._squares()
        try:
            loss, squares = self._vote(step, squares)
        except StepFailed:
            self._forget()
            if apply:
                self._part.zero()
            raise
        if not keep:
            self._forget()
        if apply:
            self._apply(squares)
        return loss

    def _vote(self, step: Step | None, squares: float) -> Verdict:
        failure = None if step is None else step.failure
        loss = 0.0 if step is None or failure is not None else step.loss
        return vote(self._carrier, self.plan.peers, failure=failure, loss=loss, squares=squares)

    def _apply(self, squares: float) -> None:
        factor = 1.0
        if self._clip_norm is not None:
            factor = self._clip_norm / (squares**0.5 + 1e-6)  # as torch clips
            factor = 1.0 if factor > 1.0 else factor  # what is no number stays none, everywhere
        self._part.apply(factor)
        self.num_steps += 1

    def _squares(self) -> float:
        return 0.0 if self._clip_norm is None else self._part.squares()

    def _output(self, step: Step, course: _Course) -> Tensor | tuple[Tensor, ...] | None:
        if not step.outputs:
            return None
        last = len(self.plan.stages) - 1
        parts = tuple(
            joined([made[name] for made in step.outputs.values()])
            for name in output_names(course.table, last)
        )
        return parts[0] if course.table.rehearsed[last].single else parts

    def _cutter(
        self, batch: Batch, course: _Course, gradients: Tensor | tuple[Tensor, ...] | None
    ) -> Callable[[int, Rows], Mapping[str, Tensor]]:
        """Whose rows are whose, of the gradients of all microbatches of this peer."""
        last = self.plan.stages[-1]
        names = output_names(course.table, last.index)
        given = (gradients,) if isinstance(gradients, Tensor) else gradients or ()

        def cut(microbatch: int, rows: Rows) -> Mapping[str, Tensor]:
            if len(given) != len(names):
                raise UsageError(f"{len(given)} gradients for {len(names)} outputs")
            before = sum(len(rows_at(last, self.me, n)) for n in batch.rows[:microbatch])
            span = slice(before, before + len(rows))
            return {name: g[span].to(self.device) for name, g in zip(names, given, strict=True)}

        return cut

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
            said = error.message if isinstance(error, PlanBroken) else words_of(error)
            broken = self._break(f"peer {self.plan.peers[self.me]} gave up: {said}")
            self._carrier.give_up(f"{said} on peer {self.plan.peers[self.me]}")
            if isinstance(error, Exception):
                raise broken from error
            raise  # Ctrl-C, or the end of the program

    def _break(self, reason: str) -> PlanBroken:
        # Links speak of ranks: which peers of the plan are these?
        ranks = {int(rank) for rank in re.findall(r"\brank (\d+) \(", reason)}
        names = {
            rank: self.plan.peers[rank] for rank in sorted(ranks) if rank < len(self.plan.peers)
        }
        legend = ", ".join(f"rank {rank} is peer {name}" for rank, name in names.items())
        self._broken = reason = f"{reason} ({legend})" if legend else reason
        return PlanBroken(reason, hint=self._again())

    def _again(self) -> str:
        saved = self._saved is not None
        command = again(len(self.plan.peers), os.environ, sys.argv, saved=saved)
        if self._saved is None:
            return f"nothing was saved; to start anew with the peers that are left: {command}"
        url, num_steps = self._saved
        return (
            f"to go on after step {num_steps} with the peers that are left, from what is saved in "
            f"{redact(url)}, on a plan for them: {command}"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop what is held. The process group is the caller's. Idempotent."""
        self._forget()

    def _forget(self) -> None:
        self._part.forget()
        self._half = None


def again(
    num_peers: int, environ: Mapping[str, str], arguments: Sequence[str], *, saved: bool = True
) -> str:
    """The command that starts this program once more, for one peer less than these.

    Of a launcher that started only some of them nobody here knows which are left: its command is
    said as it was, for the machines that are.
    """
    left = str(max(1, num_peers - 1))
    said = environ.get("MANYHANDS_AGAIN")
    if said is not None:
        words = shlex.split(said)
        # `manyhands run` puts its own options first, and --resume after them.
        options = words[: words.index("--resume")] if "--resume" in words else []
        if ["-n", str(num_peers)] in [options[i : i + 2] for i in range(len(options))]:
            for option in {"-n", "--min-peers"} & {*options}:
                words[words.index(option) + 1] = left
        if options and not saved:
            words.remove("--resume")
        return shlex.join(words)
    if environ.get("LOCAL_WORLD_SIZE") == str(num_peers):
        return shlex.join(["torchrun", "--nproc-per-node", left, *arguments])
    return shlex.join(["python", *arguments])


def _said(call: Call, training: bool) -> str:
    return f"{call}() in {'training' if training else 'evaluation'} mode"


def _forwards(order: Sequence[Action]) -> list[Action]:
    return [action for action in order if action.direction == "F"]
