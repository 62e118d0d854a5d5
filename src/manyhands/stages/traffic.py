"""Traffic: which peer sends what to whom, and in which order. Pure.

Both ends of every pair of peers work out the same list, from the plan and its schedule: the
receiver expects what comes in the order in which the sender makes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from manyhands.core.plan import Plan
from manyhands.stages.moves import Rows
from manyhands.stages.schedule import Action, Direction, Orders
from manyhands.stages.values import Table, Value


@dataclass(frozen=True, slots=True, eq=False)  # each is one: they are looked up all the time
class Message:
    """Rows of one value of one microbatch, from peer to peer: forward, or its gradient back."""

    direction: Direction
    value: Value
    consumer: int  # the stage that takes the value
    microbatch: int
    source: int
    target: int
    rows: Rows

    @property
    def made_by(self) -> Action:
        """The action after which it is sent."""
        stage = self.value.producer if self.direction == "F" else self.consumer
        return Action(self.direction, stage, self.microbatch)

    @property
    def used_by(self) -> Action:
        """The action before which it must be there."""
        stage = self.consumer if self.direction == "F" else self.value.producer
        return Action(self.direction, stage, self.microbatch)


class Traffic:
    """Of one step: a plan, the table of its values, and the rows of each microbatch."""

    def __init__(
        self, plan: Plan, orders: Orders, table: Table, rows: Sequence[int], *, backward: bool
    ) -> None:
        self._sent: dict[tuple[int, Action], list[Message]] = {}
        self._needed: dict[tuple[int, Action], list[Message]] = {}
        self.lines: dict[tuple[int, int], list[Message]] = {}
        place = {
            (peer, action): place
            for peer, order in orders.items()
            for place, action in enumerate(order)
        }
        self._made_at: dict[Message, int] = {}  # in the order of its source
        self._used_at: dict[Message, int] = {}  # in the order of its target
        for message in _messages(plan, table, rows, backward=backward):
            made, used = (message.source, message.made_by), (message.target, message.used_by)
            self._sent.setdefault(made, []).append(message)
            self._needed.setdefault(used, []).append(message)
            self._made_at[message], self._used_at[message] = place[made], place[used]
        for source, order in orders.items():
            for action in order:
                for message in self.sent(source, action):
                    if message.target != source:
                        self.lines.setdefault((source, message.target), []).append(message)

    def sent(self, peer: int, action: Action) -> list[Message]:
        """What a peer sends after an action, in order, to itself too."""
        return self._sent.get((peer, action), [])

    def needed(self, peer: int, action: Action) -> list[Message]:
        """What a peer needs before an action, from itself too; of one value in order of rows."""
        return self._needed.get((peer, action), [])

    def has_arrived(self, sent: Message, heard: Message) -> bool:
        """Whether the receiver of `sent` has taken it, since it has sent `heard` now.

        It had to take what it needed for an action before it could send what the action made.
        """
        return self._used_at[sent] <= self._made_at[heard]


def _messages(
    plan: Plan, table: Table, rows: Sequence[int], *, backward: bool
) -> Iterator[Message]:
    stages = plan.stages
    for value in table.values:
        for consumer in value.consumers:
            for microbatch, num_rows in enumerate(rows):
                for move in value.moves(stages, consumer, num_rows):
                    source, target, span = move
                    yield Message("F", value, consumer, microbatch, source, target, span)
                    if backward and value.kind.grad:
                        yield Message("B", value, consumer, microbatch, target, source, span)
