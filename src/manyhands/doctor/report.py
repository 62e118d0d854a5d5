"""Reports: findings as plain values, what they amount to, and how secrets stay out of them."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar, cast

from manyhands._version import __version__
from manyhands.core.address import Address, AmqpAddress, HubAddress, redact

T = TypeVar("T")
SCHEMA = 1  # of `Report.plain`; it grows when a field changes its meaning or goes
ADDRESS = "address"  # the check whose failure means that something was mistyped
_SHORTEST_SECRET = 4  # characters; shorter ones would blank out ordinary words


class Status(enum.Enum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"  # it works, but not as well or as safely as it could
    PROBLEM = "problem"  # something will not work
    SKIPPED = "skipped"  # not measured, and the summary says why


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What one check found. `data` holds the numbers behind the summary: JSON values only."""

    check: str
    status: Status
    summary: str
    remedy: str | None = None
    data: dict[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome(Generic[T]):
    """The findings of a check, and what it learned for those that build on it (None: nothing)."""

    findings: tuple[Finding, ...]
    value: T | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All findings of one examination."""

    findings: tuple[Finding, ...]
    address: str | None = None  # the meeting point, without its secrets
    elapsed_s: float = 0.0

    @property
    def exit_code(self) -> int:
        """0 nothing failed, 1 a check failed, 2 the address cannot be used as it is."""
        problems = [f.check for f in self.findings if f.status is Status.PROBLEM]
        if ADDRESS in problems:
            return 2
        return 1 if problems else 0

    def num(self, status: Status) -> int:
        """How many findings have this status."""
        return sum(f.status is status for f in self.findings)

    def plain(self) -> dict[str, object]:
        """The report as JSON values; the keys are stable within one `schema`."""
        return {
            "schema": SCHEMA,
            "manyhands": __version__,
            "address": self.address,
            "ok": self.exit_code == 0,
            "exit_code": self.exit_code,
            "elapsed_s": round(self.elapsed_s, 3),
            "counts": {status.value: self.num(status) for status in Status},
            "findings": [
                {
                    "check": f.check,
                    "status": f.status.value,
                    "summary": f.summary,
                    "remedy": f.remedy,
                    "data": f.data,
                }
                for f in self.findings
            ],
        }


def ok(check: str, summary: str, **data: object) -> Finding:
    """A check that passed."""
    return Finding(check=check, status=Status.OK, summary=summary, data=data)


def warning(check: str, summary: str, remedy: str, **data: object) -> Finding:
    """A check that passed with a reservation."""
    return Finding(check=check, status=Status.WARNING, summary=summary, remedy=remedy, data=data)


def problem(check: str, summary: str, remedy: str, **data: object) -> Finding:
    """A check that failed."""
    return Finding(check=check, status=Status.PROBLEM, summary=summary, remedy=remedy, data=data)


def skipped(check: str, why: str, **data: object) -> Finding:
    """A check that was not made."""
    return Finding(check=check, status=Status.SKIPPED, summary=f"not checked: {why}", data=data)


def skip_all(checks: Iterable[str], why: str) -> tuple[Finding, ...]:
    """One `skipped` for each of these checks."""
    return tuple(skipped(check, why) for check in checks)


def secrets_of(text: str | None, address: Address | None) -> tuple[str, ...]:
    """What of an address, as typed and as understood, must not be shown to anybody."""
    found: list[str] = []
    match address:
        case HubAddress():
            found.append(address.token)
        case AmqpAddress() if address.password != address.user:
            found.append(address.password)
        case _:
            pass
    if text is not None:
        found.append(text if text.startswith("mh1-") else "")
        # As typed, a password may hold what ends a URL's host, and come out in pieces.
        _, _, login = text.rpartition("@")[0].partition("://")
        user, _, password = login.partition(":")
        found += [p for p in (password, *re.split(r"[/?#:@]", password)) if p != user]
        found += re.findall(r"(?:token|password)=([^\s&#]+)", text)
    usable = {secret for secret in found if len(secret) >= _SHORTEST_SECRET}
    return tuple(sorted(usable, key=len, reverse=True))


def without_secrets(finding: Finding, secrets: Sequence[str]) -> Finding:
    """The finding as it may be shown: nothing in it names one of `secrets`."""
    return replace(
        finding,
        summary=_hide(finding.summary, secrets),
        remedy=None if finding.remedy is None else _hide(finding.remedy, secrets),
        data=cast("dict[str, object]", _hide_in(finding.data, secrets)),
    )


def _hide(text: str, secrets: Sequence[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, "***")
    return redact(text)


def _hide_in(value: object, secrets: Sequence[str]) -> object:
    match value:
        case str():
            return _hide(value, secrets)
        case dict():
            items = cast("dict[str, object]", value)
            return {key: _hide_in(item, secrets) for key, item in items.items()}
        case list() | tuple():
            return [_hide_in(item, secrets) for item in cast("list[object]", value)]
        case _:
            return value
