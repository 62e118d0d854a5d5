"""Memory: on which device a worker works, and how much it has to give there."""

from __future__ import annotations

from pathlib import Path

import torch

from manyhands.core.errors import UsageError

_MEMINFO = Path("/proc/meminfo")


def device_of(name: str | None) -> torch.device:
    """The device of that name; without one, a GPU if there is one. Raises UsageError."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(
            f"there is no device {name} here: {str(error).splitlines()[0]}",
            hint="--device cpu, or cuda:0 where there is a GPU",
        ) from None
    return device


def free_bytes(device: torch.device) -> int:
    """Of the device, or of this machine. Raises UsageError where that cannot be known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "cpu" and _MEMINFO.exists():
        for line in _MEMINFO.read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == "MemAvailable":
                return int(rest.split()[0]) * 1024
    raise UsageError(
        f"it cannot be found out how much memory is free on {device}",
        hint="say how much this worker may use: --memory MIB",
    )
