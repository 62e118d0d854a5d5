"""Settings: one place that decides between flag, environment, file and default.

    flag or argument  >  environment (MANYHANDS_*)  >  manyhands.toml in this folder  >  default

The file has flat keys: `url`, `run`, `name`. Secrets do not belong into it: a token comes with a
join code or from MANYHANDS_TOKEN. An unknown key is an error, not a silence.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from manyhands.core.address import Address, HubAddress, check_fingerprint, parse_address
from manyhands.core.errors import NoMeetingPoint, SettingsError

FILE = Path("manyhands.toml")
_KEYS = ("url", "run", "name")
OUTAGE = "MANYHANDS_OUTAGE"
OUTAGE_S = 60.0
"""How long a peer looks for a meeting point that has gone away, if nobody says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeetingPoint:
    """Where to go and as whom."""

    address: Address
    name: str | None


def find_meeting_point(
    url: str | None,
    *,
    run: str | None,
    name: str | None,
    environ: Mapping[str, str],
    file: Path = FILE,
) -> MeetingPoint:
    """Resolve what the caller left open. Raises SettingsError, AddressError."""
    given = {"url": url, "run": run, "name": name}
    found = {key: find(key, given[key], environ=environ, file=file) for key in _KEYS}
    if found["url"] is None:
        raise NoMeetingPoint(
            "no meeting point was named",
            hint='pass an address or join code, set MANYHANDS_URL, or write url = "..." '
            f"into {file}",
        )
    # A run from the environment or the file is a default: an address that names one is more exact.
    address = parse_address(found["url"], run=run)
    if address.run is None and found["run"] is not None:
        address = parse_address(found["url"], run=found["run"])
    return MeetingPoint(address=_with_secrets(address, environ), name=found["name"])


def find(
    key: str, given: str | None, *, environ: Mapping[str, str], file: Path = FILE
) -> str | None:
    """What `url`, `run` or `name` is: as given, in the environment, in the file, or None."""
    return given or environ.get(f"MANYHANDS_{key.upper()}") or _read(file).get(key)


def find_outage(environ: Mapping[str, str]) -> float:
    """Seconds of MANYHANDS_OUTAGE, or the default. Raises SettingsError."""
    text = environ.get(OUTAGE, "")
    if not text:
        return OUTAGE_S
    try:
        outage_s = float(text)
    except ValueError:
        outage_s = math.nan
    if not (math.isfinite(outage_s) and outage_s >= 0):
        raise SettingsError(f"{OUTAGE} is {text[:80]!r}", hint="seconds, such as 60")
    return outage_s


def _with_secrets(address: Address, environ: Mapping[str, str]) -> Address:
    if not isinstance(address, HubAddress):
        return address
    pin = check_fingerprint(environ.get("MANYHANDS_FINGERPRINT", ""))
    return replace(
        address,
        token=address.token or environ.get("MANYHANDS_TOKEN", ""),
        fingerprint=address.fingerprint or pin,
    )


def _read(file: Path) -> dict[str, str]:
    try:
        text = file.read_text()
    except FileNotFoundError:
        return {}
    try:
        table = cast("dict[str, object]", tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{file} is not valid TOML: {error}") from None
    unknown = sorted(set(table) - set(_KEYS))
    if unknown:
        raise SettingsError(
            f"{file} has unknown keys: {', '.join(unknown)}", hint=f"it takes {', '.join(_KEYS)}"
        )
    wrong = sorted(key for key, value in table.items() if not isinstance(value, str))
    if wrong:
        raise SettingsError(f"{file}: {', '.join(wrong)} must be text in quotes")
    return cast("dict[str, str]", table)
