"""Load: what a stage asks of its peer, in time and in memory. Pure arithmetic.

    memory = parameters + gradients + optimizer + held x (inputs + activations)

where `held` is how many microbatches the schedule has under way at the stage, and variables that
come from other stages are inputs too. With recomputation only the inputs are held, and the
activations of one microbatch at a time. What is not counted: the
work space of single operations, and copies on their way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from manyhands.core.plan import Plan, PlanError, ScheduleName
from manyhands.planner.cost import LayerCost, PeerPower
from manyhands.planner.crossing import Crossing, crossing_of, variables_of


def held(
    stage: int, *, num_peers: int, chunks: int, microbatches: int, schedule: ScheduleName
) -> int:
    """How many microbatches are between a stage's forward and its backward, at most.

    For stages that go round the peers `chunks` times. A peer does `warm_up` forwards, then one
    forward and one backward in turn, both in groups of as many microbatches as there are peers.
    """
    if schedule == "afab" or (chunks > 1 and microbatches % num_peers):
        return microbatches  # after a group that is not whole, peers may have to go far ahead
    chunk, peer = divmod(stage, num_peers)
    behind = num_peers - 1 - peer
    warm_up = behind if chunks == 1 else 2 * behind + (chunks - 1) * num_peers
    # Its first backward comes after a group of backwards for each later chunk. Until then it only
    # gets more: these are the peer's forwards so far, and then those of this chunk.
    forwards = warm_up + 1 + (chunks - 1 - chunk) * num_peers
    groups, rest = divmod(forwards, chunks * num_peers)
    own = groups * num_peers + min(max(rest - chunk * num_peers, 0), num_peers)
    return min(own, microbatches)


class StageLoad(NamedTuple):
    """What a stage, layers[first:end], asks of its peer."""

    stage: int
    first: int
    end: int
    peer: int
    time_s: float  # of one microbatch, forward and backward, with what it sends
    state_bytes: int
    held_bytes: int

    @property
    def needed_bytes(self) -> int:
        """All its memory."""
        return self.state_bytes + self.held_bytes


class Loads:
    """The loads of all possible stages of a model on these peers.

    `bandwidth_bytes_s`: if given, a stage also takes the time to send its output on, and the
    gradient of its input back.
    """

    def __init__(
        self,
        costs: Sequence[LayerCost],
        peers: Sequence[PeerPower],
        *,
        microbatches: int = 1,
        schedule: ScheduleName = "1f1b",
        chunks: int = 1,
        recompute: bool = False,
        bandwidth_bytes_s: float | None = None,
    ) -> None:
        self.costs, self.peers = costs, peers
        self.num_stages = len(peers) * chunks
        self._recompute = recompute
        self._seconds_a_byte = 0.0 if bandwidth_bytes_s is None else 1 / bandwidth_bytes_s
        self._held = [
            held(
                stage,
                num_peers=len(peers),
                chunks=chunks,
                microbatches=microbatches,
                schedule=schedule,
            )
            for stage in range(self.num_stages)
        ]
        self._times = list(accumulate((cost.time_s for cost in costs), initial=0.0))
        self._states = _sums(cost.state_bytes for cost in costs)
        self._activations = _sums(cost.activation_bytes for cost in costs)
        self._variables = variables_of(costs)
        self._crossing: dict[tuple[int, int], Crossing] = {}

    def of(self, stage: int, first: int, end: int) -> StageLoad:
        """The load if this stage gets these layers."""
        peer = stage % len(self.peers)
        time_s = (self._times[end] - self._times[first]) / self.peers[peer].speed
        sent = self.costs[end - 1].output_bytes if end < len(self.costs) else 0
        if first > 0:
            entering = self.costs[first - 1].output_bytes
            sent += entering
        else:
            entering = self.costs[0].input_bytes
        activations = self._activations[end] - self._activations[first]
        if self._variables:
            crossing = self._cross(first, end)
            entering += crossing.entering_bytes
            activations += crossing.beside_bytes
            sent += crossing.sent_bytes
        count = self._held[stage]
        return StageLoad(
            stage=stage,
            first=first,
            end=end,
            peer=peer,
            time_s=time_s + sent * self._seconds_a_byte,
            state_bytes=self._states[end] - self._states[first],
            held_bytes=count * entering + activations * (1 if self._recompute else count),
        )

    def _cross(self, first: int, end: int) -> Crossing:
        if (first, end) not in self._crossing:
            self._crossing[first, end] = crossing_of(self._variables, first, end)
        return self._crossing[first, end]


def _sums(values: Iterable[int]) -> list[int]:
    return list(accumulate(values, initial=0))


def loads_of(
    plan: Plan,
    costs: Sequence[LayerCost],
    peers: Sequence[PeerPower],
    *,
    bandwidth_bytes_s: float | None = None,
) -> tuple[StageLoad, ...]:
    """What each stage of a plan asks of its peer. For plans that `partition` makes.

    Raises PlanError for one whose stages do not go round the peers.
    """
    stages = plan.stages
    if any(stage.peers != (stage.index % len(plan.peers),) for stage in stages):
        raise PlanError("the stages of this plan do not go round the peers, one peer a stage")
    if [layer.name for layer in plan.layers] != [cost.name for cost in costs]:
        raise PlanError("the plan and the costs are of different layers")
    loads = Loads(
        costs,
        peers,
        microbatches=plan.microbatches,
        schedule=plan.schedule,
        chunks=-(-len(stages) // len(plan.peers)),
        recompute=plan.recompute,
        bandwidth_bytes_s=bandwidth_bytes_s,
    )
    return tuple(loads.of(stage.index, stage.first, stage.end) for stage in stages)


def table(
    plan: Plan,
    costs: Sequence[LayerCost],
    peers: Sequence[PeerPower],
    *,
    bandwidth_bytes_s: float | None = None,
) -> str:
    """As text: a line a stage, with its layers, its time a microbatch and its memory."""
    rows = [("stage", "peer", "layers", "ms", "MiB", "free MiB")]
    for load in loads_of(plan, costs, peers, bandwidth_bytes_s=bandwidth_bytes_s):
        power = peers[load.peer]
        free = "-" if power.memory_bytes is None else mib(power.memory_bytes)
        first, last = costs[load.first].name, costs[load.end - 1].name
        layers = first if load.end - load.first == 1 else f"{first} .. {last}"
        time_ms = f"{load.time_s * 1e3:.1f}"
        rows.append((str(load.stage), power.name, layers, time_ms, mib(load.needed_bytes), free))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    justify = (str.ljust, str.ljust, str.ljust, str.rjust, str.rjust, str.rjust)
    lines = (
        "  ".join(put(cell, width) for put, cell, width in zip(justify, row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def mib(num_bytes: int) -> str:
    """Bytes in MiB, without the unit; as many digits as it takes to see that there are some."""
    exact = num_bytes / (1 << 20)
    digits = next((d for d in range(1, 6) if not num_bytes or round(exact, d)), 6)
    return f"{exact:.{digits}f}"
