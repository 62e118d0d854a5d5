"""Ballot: what all devices say to each other in a step, so that all of them do the same next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch

from manyhands.compat.fluxdistributed.layout import Layout
from manyhands.stages.carrier import Carrier

_PLAIN = 3  # loss, done, bad


class Verdict(NamedTuple):
    """What all have said: the same on each of them."""

    rows: tuple[int, ...]  # of each rank
    loss: float  # mean over all rows
    done: int  # how many have nothing more to do
    bad: int  # samples that they have met
    short: tuple[int, ...]  # ranks of those that ran out of memory
    used: list[bool]  # leaves, by any device
    givers: dict[int, int]  # of leaves that cannot be averaged, by place: whose value it is

    @property
    def total(self) -> int:
        """The rows of all."""
        return sum(self.rows)

    def given_by(self, rank: int) -> list[int]:
        """Places of the leaves whose value is that device's."""
        return [place for place, giver in self.givers.items() if giver == rank]


def vote(
    carrier: Carrier,
    layout: Layout,
    *,
    rows: int = 0,
    loss: float = 0.0,
    done: bool = False,
    bad: int = 0,
    short: bool = False,
    used: Sequence[bool] = (),
) -> Verdict:
    """Before a step is taken. All devices call it; `loss` is the mean of this one's rows."""
    world, num_leaves, given = carrier.size, len(layout.leaves), layout.given
    marks = torch.zeros(world, len(given), dtype=torch.float64)  # who has changed what
    plain = torch.zeros(_PLAIN + 2 * world + num_leaves, dtype=torch.float64)
    plain[0], plain[1], plain[2] = loss * rows, done, bad
    plain[_PLAIN + carrier.rank] = rows
    plain[_PLAIN + world + carrier.rank] = short
    if used:
        plain[_PLAIN + 2 * world :] = torch.tensor(used, dtype=torch.float64)
        mine = [used[place] for place in given]
        marks[carrier.rank] = torch.tensor(mine, dtype=torch.float64)
    summed, ended, met, *rest = _counted(carrier, torch.cat([plain, marks.flatten()]))
    each = tuple(int(count) for count in rest[:world])
    flags, marked = rest[2 * world : 2 * world + num_leaves], rest[2 * world + num_leaves :]
    return Verdict(
        rows=each,
        loss=summed / max(1, sum(each)),
        done=int(ended),
        bad=int(met),
        short=tuple(rank for rank in range(world) if rest[world + rank]),
        used=[bool(count) for count in flags],
        givers=_givers(given, marked, world),
    )


def confirm(carrier: Carrier, *, failed: bool = False) -> tuple[int, ...]:
    """After a step: the ranks whose step has failed."""
    ballot = torch.zeros(carrier.size, dtype=torch.float64)
    ballot[carrier.rank] = failed
    return tuple(rank for rank, count in enumerate(_counted(carrier, ballot)) if count)


def _givers(given: Sequence[int], marked: Sequence[float], world: int) -> dict[int, int]:
    """The first rank that has changed a leaf; none has those that are left out."""
    found: dict[int, int] = {}
    for rank in range(world):
        for place, mark in zip(given, marked[rank * len(given) :], strict=False):
            if mark:
                found.setdefault(place, rank)
    return found


def _counted(carrier: Carrier, ballot: torch.Tensor) -> list[float]:
    ballot = ballot.to(carrier.words_on)
    carrier.sum(ballot, range(carrier.size)).wait()
    return cast("list[float]", ballot.tolist())  # pyright: ignore[reportUnknownMemberType]
