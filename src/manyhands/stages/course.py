"""Course: all about a step that depends on the plan and on the kind of its batch only.

It is worked out once. What a step does again and again, for every microbatch, is then to go through
a list and to move tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from manyhands.core.plan import Plan
from manyhands.stages.moves import Rows, rows_at
from manyhands.stages.schedule import Action, orders_of
from manyhands.stages.traffic import Message, Traffic
from manyhands.stages.values import Table, carried_name


class Duty(NamedTuple):
    """One action of one peer that has rows in it, and its mail, in order."""

    action: Action
    rows: Rows  # of the microbatch
    span: slice  # the same rows, of the batch
    needed: tuple[Message, ...]  # from this peer itself too
    awaited: tuple[Message, ...]  # those of them that others send
    sent: tuple[Message, ...]  # to this peer itself too


class Course:
    """One peer's duties. `backward`: whether gradients go back."""

    def __init__(
        self, plan: Plan, me: int, table: Table, microbatches: Sequence[Rows], *, backward: bool
    ) -> None:
        self.me, self.table = me, table
        self.layers, self.stages = plan.layers, plan.stages
        orders = orders_of(plan)
        self.traffic = Traffic(plan, orders, table, [*map(len, microbatches)], backward=backward)
        self.duties = tuple(
            duty
            for action in orders[me]
            if len((duty := self._duty(action, microbatches[action.microbatch])).rows)
        )
        self.forwards = tuple(duty for duty in self.duties if duty.action.direction == "F")
        self.backwards = tuple(duty for duty in self.duties if duty.action.direction == "B")
        ends = [duty for duty in self.forwards if duty.action.stage == self.last]
        done = pairwise(accumulate((len(duty.rows) for duty in ends), initial=0))
        # Which rows of all that this peer has of the output are those of each microbatch.
        self.output_spans = {
            duty.action.microbatch: slice(*span) for duty, span in zip(ends, done, strict=True)
        }
        # Of all that comes to this peer: how many messages its sender has sent it before.
        self.places = {
            message: place
            for (_, target), line in self.traffic.lines.items()
            if target == me
            for place, message in enumerate(line)
        }

    @property
    def last(self) -> int:
        """The stage that ends in the loss."""
        return len(self.stages) - 1

    def output_names(self) -> list[str]:
        """Those of what the last stage gives."""
        count = len(self.table.rehearsed[self.last].carried)
        return [carried_name(self.last, index) for index in range(count)]

    def said(self, action: Action) -> str:
        """In words."""
        stage = self.stages[action.stage]
        first, last = self.layers[stage.first].name, self.layers[stage.end - 1].name
        way = "forward" if action.direction == "F" else "backward"
        layers = f"layer {first}" if first == last else f"layers {first} to {last}"
        return f"the {way} of {layers}, microbatch {action.microbatch}"

    def _duty(self, action: Action, microbatch: Rows) -> Duty:
        rows = rows_at(self.stages[action.stage], self.me, len(microbatch))
        needed = tuple(self.traffic.needed(self.me, action))
        return Duty(
            action,
            rows,
            slice(microbatch.start + rows.start, microbatch.start + rows.end),
            needed,
            tuple(message for message in needed if message.source != self.me),
            tuple(self.traffic.sent(self.me, action)),
        )
