"""Vote: at the end of a step all peers say whether theirs went well; then all apply it, or none."""

from __future__ import annotations

import traceback as tracebacks
from collections.abc import Callable
from typing import NamedTuple, TypeVar, cast

import msgspec
import torch

from manyhands.core.errors import ManyhandsError
from manyhands.stages.carrier import Carrier
from manyhands.stages.errors import StepFailed
from manyhands.stages.schedule import Action

T = TypeVar("T")
_MESSAGE_CHARS = 4_000
_TRACEBACK_CHARS = 20_000  # of its end


class Failure(msgspec.Struct, frozen=True):
    """What went wrong on a peer, and at which action; None is before the first."""

    message: str
    traceback: str
    hint: str | None = None
    action: Action | None = None


def failure_of(error: Exception, action: Action | None = None, at: str = "") -> Failure:
    """To be told to everybody; an error of ours speaks for itself, another one is said where."""
    text = traceback_of(error)
    if isinstance(error, ManyhandsError):
        hint = error.hint and sayable(error.hint)
        return Failure(sayable(error.message), text, hint, action)
    return Failure(f"{words_of(error)}{at and f' ({at})'}", text, None, action)


def sayable(text: str) -> str:
    """As UTF-8 can say it: names of files may hold bytes that it cannot. Not without end."""
    return text[:_MESSAGE_CHARS].encode(errors="backslashreplace").decode()[:_MESSAGE_CHARS]


def words_of(error: BaseException) -> str:
    """Its kind and what it says, whatever that is: an error's own text may raise another."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  (of somebody's __str__; the error itself is told)
        text = "(what it says cannot be shown)"
    return sayable(f"{type(error).__name__}: {text}".removesuffix(": "))


def traceback_of(error: BaseException) -> str:
    """Its end, where the cause is."""
    text = "".join(tracebacks.format_exception(error))[-_TRACEBACK_CHARS:]
    return text.encode(errors="backslashreplace").decode()[-_TRACEBACK_CHARS:]


class Verdict(NamedTuple):
    """Sums over all peers."""

    loss: float
    squares: float  # of all gradients
    counted: float  # what the loss is a sum over, where that is said


def vote(
    carrier: Carrier,
    peers: tuple[str, ...],
    *,
    failure: Failure | None,
    loss: float = 0.0,
    squares: float = 0.0,
    count: float = 0.0,
) -> Verdict:
    """Raises StepFailed on all peers if it went wrong on one."""
    own = [0.0] * carrier.size
    own[carrier.rank] = float(failure is not None)
    ballot = torch.tensor([*own, loss, squares, count], dtype=torch.float64)
    ballot = ballot.to(carrier.words_on)
    carrier.sum(ballot, range(carrier.size)).wait()
    counted = cast("list[float]", ballot.tolist())  # pyright: ignore[reportUnknownMemberType]
    *failed, all_loss, all_squares, all_count = counted
    reports: list[tuple[Failure, int]] = []
    for rank in (rank for rank, count in enumerate(failed) if count):
        said = msgspec.msgpack.encode(failure) if rank == carrier.rank else None
        reports.append((msgspec.msgpack.decode(carrier.say(said, rank), type=Failure), rank))
    if reports:
        # What failed first is the cause: later stages and backwards work on what came of it.
        cause, rank = min(reports, key=lambda report: _order(report[0].action))
        raise StepFailed(peers[rank], cause.message, cause.traceback, hint=cause.hint)
    return Verdict(all_loss, all_squares, all_count)


def alike(carrier: Carrier, peers: tuple[str, ...], act: Callable[[], T]) -> T:
    """What all peers do, each for itself. Raises the same StepFailed on all if it goes wrong on
    one; where it did, what went wrong is its cause.
    """
    try:
        made = act()
    except Exception as error:
        try:
            vote(carrier, peers, failure=failure_of(error))
        except StepFailed as failed:
            raise failed from error
        raise
    vote(carrier, peers, failure=None)
    return made


def together(carrier: Carrier, peers: tuple[str, ...], act: Callable[[], T]) -> T:
    """As `alike`; but whoever did it wrong, by our own words, hears those."""
    try:
        return alike(carrier, peers, act)
    except StepFailed as failed:
        if isinstance(failed.__cause__, ManyhandsError):
            raise failed.__cause__ from failed.__cause__.__cause__
        raise


def _order(action: Action | None) -> tuple[int, int, int]:
    if action is None:
        return (-1, 0, 0)
    if action.direction == "F":
        return (0, action.stage, action.microbatch)
    return (1, -action.stage, action.microbatch)
