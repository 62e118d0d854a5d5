"""Ballot: what all devices say to each other in a step, so that all of them do the same next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch

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

    @property
    def total(self) -> int:
        """The rows of all."""
        return sum(self.rows)

    @property
    def first(self) -> int:
        """The first rank that has rows."""
        return next(rank for rank, rows in enumerate(self.rows) if rows)


def vote(
    carrier: Carrier,
    num_leaves: int,
    *,
    rows: int = 0,
    loss: float = 0.0,
    done: bool = False,
    bad: int = 0,
    short: bool = False,
    used: Sequence[bool] = (),
) -> Verdict:
    """Before a step is taken. All devices call it; `loss` is the mean of this one's rows."""
    world = carrier.size
    ballot = torch.zeros(_PLAIN + 2 * world + num_leaves, dtype=torch.float64)
    ballot[0], ballot[1], ballot[2] = loss * rows, done, bad
    ballot[_PLAIN + carrier.rank] = rows
    ballot[_PLAIN + world + carrier.rank] = short
    if used:
        ballot[_PLAIN + 2 * world :] = torch.tensor(used, dtype=torch.float64)
    summed, ended, met, *rest = _counted(carrier, ballot)
    each = tuple(int(count) for count in rest[:world])
    return Verdict(
        rows=each,
        loss=summed / max(1, sum(each)),
        done=int(ended),
        bad=int(met),
        short=tuple(rank for rank in range(world) if rest[world + rank]),
        used=[bool(count) for count in rest[2 * world :]],
    )


def confirm(carrier: Carrier, *, failed: bool = False) -> tuple[int, ...]:
    """After a step: the ranks whose step has failed."""
    ballot = torch.zeros(carrier.size, dtype=torch.float64)
    ballot[carrier.rank] = failed
    return tuple(rank for rank, count in enumerate(_counted(carrier, ballot)) if count)


def _counted(carrier: Carrier, ballot: torch.Tensor) -> list[float]:
    ballot = ballot.to(carrier.words_on)
    carrier.sum(ballot, range(carrier.size)).wait()
    return cast("list[float]", ballot.tolist())  # pyright: ignore[reportUnknownMemberType]
