"""Lengths of time as people write and read them: 90, 90s, 30m, 1h30m, 1:30:00."""

from __future__ import annotations

import re

from manyhands.core.errors import SettingsError

_UNITS_S = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_PARTS = re.compile(r"(?:\d+(?:\.\d+)?[dhms])+", re.ASCII)
_CLOCK = re.compile(r"(?:(\d{1,9}):)?(\d{1,2}):(\d{2})", re.ASCII)
_PLAIN = re.compile(r"\d+(?:\.\d+)?", re.ASCII)
_MOST_S = 10 * 365 * 86400.0


def parse_duration(
    text: str, *, what: str = "a time", zero: bool = False, most_s: float = _MOST_S
) -> float:
    """Seconds, at most `most_s`; 0 where `zero` says so. Raises SettingsError, with the ways to
    write it.
    """
    plain = text.strip().lower()
    if _PLAIN.fullmatch(plain):
        seconds = float(plain)
    elif found := _CLOCK.fullmatch(plain):
        hours, minutes, rest = (int(part or 0) for part in found.groups())
        if rest >= 60 or (minutes >= 60 and found[1] is not None):
            raise _wrong(text, what)
        seconds = hours * 3600.0 + minutes * 60.0 + rest
    elif _PARTS.fullmatch(plain):
        parts = re.findall(r"([\d.]+)([dhms])", plain)
        seconds = sum(float(number) * _UNITS_S[unit] for number, unit in parts)
    else:
        raise _wrong(text, what)
    if seconds > most_s or (seconds == 0 and not zero):
        least = "from 0" if zero else "more than 0"
        raise SettingsError(
            f"{what} is {text[:40]}; it has to be {least}, and at most {show_duration(most_s)}",
            hint=_hint(),
        )
    return seconds


def show_duration(seconds: float) -> str:
    """Short, for a table: `12s`, `3m05s`, `2h07m`, `5d02h`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"


def _wrong(text: str, what: str) -> SettingsError:
    return SettingsError(f"{what} cannot be {text[:40]!r}", hint=_hint())


def _hint() -> str:
    return "such as 90 (seconds), 90s, 30m, 2h, 1h30m, 1:30:00"
