"""An examination: all checks in their order, as findings come."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from manyhands.core.address import Address, AmqpAddress, HubAddress, LocalAddress
from manyhands.core.errors import SettingsError, UsageError
from manyhands.core.settings import FILE, find_meeting_point
from manyhands.doctor import limits
from manyhands.doctor.broker import examine_broker
from manyhands.doctor.hub import examine_hub, examine_loopback
from manyhands.doctor.limits import Budget
from manyhands.doctor.machine import check_machine, check_torch
from manyhands.doctor.report import (
    ADDRESS,
    Finding,
    ok,
    problem,
    skipped,
)

_BASE_S = 11.0  # for everything but the measurements
TRUST = (
    "peers of a run trust each other: torch.distributed's *_object calls run code that the others "
    "send, so give the join code or the broker's password only to whom you would give a shell"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What to examine."""

    address: Address | None
    bad_address: UsageError | None = None
    seconds: float = 2.0
    """How long each measurement of bandwidth through the meeting point lasts."""


def resolve(
    text: str | None, run: str | None, environ: Mapping[str, str], *, file: Path = FILE
) -> Address | UsageError | None:
    """The meeting point that was named here, in the environment or in the file; None: nowhere."""
    try:
        return find_meeting_point(text, run=run, name=None, environ=environ, file=file).address
    except SettingsError as error:
        return error if text is not None else _why_none(error, run, environ, file)
    except UsageError as error:
        return error


def _why_none(
    error: SettingsError, run: str | None, environ: Mapping[str, str], file: Path
) -> UsageError | None:
    """None if an address is all that lacks, else what is wrong with the rest."""
    try:
        find_meeting_point("local:///", run=run, name=None, environ=environ, file=file)
    except UsageError:
        return error
    return None


def total_s(seconds: float) -> float:
    """How long an examination may take in all."""
    return _BASE_S + 2 * seconds


def examine(request: Request) -> Iterator[Finding]:
    """All findings, one by one. Raises nothing; ends within `total_s(seconds)`."""
    budget = Budget(total_s(request.seconds))
    yield from budget.call("machine", limits.MACHINE_S, lambda _: check_machine()).findings
    yield from budget.call("torch", limits.TORCH_S, check_torch).findings
    yield from examine_loopback(seconds=request.seconds, budget=budget)
    yield from _examine_point(request, budget)
    yield ok("trust", TRUST)


def _examine_point(request: Request, budget: Budget) -> Iterator[Finding]:
    if request.bad_address is not None:
        error = request.bad_address
        hint = error.hint or "see manyhands doctor --help for what an address looks like"
        yield problem(ADDRESS, error.message, hint)
        return
    match request.address:
        case HubAddress() as address:
            yield from examine_hub(address, seconds=request.seconds, budget=budget)
        case AmqpAddress() as address:
            yield from examine_broker(address, seconds=request.seconds, budget=budget)
        case LocalAddress() as address:
            yield ok(ADDRESS, f"{address} is inside one process: there is nothing to reach")
        case None:
            yield skipped(ADDRESS, "no hub or broker was named: manyhands doctor URL or CODE")
