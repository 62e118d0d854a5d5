"""Part: what one peer holds of a model: the layers of its stages, their gradients, an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]
from torch.optim import Optimizer

from manyhands.core.errors import UsageError
from manyhands.core.plan import Plan, PlanError, Stage
from manyhands.stages.batch import Batch
from manyhands.stages.buffers import Statistics
from manyhands.stages.carrier import Carrier
from manyhands.stages.gradients import Shared, dense, unique
from manyhands.stages.layers import Model, Running, Spec, build, specs_of
from manyhands.stages.moves import rows_at
from manyhands.stages.optimizers import check_steps
from manyhands.stages.runner import Runner
from manyhands.stages.saving import check_fit, restore, state_of
from manyhands.stages.terms import agree_forms
from manyhands.stages.vote import together

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


class Part:
    """Only this peer's layers are built or kept; all peers of a stage begin with the first's."""

    def __init__(
        self,
        model: Model,
        plan: Plan,
        carrier: Carrier,
        *,
        device: torch.device,
        optimizer: MakeOptimizer | None,
        seed: int,
    ) -> None:
        self._plan, self._me = plan, carrier.rank

        def build_own() -> dict[int, Runner]:
            if optimizer is not None and not callable(optimizer):
                raise UsageError(
                    f"the optimizer is a {type(optimizer).__name__}",
                    hint="give what makes one, of the parameters that this peer will have: "
                    "optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)",
                )
            return _build(specs_of(model), plan, carrier.rank, device, seed)

        self.runners = together(carrier, plan.peers, build_own)
        wide = [stage for stage in plan.stages if len(stage.peers) > 1]
        if wide:
            mine = {index: runner.modules() for index, runner in self.runners.items()}
            agree_forms(carrier, plan, [(stage, mine.get(stage.index, [])) for stage in wide])
        carrier.prepare([stage.peers for stage in wide], _pairs(plan))
        self._shared: dict[int, Shared] = {}
        held: list[nn.Module] = []
        for stage in wide:
            if self._me in stage.peers:
                own = self.runners[stage.index].modules()
                shared = Shared(carrier, stage.peers, stage.lead, own, besides=held)
                self._shared[stage.index] = shared
                held += own
        for shared in self._shared.values():
            shared.equalize()
        self._parameters = unique(p for layer in self.layers() for p in layer.module.parameters())
        led = [self.runners[s.index] for s in plan.stages_of(self._me) if s.lead == self._me]
        self._led = unique(p for r in led for m in r.modules() for p in m.parameters())
        self._statistics = Statistics(layer.module for layer in self.layers())
        self.has_gradients = False  # that wait for `apply`; on all peers alike
        self.optimizer: Optimizer | None = None
        together(
            carrier, plan.peers, lambda: None if optimizer is None else self.optimize(optimizer)
        )

    def optimize(self, make: MakeOptimizer) -> None:
        """From now on with this optimizer, which begins without state.

        Raises what `make` raises, UsageError if that gives something that cannot step here.
        """
        trained = [p for p in self._parameters if p.requires_grad]
        made = make(trained) if trained else None
        if trained and not isinstance(made, Optimizer):
            raise UsageError(
                f"the function that makes the optimizer returned a {type(made).__name__}",
                hint="optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1); a function "
                "of several lines returns it at its end",
            )
        if made is not None:
            check_steps(type(made))
        self.optimizer = made

    def layers(self) -> Iterator[Running]:
        """In order."""
        for runner in self.runners.values():
            yield from runner.layers

    def train(self, mode: bool) -> None:
        """As nn.Module.train."""
        for layer in self.layers():
            layer.module.train(mode)

    def forget(self) -> None:
        """Activations that are held for backwards that will not come."""
        for runner in self.runners.values():
            runner.forget()

    def zero(self) -> None:
        """Drop the gradients."""
        for parameter in self._parameters:
            parameter.grad = None
        self.has_gradients = False

    def note(self) -> None:
        """Keep the running statistics, in case the step that follows fails."""
        self._statistics.note()

    def put_back(self) -> None:
        """The statistics that were noted."""
        self._statistics.put_back()

    def sum_gradients(self, batch: Batch | None) -> None:
        """Over the peers of each wide stage; buffers by the rows of this batch, or by the split."""
        for index, shared in self._shared.items():
            stage = self._plan.stages[index]
            share = stage.split[stage.peers.index(self._me)] / sum(stage.split)
            if batch is not None:
                own = sum(len(rows_at(stage, self._me, count)) for count in batch.rows)
                share = own / batch.num_rows
            shared.sum(share)

    def squares(self) -> float:
        """The sum of squares of the gradients that this peer speaks for."""
        gradients = [p.grad for p in self._led if p.grad is not None]
        squares = [dense(gradient).square().sum(dtype=torch.float64) for gradient in gradients]
        return float(torch.stack(squares).sum()) if squares else 0.0

    @torch.no_grad()
    def apply(self, factor: float) -> None:
        """One step of the optimizer with the gradients times `factor`, then none are left."""
        if factor != 1.0:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        if self.optimizer is not None:
            self.optimizer.step()  # pyright: ignore[reportUnknownMemberType]
        self.zero()

    def state_of(self, stage: Stage) -> dict[str, Any]:
        """Of a stage's layers, by name."""
        layers = self.runners[stage.index].layers
        return {layer.name: state_of(layer, self.optimizer) for layer in layers}

    def check_fit(self, states: Mapping[str, Any]) -> None:
        """Whether that can be restored. Raises CheckpointError."""
        check_fit(self.layers(), states)

    def restore(self, states: Mapping[str, Any]) -> None:
        """What `state_of` gave, of all its layers, and fits."""
        restore(self.layers(), states, self.optimizer)
        for shared in self._shared.values():
            shared.note()


def _build(
    specs: Sequence[nn.Module | Spec], plan: Plan, me: int, device: torch.device, seed: int
) -> dict[int, Runner]:
    if len(specs) != len(plan.layers):
        raise PlanError(
            f"the plan has {len(plan.layers)} layers, the model {len(specs)}",
            hint="a plan names every layer of the model once",
        )
    _check_tied(specs, plan)
    runners: dict[int, Runner] = {}
    for stage in plan.stages_of(me):
        layers = [
            Running(
                build(specs[index], index, seed=seed, device=device), index, plan.layers[index].name
            )
            for index in range(stage.first, stage.end)
        ]
        runners[stage.index] = Runner(stage.index, layers, recompute=plan.recompute)
    return runners


def _check_tied(specs: Sequence[nn.Module | Spec], plan: Plan) -> None:
    """A parameter or statistic in layers on different peers would become several."""
    owners: dict[int, int] = {}
    for index, layer in enumerate(specs):
        if not isinstance(layer, nn.Module):
            continue
        for name, tensor in [*layer.named_parameters(), *_statistics(layer)]:
            other = owners.setdefault(id(tensor), index)
            a, b = plan.layers[other], plan.layers[index]
            if (a.peers, a.split) != (b.peers, b.split):
                raise PlanError(
                    f"layer {index} ({b.name}) shares its {name} with layer {other} ({a.name}), "
                    "and they are on different peers",
                    layer=index,
                    hint="put both on the same peers, or give each one of its own",
                )


def _statistics(layer: nn.Module) -> list[tuple[str, Tensor]]:
    """Buffers that torch's own layers write to; others may be constants, which several may have."""
    norms = [module for module in layer.modules() if isinstance(module, _NormBase)]
    written = {id(buffer) for norm in norms for buffer in norm.buffers(recurse=False)}
    return [(name, buffer) for name, buffer in layer.named_buffers() if id(buffer) in written]


def _pairs(plan: Plan) -> set[tuple[int, int]]:
    """Who may have something to send to whom."""
    stages = plan.stages
    return {(a, b) for s in stages for t in stages for a in s.peers for b in t.peers if a != b}
