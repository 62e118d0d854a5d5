"""Values: what crosses from stage to stage, found by a rehearsal before the first step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from manyhands.core.plan import Plan, Stage
from manyhands.stages.moves import Move, Rows, moves, split_rows
from manyhands.stages.variables import VariableError

T = TypeVar("T")


class Kind(msgspec.Struct, frozen=True, array_like=True):
    """What a tensor is like. `shape` is without its rows, unless it is `whole` and has none."""

    shape: tuple[int, ...]
    dtype: str
    grad: bool = False
    whole: bool = False

    def __str__(self) -> str:
        rows = [] if self.whole else ["rows"]
        return f"{self.dtype}[{', '.join([*rows, *map(str, self.shape)])}]"


class Rehearsed(msgspec.Struct, frozen=True):
    """What one stage did with its inputs: what it hands on, and which variables it touched."""

    carried: tuple[Kind, ...] = ()
    single: bool = True  # one tensor, not a tuple of one
    stashed: dict[str, tuple[Kind, str]] = {}  # with who did it, in words
    popped: tuple[str, ...] = ()
    copied: bool = False  # a layer of it writes into what it is given
    error: str | None = None
    hint: str | None = None
    wrong_variable: bool = False


class Value(NamedTuple):
    """One tensor of each microbatch that leaves a stage, and the stages that take it."""

    name: str
    kind: Kind
    producer: int
    consumers: tuple[int, ...]

    def moves(self, plan_stages: Sequence[Stage], consumer: int, num_rows: int) -> Iterator[Move]:
        """How it gets to one of its consumers; whole ones as rows [0, 0)."""
        source, target = plan_stages[self.producer], plan_stages[consumer]
        if not self.kind.whole:
            yield from moves(source, target, num_rows)
            return
        holders = _peers_with_rows(source, num_rows)
        for peer in _peers_with_rows(target, num_rows):
            # Whoever has it already keeps it: any holder's is as good as another's.
            yield Move(peer if peer in holders else holders[0], peer, Rows(0, 0))


def _peers_with_rows(stage: Stage, num_rows: int) -> list[int]:
    shares = split_rows(num_rows, stage.split)
    return [peer for peer, rows in zip(stage.peers, shares, strict=True) if len(rows)]


def carried_name(stage: int, index: int) -> str:
    """The name of what a stage hands to the next one; no variable of a user begins so.

    The model's input counts as handed on by stage -1.
    """
    return f"#{stage}.{index}"


def target_name(index: int) -> str:
    """The name under which targets reach the loss."""
    return f"#target.{index}"


class Given(msgspec.Struct, frozen=True):
    """What the first stage's peers are given; `targets` only if they hand them on to the loss."""

    carried: tuple[Kind, ...]
    single: bool
    extra: tuple[tuple[str, Kind], ...]
    targets: tuple[Kind, ...] = ()
    single_target: bool = True


class Table(NamedTuple):
    """All values of a plan, for inputs of one kind.

    What each stage makes and uses is looked up here, not found anew for every microbatch.
    """

    given: Given
    values: tuple[Value, ...]
    rehearsed: tuple[Rehearsed, ...]
    made_by: tuple[tuple[Value, ...], ...]  # what leaves each stage
    used_by: tuple[tuple[Value, ...], ...]  # what enters each stage
    carried: tuple[tuple[str, ...], ...]  # the names of what the first layer of each stage gets
    targets: tuple[str, ...]  # the names of targets that come with the inputs

    def carried_into(self, stage: int, inputs: Mapping[str, T]) -> T | tuple[T, ...]:
        """What its first layer gets, out of all inputs of the stage."""
        before = self.given if stage == 0 else self.rehearsed[stage - 1]
        names = self.carried[stage]
        return inputs[names[0]] if before.single else tuple(inputs[name] for name in names)


def tabulate(plan: Plan, given: Given, rehearsed: Sequence[Rehearsed]) -> Table:
    """From what each stage did. Raises VariableError for a variable that nobody takes."""
    found: list[Value] = []
    last = len(plan.stages) - 1
    for stage, did in enumerate(rehearsed[:-1]):
        for index, kind in enumerate(did.carried):
            found.append(Value(carried_name(stage, index), kind, stage, (stage + 1,)))
    if last > 0:
        for index, kind in enumerate(given.targets):
            found.append(Value(target_name(index), kind, 0, (last,)))
    everything = [(name, kind, None, 0) for name, kind in given.extra]
    for stage, did in enumerate(rehearsed):
        everything += [(name, kind, who, stage) for name, (kind, who) in did.stashed.items()]
    for name, kind, who, producer in everything:
        takers = [stage for stage, did in enumerate(rehearsed) if name in did.popped]
        if not takers and who is None:
            raise VariableError(
                f"no layer takes the extra input {name!r}",
                hint="leave it out, or name it among the variables of the layer that needs it",
            )
        if not takers:
            raise VariableError(
                f"{who} stashes {name!r}, and no later layer pops it",
                hint="leave it out, or pop it where it is needed",
            )
        consumers = tuple(stage for stage in takers if stage != producer)
        if consumers:
            found.append(Value(name, kind, producer, consumers))
    stages = range(last + 1)
    entering = [given.carried, *(did.carried for did in rehearsed[:-1])]
    return Table(
        given,
        tuple(found),
        tuple(rehearsed),
        made_by=tuple(tuple(v for v in found if v.producer == stage) for stage in stages),
        used_by=tuple(tuple(v for v in found if stage in v.consumers) for stage in stages),
        carried=tuple(
            tuple(carried_name(stage - 1, index) for index in range(len(kinds)))
            for stage, kinds in enumerate(entering)
        ),
        targets=tuple(target_name(index) for index in range(len(given.targets))),
    )
