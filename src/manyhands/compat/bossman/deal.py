"""Deal: which layers of a model each worker gets."""

from __future__ import annotations

from collections.abc import Sequence

from manyhands.compat.bossman.cost import cost_of
from manyhands.compat.bossman.crew import Worker
from manyhands.core.plan import Plan
from manyhands.planner.cost import PeerPower
from manyhands.planner.partition import DoesNotFit, partition
from manyhands.stages import commands as words
from manyhands.stages.layers import Spec


def deal(specs: Sequence[Spec], workers: Sequence[Worker]) -> Plan:
    """In proportion to the workers' memory, between the boss's two ends.

    Raises PlanError, DoesNotFit, UsageError.
    """
    costs = [
        cost_of(spec, f"model[{index}] {getattr(spec.kind, '__name__', spec.kind)}")
        for index, spec in enumerate(specs)
    ]
    powers = [PeerPower(name=w.name, memory_bytes=w.free_bytes) for w in workers]
    try:
        dealt = partition(costs, powers, by="memory")
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
