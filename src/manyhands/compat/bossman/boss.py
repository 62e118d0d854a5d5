"""BossMan: a model on several workers, trained by a loop that looks like any other.

In the plan the boss is a peer, too: it gives the input to the first worker and gets the output
from the last one. What workers tell each other goes from worker to worker.
"""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.collectives.backend.group import ManyhandsGroup
from manyhands.collectives.backend.open import open_group
from manyhands.compat.bossman.crew import Crew, Outcome, Worker
from manyhands.compat.bossman.deal import check_interleaved, deal
from manyhands.compat.bossman.entries import entries_of, key_of
from manyhands.compat.bossman.errors import WorkerFailed, WorkerRefused
from manyhands.compat.bossman.variables import Variable, variables_of
from manyhands.core.boss import lines_for, listening
from manyhands.core.errors import LinkBroken, LinkError, UsageError
from manyhands.core.plan import Plan, ScheduleName
from manyhands.links.hub import Hub
from manyhands.stages import commands as words
from manyhands.stages.carrier import exchanging
from manyhands.stages.errors import PlanBroken, StepFailed
from manyhands.stages.layers import Spec, specs_of
from manyhands.stages.optimizers import check_steps
from manyhands.stages.pipeline import Pipeline
from manyhands.stages.precision import casting, precision_here
from manyhands.stages.recipes import Recipe, describe
from manyhands.wire.tensors import empty, spec_of

T = TypeVar("T")
Tensors = Tensor | tuple[Tensor, ...]
LossFn = Callable[[Any, Any], Tensor]
_MAX_TENSOR_BYTES = 1 << 40
_AGAIN = "to go on with those who are here: await boss.distribute_model(), and load_state_dict"


class BossMan:
    """All methods but `gather_dependencies` are awaited, one at a time.

    `model` is a list of (class, kwargs, input shape). Layers are made where they run; what their
    first values are depends on `seed`, or on torch's own. `device` is where predictions are.
    """

    def __init__(
        self,
        workers: Crew,
        model: list[Any],
        *,
        device: torch.device | str = "cpu",
        seed: int | None = None,
    ) -> None:
        self._crew, self._device = workers, torch.device(device)
        self._specs = _specs(model)
        self._seed = int(torch.randint(1 << 62, ())) if seed is None else seed
        self._workers: list[Worker] = []  # of the plan, in its order
        self._group: ManyhandsGroup | None = None
        self._pipeline: Pipeline | None = None
        self._optimized = False
        self._prediction: Tensors | None = None  # that waits for its backward
        self._loss_fn: LossFn | None = None

    @staticmethod
    async def setup_host(
        num_workers: int,
        *,
        host: str | None = None,
        port: int | None = None,
        insecure: bool = False,
        timeout_s: float = 300.0,
    ) -> Crew:
        """Listen for workers, and return when so many are here.

        On MODEL_HOST (without it: for workers on this machine only) and MODEL_PORT (1024); what
        workers have to set is written to stderr. Raises NoWorkers, which says how many came.
        """
        if num_workers < 1:
            raise UsageError(f"{num_workers} workers", hint="at least one")
        where = listening(os.environ, host=host, port=port, insecure=insecure)
        try:
            hub = Hub(
                where.bind,
                advertise=where.advertise,
                insecure=where.insecure,
                exposed=where.exposed,
            )
        except LinkBroken as error:
            raise LinkBroken(
                error.message, hint="is another boss running there? MODEL_PORT names another port"
            ) from None
        crew = Crew(hub, num_workers)
        lines = "".join(f"    {line}\n" for line in lines_for(crew.address))
        secret = "" if crew.address.insecure else " (a secret)"
        sys.stderr.write(f"for `manyhands worker`, set{secret}:\n\n{lines}\n")
        try:
            await asyncio.to_thread(crew.gather, timeout_s)
        except BaseException:
            crew.close()
            raise
        return crew

    @property
    def plan(self) -> Plan:
        """Which layers are where. Raises UsageError before `distribute_model`."""
        return self._in_plan().plan

    # -- before the first step --------------------------------------------------------------------

    async def distribute_model(self, *, stages_per_worker: int = 1) -> None:
        """Deal the layers to the workers that are here, in proportion to their free memory.

        `train_step(schedule="interleaved")` needs several stages per worker. Raises PlanError for
        fewer layers than that makes stages, UsageError for less than one stage, DoesNotFit (where,
        and by how much), WorkerRefused, WorkerFailed. A model that was distributed before is kept
        if this one cannot be dealt, and forgotten otherwise.
        """
        recipes = [
            describe(spec.kind, spec.kwargs, nn.Module, f"layer {index}")
            for index, spec in enumerate(self._specs)
        ]
        workers = list(self._crew)
        if not workers:
            raise PlanBroken("all workers are gone", hint="start some: setup_host(...)")
        plan = await asyncio.to_thread(deal, self._specs, workers, stages_per_worker)
        await asyncio.to_thread(self._end)
        ranks = {worker: rank for rank, worker in enumerate(workers, 1)}

        def build(number: int, worker: Worker) -> words.Build:
            mine = [range(stage.first, stage.end) for stage in plan.stages_of(ranks[worker])]
            layers = tuple((index, recipes[index - 1]) for own in mine for index in own)
            return words.Build(number, layers, self._seed)

        self._workers = workers
        await self._ask(build)
        run, text = f"plan-{secrets.token_hex(8)}", plan.to_json()
        await self._ask(
            lambda number, worker: words.Enter(number, run, ranks[worker], text, self._seed),
            lambda: self._enter(run, plan),
        )

    async def send_optimizer(self, kind: type[Optimizer], kwargs: Mapping[str, Any]) -> None:
        """Each worker makes one for its parameters.

        Raises UsageError for one that asks for a closure, WorkerRefused, WorkerFailed.
        """
        pipeline = self._in_plan()
        recipe: Recipe = describe(kind, kwargs, Optimizer, "the optimizer")
        check_steps(kind)
        await self._ask(lambda number, _: words.Optimize(number, recipe))
        pipeline.optimize(
            lambda parameters: kind(parameters, **kwargs)
        )  # it has none: no optimizer
        self._optimized = True

    def gather_dependencies(self) -> dict[str, Variable]:
        """Check the variables that layers name in their arguments: who gives, who takes each.

        Those that no layer gives must come with every `forward`. Raises VariableError.
        """
        return variables_of(self._specs)

    # -- steps ------------------------------------------------------------------------------------

    async def forward(self, x: Tensors, extra_inputs: Mapping[str, Tensor] | None = None) -> Any:  # noqa: ANN401  (a tensor, or a tuple where the last layer gives one)
        """The prediction: a leaf, whose `grad` the loss's backward fills.

        A forward before it that had no backward is forgotten. Under `torch.no_grad()` there is
        nothing to go back to; under `torch.autocast` workers cast, too.
        """
        pipeline, extra = self._in_plan(), _checked(x, extra_inputs)
        keep, cast_to = torch.is_grad_enabled(), precision_here()  # of this thread

        def own() -> Any:  # noqa: ANN401
            pipeline.close()
            pipeline.reschedule(1, "afab")
            with casting(self._device, cast_to):
                return pipeline.forward(x, extra) if keep else pipeline.predict(x, extra)

        made = await self._ask(lambda number, _: words.Forward(number, keep, cast_to), own)
        leaves = tuple(_leaf(part, keep) for part in _parts(cast("Tensors", made)))
        self._prediction = leaves if keep else None
        return leaves[0] if isinstance(made, Tensor) else leaves

    async def backward(self, gradient: Tensors | None) -> None:
        """From the gradient of the last prediction, `prediction.grad`. Workers add theirs up."""
        pipeline, waiting = self._in_plan(), self._prediction
        if waiting is None:
            raise UsageError("backward() without a forward()", hint="await boss.forward(x, {})")
        given = () if gradient is None else _parts(gradient)
        shapes = [tuple(part.shape) for part in given]
        wanted = [tuple(part.shape) for part in _parts(waiting)]
        if shapes != wanted:
            raise UsageError(
                f"gradients of shapes {shapes} for predictions of shapes {wanted}",
                hint="call loss.backward(), then await boss.backward(prediction.grad)",
            )
        self._prediction = None
        await self._ask(lambda number, _: words.Backward(number), lambda: pipeline.backward(given))

    async def optim_step(self) -> None:
        """The optimizers' step with the gradients so far; then there are none."""
        pipeline = self._in_plan()
        self._check_optimizer()
        await self._ask(lambda number, _: words.Apply(number), pipeline.apply)

    async def train_step(
        self,
        x: Tensors,
        y: Tensors,
        loss_fn: LossFn,
        microbatches: int = 8,
        schedule: ScheduleName = "1f1b",
        *,
        extra_inputs: Mapping[str, Tensor] | None = None,
    ) -> float:
        """Forward, backward and optimizer at once, in microbatches; returns the batch's loss.

        `loss_fn` is the mean over rows, as torch's losses are by default. It runs here. Under
        `torch.autocast` all peers cast in their forwards.
        """
        pipeline, extra = self._in_plan(), _checked(x, extra_inputs)
        self._check_optimizer()
        if getattr(loss_fn, "reduction", "mean") != "mean":
            raise UsageError(
                f"a loss with reduction={getattr(loss_fn, 'reduction', None)!r}",
                hint='microbatches are put together by their rows: use reduction="mean"',
            )
        if pipeline.has_gradients:
            raise UsageError(
                "gradients of a backward() wait for optim_step()",
                hint="await boss.optim_step() first, or boss.node_mem_clear() to drop them: "
                "train_step() is a step of its own",
            )
        pipeline.plan.replace(microbatches=microbatches, schedule=schedule)  # or a PlanError
        if schedule == "interleaved":
            check_interleaved(self.plan)
        cast_to = precision_here()

        def own() -> float:
            pipeline.close()
            pipeline.reschedule(microbatches, schedule)
            with casting(self._device, cast_to):
                return pipeline.step(x, y, extra)

        self._loss_fn, self._prediction = loss_fn, None
        return await self._ask(
            lambda number, _: words.Step(number, microbatches, schedule, cast_to), own
        )

    async def model_train(self) -> None:
        """As nn.Module.train, on all workers."""
        await self._set_mode(True)

    async def model_eval(self) -> None:
        """As nn.Module.eval, on all workers."""
        await self._set_mode(False)

    async def node_mem_clear(self) -> None:
        """Forget what a forward without backward holds, and gradients that wait for `optim_step`.

        Unused device memory is given back.
        """
        pipeline = self._in_plan()
        self._prediction = None

        def own() -> None:
            pipeline.close()
            pipeline.zero()
            gc.collect()

        await self._ask(lambda number, _: words.Clear(number), own)

    # -- the model's values -----------------------------------------------------------------------

    async def state_dict(self) -> dict[str, Tensor]:
        """All parameters and buffers, as nn.Sequential of the layers would name them."""
        places = await self._describe()
        group = self._entered()

        def own() -> dict[str, Tensor]:
            state: dict[str, Tensor] = {}
            for rank, entries in enumerate(places, 1):
                for entry in entries:
                    tensor = empty(entry.spec, _MAX_TENSOR_BYTES)
                    with exchanging():
                        group.recv([tensor], rank).wait()
                    state[key_of(entry)] = tensor
            return state

        return await self._ask(lambda number, _: words.Fetch(number), own)

    async def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """What `state_dict` gave, from however many workers. Raises UsageError if it does not fit.

        Optimizers keep their own state; gradients that no `optim_step` has used are dropped.
        """
        places = await self._describe()
        pipeline = self._in_plan()
        group = self._entered()
        wanted = {key_of(entry): entry.spec for entries in places for entry in entries}
        if wanted.keys() != state.keys():
            odd = sorted(wanted.keys() ^ state.keys())
            raise UsageError(f"this state is of another model: {', '.join(odd[:4])}")
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
        for name, tensor in plain.items():
            if spec_of(tensor) != wanted[name]:
                raise UsageError(f"{name} is {spec_of(tensor)}, the model has {wanted[name]}")

        def own() -> None:
            with exchanging():
                sent = [
                    group.send([plain[key_of(entry)]], rank)
                    for rank, entries in enumerate(places, 1)
                    for entry in entries
                ]
                for work in sent:
                    work.wait()
            pipeline.zero()

        await self._ask(lambda number, _: words.Load(number), own)

    # -- life -------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Send the workers home. Without it, that happens when the program ends. Idempotent."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._crew.dismiss()  # first: whoever has the first rank leaves a group last
        self._end()
        self._crew.close()

    # -- parts ------------------------------------------------------------------------------------

    def _enter(self, run: str, plan: Plan) -> None:
        try:
            self._group = open_group(
                replace(self._crew.near, run=run),
                rank=0,
                world=len(plan.peers),
                timeout_s=words.OPERATION_S,
                meet_s=words.MEET_S,
                settings=words.SETTINGS,
                called_off=lambda: self._crew.trouble(self._workers),
            )
        except LinkError as error:
            raise PlanBroken(f"the workers did not meet: {error.message}", hint=_AGAIN) from error
        self._pipeline = Pipeline(
            [Spec(nn.Identity, {}, ())] * len(plan.layers),  # of which the boss has two
            plan,
            loss_fn=self._loss,
            group=self._group,
            device=self._device,
            seed=self._seed,
        )

    def _loss(self, output: Any, target: Any) -> Tensor:  # noqa: ANN401
        assert self._loss_fn is not None
        return self._loss_fn(output, target)

    async def _set_mode(self, train: bool) -> None:
        pipeline = self._in_plan()
        await self._ask(lambda number, _: words.Mode(number, train), lambda: pipeline.train(train))

    async def _describe(self) -> list[tuple[words.Entry, ...]]:
        """What state each worker has, in the order of the plan."""
        self._in_plan()
        outcome: Outcome[None] = await self._call(lambda number, _: words.Describe(number), None)
        self._judge(outcome)
        return [
            entries_of(worker.name, outcome.answers[worker], self.plan.stages_of(rank))
            for rank, worker in enumerate(self._workers, 1)
        ]

    async def _ask(
        self, make: Callable[[int, Worker], words.Command], own: Callable[[], T] | None = None
    ) -> T:
        outcome = await self._call(make, own)
        self._judge(outcome)
        return cast("T", outcome.result)

    async def _call(
        self, make: Callable[[int, Worker], words.Command], own: Callable[[], T] | None
    ) -> Outcome[T]:
        try:
            return await asyncio.to_thread(self._crew.call, self._workers, make, own)
        except BaseException:
            # In the middle of something, or cancelled there: nobody shall wait for this peer.
            self._end()
            raise

    def _judge(self, outcome: Outcome[Any]) -> None:
        for worker, answer in outcome.answers.items():
            if isinstance(answer, words.Failed) and answer.kind in ("refused", "error"):
                if answer.ended:
                    self._end()
                kind = WorkerRefused if answer.kind == "refused" else WorkerFailed
                seen = answer.traceback if answer.kind == "error" else ""
                raise kind(worker.name, answer.message, seen, hint=answer.hint, ended=answer.ended)
        error = outcome.error
        if error is None and not outcome.lost:
            for worker, answer in outcome.answers.items():
                if isinstance(answer, words.Failed) and answer.kind == "shared":
                    self._end()  # of an error that all have the boss would know, too
                    raise WorkerFailed(worker.name, answer.message, hint=answer.hint, ended=True)
        broken = [a for a in outcome.answers.values() if isinstance(a, words.Failed) and a.ended]
        if outcome.lost or broken or isinstance(error, PlanBroken):
            self._end()
            names = ", ".join(worker.name for worker in outcome.lost)
            text = error.message if isinstance(error, PlanBroken) else ""
            text = text or (broken[0].message if broken else "the plan is over")
            raise PlanBroken(f"worker {names} is gone" if names else text, hint=_AGAIN) from error
        if error is not None:
            if isinstance(error, StepFailed):
                error.add_note(f"on {error.peer}:\n{error.traceback}")
            raise error

    def _in_plan(self) -> Pipeline:
        if self._pipeline is None:
            raise UsageError(
                "the model is not on the workers", hint="await boss.distribute_model() comes first"
            )
        return self._pipeline

    def _entered(self) -> ManyhandsGroup:
        assert self._group is not None
        return self._group

    def _check_optimizer(self) -> None:
        if not self._optimized:
            raise UsageError(
                "the workers have no optimizer",
                hint='await boss.send_optimizer(torch.optim.Adam, {"lr": 3e-3})',
            )

    def _end(self) -> None:
        """Leave the plan, if there is one."""
        pipeline, self._pipeline = self._pipeline, None
        group, self._group = self._group, None
        self._optimized, self._prediction = False, None
        if pipeline is not None:
            pipeline.close()
        if group is not None:
            group.shutdown()


def _specs(model: list[Any]) -> list[Spec]:
    specs = specs_of(model)
    for index, spec in enumerate(specs):
        if not isinstance(spec, Spec):
            raise UsageError(
                f"layer {index} is a {type(spec).__name__} that exists already",
                hint="workers make their layers themselves: (class, kwargs, input shape)",
            )
    return cast("list[Spec]", specs)


def _parts(tensors: Tensors) -> tuple[Tensor, ...]:
    return (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)


def _leaf(tensor: Tensor, keep: bool) -> Tensor:
    leaf = tensor.detach()
    return leaf.requires_grad_() if keep and leaf.is_floating_point() else leaf


def _checked(x: Any, extra: Any) -> dict[str, Tensor]:  # noqa: ANN401  (what users pass)
    """The extra inputs. Raises UsageError before anybody waits for what is no tensor."""
    inputs = cast("list[Any]", list(x) if isinstance(x, tuple | list) else [x])  # pyright: ignore[reportUnknownArgumentType]
    for name, value in [*(("the input", part) for part in inputs), *dict(extra or {}).items()]:
        if not isinstance(value, Tensor):
            raise UsageError(f"{name} is a {type(value).__name__}", hint="a tensor is expected")
    return dict(extra or {})
