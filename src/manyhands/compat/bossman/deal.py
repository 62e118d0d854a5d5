"""Deal: which layers of a model each worker gets."""

from __future__ import annotations

from collections.abc import Sequence

from manyhands.compat.bossman.cost import cost_of
from manyhands.compat.bossman.crew import Worker
from manyhands.core.errors import UsageError
from manyhands.core.plan import Plan, PlanError
from manyhands.planner.cost import PeerPower
from manyhands.planner.partition import DoesNotFit, partition
from manyhands.stages import commands as words
from manyhands.stages.layers import Spec


def deal(specs: Sequence[Spec], workers: Sequence[Worker], stages_per_worker: int = 1) -> Plan:
    """In proportion to the workers' memory, between the boss's two ends.

    Several stages of a worker are not consecutive: they go round all workers, unless there is one.
    Raises PlanError, DoesNotFit, UsageError.
    """
    if stages_per_worker < 1:
        raise UsageError(
            f"stages_per_worker={stages_per_worker}", hint="at least one; several interleave"
        )
    if len(specs) < len(workers) * stages_per_worker and stages_per_worker > 1:
        raise PlanError(
            f"{len(specs)} layers cannot be dealt to {len(workers)} workers, "
            f"{stages_per_worker} stages to each",
            hint="fewer workers, fewer stages_per_worker, or smaller layers",
        )
    costs = [
        cost_of(spec, f"model[{index}] {getattr(spec.kind, '__name__', spec.kind)}")
        for index, spec in enumerate(specs)
    ]
    powers = [PeerPower(name=w.name, memory_bytes=w.free_bytes) for w in workers]
    try:
        dealt = partition(costs, powers, by="memory", chunks=stages_per_worker)
    except DoesNotFit as error:  # of what a plan offers against it a boss has nothing
        error.hint = (
            "add a worker or memory (`manyhands worker --memory MIB`), or cut a layer; for the "
            "optimizer two tensors a parameter are reckoned, as Adam has"
        )
        raise
    stages = [(stage.end - stage.first, [stage.lead + 1]) for stage in dealt.stages]
    return Plan.of_stages(
        [(1, [0]), *stages, (1, [0])],
        names=["input", *(layer.name for layer in dealt.layers), "output"],
        peers=[words.BOSS, *dealt.peers],
        schedule="afab",
    )


def check_interleaved(plan: Plan) -> None:
    """Raises UsageError where workers have nothing to take turns with: it would be 1F1B."""
    workers = len(plan.peers) - 1
    if len(plan.stages) - 2 > workers:
        return
    hint = "distribute the model with await boss.distribute_model(stages_per_worker=2)"
    if workers == 1:
        hint = 'with a single worker take schedule="1f1b"'
    raise UsageError('schedule="interleaved", and each worker has one stage', hint=hint)
