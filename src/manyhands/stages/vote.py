"""Vote: at the end of a step all peers say whether theirs went well; then all apply it, or none."""

from __future__ import annotations

from typing import NamedTuple, cast

import msgspec
import torch

from manyhands.stages.carrier import Carrier
from manyhands.stages.errors import StepFailed
from manyhands.stages.schedule import Action


class Failure(msgspec.Struct, frozen=True):
    """What went wrong on a peer, and at which action; None is before the first."""

    message: str
    traceback: str
    hint: str | None = None
    action: Action | None = None


class Verdict(NamedTuple):
    """Sums over all peers."""

    loss: float
    squares: float  # of all gradients


def vote(
    carrier: Carrier,
    peers: tuple[str, ...],
    *,
    failure: Failure | None,
    loss: float,
    squares: float,
) -> Verdict:
    """Raises StepFailed on all peers if it went wrong on one."""
    ballot = torch.zeros(carrier.size + 2, dtype=torch.float64)
    ballot[carrier.rank] = failure is not None
    ballot[-2], ballot[-1] = loss, squares
    ballot = ballot.to(carrier.words_on)
    carrier.sum(ballot, range(carrier.size)).wait()
    counted = cast("list[float]", ballot.tolist())  # pyright: ignore[reportUnknownMemberType]
    *failed, total, norm = counted
    reports: list[tuple[Failure, int]] = []
    for rank in (rank for rank, count in enumerate(failed) if count):
        said = msgspec.msgpack.encode(failure) if rank == carrier.rank else None
        reports.append((msgspec.msgpack.decode(carrier.say(said, rank), type=Failure), rank))
    if reports:
        # What failed first is the cause: later stages and backwards work on what came of it.
        cause, rank = min(reports, key=lambda report: _order(report[0].action))
        raise StepFailed(peers[rank], cause.message, cause.traceback, hint=cause.hint)
    return Verdict(total, norm)


def _order(action: Action | None) -> tuple[int, int, int]:
    if action is None:
        return (-1, 0, 0)
    if action.direction == "F":
        return (0, action.stage, action.microbatch)
    return (1, -action.stage, action.microbatch)
