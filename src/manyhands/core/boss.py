"""Where BossMan's boss listens and its workers dial: MODEL_HOST, MODEL_PORT, MODEL_TOKEN. Pure.

boss on loopback (MODEL_HOST unset or 127.0.0.1)   plain; host and port suffice
elsewhere                                          TLS, pinned, and a token: all in MODEL_TOKEN
elsewhere, and both sides say insecure             plain
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from manyhands.core.address import HubAddress, host_port, is_loopback, parse_address
from manyhands.core.errors import AddressError, NoMeetingPoint, SettingsError

PORT = 1024
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Listening:
    """How a boss's hub is to be opened."""

    bind: str
    advertise: str | None
    insecure: bool
    exposed: bool


def listening(
    environ: Mapping[str, str],
    *,
    host: str | None = None,
    port: int | None = None,
    insecure: bool = False,
) -> Listening:
    """For the boss. Raises SettingsError for a port that is none.

    A host beyond loopback opens all interfaces, and is what workers are told to dial: it may be a
    name, or an address that a router hands on from.
    """
    host = host or environ.get("MODEL_HOST") or _LOOPBACK
    port = port_of(environ) if port is None else port
    if is_loopback(host):
        return Listening(bind=host_port(host, port), advertise=None, insecure=True, exposed=False)
    everywhere = "::" if ":" in host else "0.0.0.0"
    named = None if host in ("0.0.0.0", "::") else host_port(host, port) if port else host
    return Listening(
        bind=host_port(everywhere, port), advertise=named, insecure=insecure, exposed=insecure
    )


def dialling(environ: Mapping[str, str], *, run: str, insecure: bool = False) -> HubAddress:
    """For a worker. Raises NoMeetingPoint, AddressError or SettingsError, with the remedy."""
    host = environ.get("MODEL_HOST")
    if not host:
        raise NoMeetingPoint(
            "MODEL_HOST is not set",
            hint="set it to the address of the machine that the boss runs on, and MODEL_PORT to "
            f"its port, if that is not {PORT}",
        )
    port, token = port_of(environ), environ.get("MODEL_TOKEN")
    if token:
        return replace(_unpacked(token), host=host, port=port, run=run)
    if is_loopback(host):
        return HubAddress(host=host, port=port, run=run, insecure=True)
    if insecure:
        return HubAddress(host=host, port=port, run=run, insecure=True, exposed=True)
    raise AddressError(
        f"MODEL_HOST={host} is another machine, and MODEL_TOKEN is not set",
        hint="set it as the boss has printed it; or say insecure on both sides, if nobody else is "
        "on the network between: --insecure here, setup_host(..., insecure=True) there",
    )


def lines_for(address: HubAddress) -> list[str]:
    """What a worker's environment needs to reach a boss there; with a token they are a secret."""
    lines = [f"MODEL_HOST={address.host}", f"MODEL_PORT={address.port}"]
    return lines if address.insecure else [*lines, f"MODEL_TOKEN={address.code()}"]


def port_of(environ: Mapping[str, str]) -> int:
    """MODEL_PORT, or the seeds' 1024. Raises SettingsError."""
    text = environ.get("MODEL_PORT") or str(PORT)
    if not (text.isascii() and text.isdecimal() and int(text) < 1 << 16):
        raise SettingsError(f"MODEL_PORT is {text!r}", hint="a number from 0 to 65535")
    return int(text)


def _unpacked(token: str) -> HubAddress:
    hint = "copy all of what the boss has printed after MODEL_TOKEN="
    try:
        address = parse_address(token)
    except AddressError:
        raise AddressError("MODEL_TOKEN is not what a boss prints", hint=hint) from None
    if not isinstance(address, HubAddress) or not (address.fingerprint and address.token):
        raise AddressError("MODEL_TOKEN has no certificate or no token in it", hint=hint)
    return address
