"""Ballot: what all devices say to each other in a step, so that all of them do the same next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch

from manyhands.stages.carrier import Carrier

_PLAIN = 3  # rows, loss, done


class Verdict(NamedTuple):
    """Sums over all devices: the same on each of them."""

    rows: int
    loss: float  # mean over the rows
    done: int  # how many have nothing more to do
    short: tuple[int, ...]  # ranks of those that ran out of memory
    used: list[bool]  # leaves, by any device


def vote(
    carrier: Carrier,
    num_leaves: int,
    *,
    rows: int = 0,
    loss: float = 0.0,
    done: bool = False,
    short: bool = False,
    used: Sequence[bool] = (),
) -> Verdict:
    """Before a step is taken. All devices call it; `loss` is the mean of this one's rows."""
    ballot = torch.zeros(_PLAIN + carrier.size + num_leaves, dtype=torch.float64)
    ballot[0], ballot[1], ballot[2] = rows, loss * rows, done
    ballot[_PLAIN + carrier.rank] = short
    if used:
        ballot[_PLAIN + carrier.size :] = torch.tensor(used, dtype=torch.float64)
    counted = _counted(carrier, ballot)
    total, summed, ended, *rest = counted
    return Verdict(
        rows=int(total),
        loss=summed / total if total else 0.0,
        done=int(ended),
        short=tuple(rank for rank in range(carrier.size) if rest[rank]),
        used=[bool(count) for count in rest[carrier.size :]],
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
