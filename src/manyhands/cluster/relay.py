"""The cluster's hub: where the peers of jobs meet, at the same place after every restart.

    STATE/hub/         its key, token and runs
    STATE/hub/port     where it listened last

Jobs outlive a coordinator that is killed, and look for the hub where it was. So the port is kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from manyhands.cluster.server import PORT
from manyhands.core.address import host_port, split_host_port
from manyhands.core.errors import LinkBroken, SettingsError
from manyhands.links.hub import Hub, HubLimits

_LIMITS = HubLimits(peers=4096, runs=1024, handshakes=256)


def open_relay(bind: str, advertise: str | None, state: Path, say: Callable[[str], None]) -> Hub:
    """The hub of a coordinator that listens at `bind`, to be closed by the caller.

    It listens on the same address, at the port that it had, or beside the coordinator's, or at
    any that is free, of which `say` gets a warning. `advertise` is the coordinator's: of it the
    host counts.
    """
    host, port = split_host_port(bind, PORT)
    shown = None if advertise is None else _shown(advertise)
    folder = state / "hub"
    kept = folder / "port"
    wanted = _read(kept) or (port + 1 if 0 < port < 65535 else 0)
    try:
        hub = Hub(host_port(host, wanted), advertise=shown, state=folder, limits=_LIMITS)
    except LinkBroken:
        hub = Hub(host_port(host, 0), advertise=shown, state=folder, limits=_LIMITS)
        say(
            f"warning: the hub's port {wanted} is taken, it listens at {hub.near.port}: jobs of an "
            "earlier `up` that still run do not find it there, nor may others through a firewall"
        )
    try:
        kept.write_text(f"{hub.near.port}\n")
    except OSError as error:
        hub.close()
        raise SettingsError(
            f"a cluster cannot keep its hub in {folder}: {error.strerror}",
            hint="name a folder of yours with --state",
        ) from None
    return hub


def _shown(advertise: str) -> str:
    host, _ = split_host_port(advertise, PORT)
    return f"[{host}]" if ":" in host else host


def _read(path: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        port = int(path.read_text())
        return port if 0 < port < 65536 else 0
    return 0
