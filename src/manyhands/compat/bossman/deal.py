"""Deal: which layers go to which worker, in proportion to their free memory. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from manyhands.core.plan import PlanError


class NotEnoughMemory(PlanError):
    """However the layers are dealt, a worker has too little memory: which one, and by how much."""

    def __init__(
        self, worker: str, layers: range, needed_bytes: int, free_bytes: int, *, total_bytes: int
    ) -> None:
        said = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"
        super().__init__(
            f"worker {worker} has {_mib(free_bytes)} MiB free, and its part of the model ({said}) "
            f"needs {_mib(needed_bytes)} MiB: {_mib(needed_bytes - free_bytes)} MiB too little",
            layer=layers[0],
            hint=f"the model needs {_mib(total_bytes)} MiB: take more workers, or larger ones",
        )
        self.worker, self.missing_bytes = worker, needed_bytes - free_bytes


def deal(costs: Sequence[int], workers: Sequence[tuple[str, int]]) -> list[range]:
    """The layers of each worker: consecutive, at least one, all workers as full as can be alike.

    `costs` are the layers' bytes, `workers` names and free bytes. Raises PlanError for fewer
    layers than workers, NotEnoughMemory if the fullest worker would be too full.
    """
    if len(costs) < len(workers):
        raise PlanError(
            f"{len(costs)} layers for {len(workers)} workers",
            hint="each worker gets at least one layer: use fewer workers, or cut layers in two",
        )
    sums = list(accumulate(costs, initial=0))
    # best[end]: the least fullness of the fullest worker, and where its layers begin.
    best: list[list[tuple[float, int]]] = []
    for index, (_, free) in enumerate(workers):
        row: list[tuple[float, int]] = []
        for end in range(len(costs) + 1):
            ways = [
                (max(before, (sums[end] - sums[start]) / max(free, 1)), -start)
                for start in range(index, end)
                if (before := best[-1][start][0] if best else (0.0 if start == 0 else _NEVER))
                < _NEVER
            ]
            fullness, start = min(ways, default=(_NEVER, 0))
            row.append((fullness, -start))
        best.append(row)
    parts: list[range] = []
    end = len(costs)
    for row in reversed(best):
        parts.insert(0, range(row[end][1], end))
        end = row[end][1]
    _check(sums, parts, workers)
    return parts


_NEVER = float("inf")


def _check(sums: Sequence[int], parts: Sequence[range], workers: Sequence[tuple[str, int]]) -> None:
    def missing(index: int) -> int:
        part = parts[index]
        return sums[part.stop] - sums[part.start] - workers[index][1]

    worst = max(range(len(parts)), key=missing)
    if missing(worst) > 0:
        name, free = workers[worst]
        part = parts[worst]
        needed = sums[part.stop] - sums[part.start]
        raise NotEnoughMemory(name, part, needed, free, total_bytes=sums[-1])


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f}"
