"""Devices: which ones a training uses, and how many cores each of them gets."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from manyhands.core.errors import UsageError

Device = torch.device | str | int
"""A torch.device, its name, or the number of a GPU."""

_HINT = 'name them: ["cuda:0", "cuda:1"], ["cpu", "cpu"]; or None for all GPUs, else the CPU'


def resolve(devices: Sequence[Device] | Device | None) -> tuple[torch.device, ...]:
    """The devices by name; None is every GPU that is visible, or the CPU if there is none.

    One that is named twice has two replicas. Raises UsageError for one that is not here.
    """
    if devices is None:
        found = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        return tuple(found) or (torch.device("cpu"),)
    named = [devices] if isinstance(devices, str | int | torch.device) else list(devices)
    if not named:
        raise UsageError("a training on no device", hint=_HINT)
    return tuple(_one(device) for device in named)


def _one(name: Device) -> torch.device:
    try:
        device = torch.device("cuda", name) if isinstance(name, int) else torch.device(name)
    except (RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"{name!r} is no device: {reason}", hint=_HINT) from None
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        if device.index >= torch.cuda.device_count():
            raise UsageError(
                f"{device} is not here: torch sees {torch.cuda.device_count()} GPUs", hint=_HINT
            )
    return device


def cores_for(num_devices: int, num_cores: int) -> int:
    """How many cores torch uses for each of so many devices."""
    return max(1, num_cores // num_devices)


def kind_of(device: torch.device) -> str:
    """What its arithmetic depends on: of two kinds, the last bits differ."""
    if device.type == "cuda":
        return f"cuda {torch.cuda.get_device_name(device)}"
    if device.type == "cpu":
        return f"cpu {torch.backends.cpu.get_cpu_capability()}"
    return device.type
