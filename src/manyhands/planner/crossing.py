"""Crossing: what variables add to the memory and the messages of a stage. Pure arithmetic.

A stage has one copy of a variable that comes from elsewhere, however many of its layers take it,
from its forward to its backward; and holds on to those that it gives to others. What layers keep
for their backward is counted among their activations, by each of them for itself: what that counts
twice is taken off here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from manyhands.planner.cost import LayerCost


class Crossing(NamedTuple):
    """Of one stage and one microbatch."""

    entering_bytes: int = 0  # what comes from other stages, or with the inputs
    beside_bytes: int = 0  # beside what the layers' activations count; less than 0 if that is more
    sent_bytes: int = 0  # on to later stages, and gradients back to earlier ones


class Known(NamedTuple):
    """A variable: who gives it (-1: it is an extra input), who takes it, who keeps it of those."""

    num_bytes: int
    giver: int
    takers: tuple[int, ...]
    keepers: tuple[int, ...]  # layers, the giver too, that count it among their activations


def variables_of(costs: Sequence[LayerCost]) -> list[Known]:
    """All variables that a model's layers take. One that several give is the first one's."""
    givers: dict[str, int] = {}
    keepers: dict[str, dict[int, None]] = {}  # each layer once, though it gives and takes
    takers: dict[str, list[int]] = {}
    num_bytes: dict[str, int] = {}
    for index, cost in enumerate(costs):
        for variable in cost.takes:
            takers.setdefault(variable.name, []).append(index)
            num_bytes[variable.name] = max(num_bytes.get(variable.name, 0), variable.num_bytes)
        for variable in cost.gives:
            givers.setdefault(variable.name, index)
        for variable in (*cost.gives, *cost.takes):
            if variable.kept:
                keepers.setdefault(variable.name, {})[index] = None
    return [
        Known(num_bytes[name], givers.get(name, -1), tuple(found), tuple(keepers.get(name, ())))
        for name, found in takers.items()
    ]


def crossing_of(variables: Sequence[Known], first: int, end: int) -> Crossing:
    """Of the stage that has layers[first:end]."""
    entering = beside = sent = 0
    for variable in variables:
        inside = any(first <= taker < end for taker in variable.takers)
        counted = sum(first <= keeper < end for keeper in variable.keepers)
        if first <= variable.giver < end:
            leaves = any(taker >= end for taker in variable.takers)
            beside += (int(leaves or counted > 0) - counted) * variable.num_bytes
            sent += leaves * variable.num_bytes
        elif inside:
            entering += variable.num_bytes
            beside -= counted * variable.num_bytes
            sent += (variable.giver >= 0) * variable.num_bytes
    return Crossing(entering, beside, sent)
