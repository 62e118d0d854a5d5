"""Devices: the slots of a host. Its GPUs as NVML counts them, or shares of its CPUs."""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from manyhands.cluster.messages import Kind, Slot
from manyhands.core.errors import ManyhandsError, UsageError

_DRIVER = "/dev/nvidiactl"


class Gpu(NamedTuple):
    """One that NVML knows, at its place in PCI order."""

    uuid: str
    name: str


def find_slots(
    num_slots: int | None = None,
    *,
    gpu_indices: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
    find_gpus: Callable[[], list[Gpu]] | None = None,
    cores: Sequence[int] | None = None,
) -> tuple[Slot, ...]:
    """What this host offers: its GPUs where it has any, else `num_slots` shares of its cores (1).

    `num_slots` takes the first of the GPUs, `gpu_indices` those that a hostfile names; on a host
    without GPUs it is one share for each. The agent's own CUDA_VISIBLE_DEVICES is respected.
    Raises UsageError for more than there are, ManyhandsError when the driver fails.
    """
    if num_slots is not None and num_slots < 1:
        raise UsageError(f"a host has 1 slot or more, not {num_slots}", hint="--slots N, N >= 1")
    if len(set(gpu_indices)) < len(gpu_indices):
        raise UsageError(f"a GPU is named twice: {', '.join(map(str, gpu_indices))}")
    given = os.environ if environment is None else environment
    gpus = visible((find_gpus or nvml_gpus)(), given.get("CUDA_VISIBLE_DEVICES"), named=gpu_indices)
    if gpus is None:
        own = sorted(_own_cores()) if cores is None else list(cores)
        return cpu_shares(num_slots or len(gpu_indices) or 1, own)
    if num_slots is not None and num_slots > len(gpus):
        raise UsageError(
            f"{num_slots} slots were asked for, and this host has {len(gpus)} GPUs to offer",
            hint="ask for as many as there are; CUDA_VISIBLE_DEVICES= offers its CPUs instead",
        )
    return tuple(
        Slot(index, Kind.GPU, gpu.uuid, gpu.name) for index, gpu in enumerate(gpus[:num_slots])
    )


def visible(
    gpus: Sequence[Gpu], variable: str | None, *, named: Sequence[int] = ()
) -> list[Gpu] | None:
    """Those that may be offered; None where there are none at all, or all are hidden.

    CUDA_VISIBLE_DEVICES counts, as CUDA does, up to the first word that names none. Its numbers
    are taken in PCI order: CUDA's own puts the fastest first, which differs on hosts with GPUs of
    several kinds unless CUDA_DEVICE_ORDER=PCI_BUS_ID; UUIDs are never in doubt.
    """
    if not gpus:
        return None
    shown = list(gpus)
    if variable is not None:
        shown.clear()
        for word in variable.split(","):
            gpu = _named(gpus, word.strip())
            if gpu is None or gpu in shown:
                break
            shown.append(gpu)
    if not shown:
        return None
    if any(index >= len(shown) for index in named):
        raise UsageError(
            f"GPU {max(named)} was asked for, and this host has {len(shown)}, from 0 on",
            hint="correct the hostfile, or CUDA_VISIBLE_DEVICES of the agent",
        )
    return [shown[index] for index in named] if named else shown


def _named(gpus: Sequence[Gpu], word: str) -> Gpu | None:
    if word.isdigit():
        return gpus[int(word)] if int(word) < len(gpus) else None
    if word.startswith("MIG-"):  # a part of a GPU, which CUDA finds by itself
        return Gpu(word, "MIG")
    matching = [gpu for gpu in gpus if word and gpu.uuid.startswith(word)]
    return matching[0] if len(matching) == 1 else None


def nvml_gpus(import_module: Callable[[str], Any] = importlib.import_module) -> list[Gpu]:
    """All GPUs of this host; none without a driver. Raises ManyhandsError if it fails otherwise."""
    try:
        # Any: the module has no types.
        nvml: Any = import_module("pynvml")
    except ImportError:
        if not os.path.exists(_DRIVER):
            return []
        raise UsageError(
            f"this host has NVIDIA's driver ({_DRIVER}), and nothing to ask it with",
            hint="pip install nvidia-ml-py",
        ) from None
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded):
        return []
    except nvml.NVMLError as error:
        raise _driver_failed(error) from error
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        return [
            Gpu(_text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle)))
            for handle in handles
        ]
    except nvml.NVMLError as error:
        raise _driver_failed(error) from error
    finally:
        nvml.nvmlShutdown()


def _driver_failed(error: object) -> ManyhandsError:
    return ManyhandsError(
        f"NVIDIA's driver does not answer: {error}",
        hint="see nvidia-smi; CUDA_VISIBLE_DEVICES= does not help here: the host is not in order",
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value  # bytes in older releases


def cpu_shares(num_slots: int, cores: Sequence[int]) -> tuple[Slot, ...]:
    """Even and contiguous shares; with fewer cores than slots, nobody is pinned to any."""
    pinned = len(cores) >= num_slots
    bounds = [len(cores) * index // num_slots for index in range(num_slots + 1)]
    shares = [cores[low:high] if pinned else () for low, high in itertools.pairwise(bounds)]
    return tuple(
        Slot(index, Kind.CPU, format_cores(share), _share_name(len(share), len(cores)))
        for index, share in enumerate(shares)
    )


def _share_name(num_cores: int, of: int) -> str:
    own = f"{num_cores} of {of}" if num_cores else f"any of {of}"
    return f"{own} core{'' if of == 1 else 's'}"


def format_cores(cores: Sequence[int]) -> str:
    """`0-3,8` of 0, 1, 2, 3, 8."""
    spans: list[list[int]] = []
    for core in cores:
        if spans and spans[-1][1] == core - 1:
            spans[-1][1] = core
        else:
            spans.append([core, core])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def cores_of(slot: Slot) -> list[int]:
    """The cores of a share, empty where nobody is pinned to any, as on GPUs."""
    cores: list[int] = []
    for span in slot.device.split(",") if slot.kind is Kind.CPU and slot.device else ():
        low, _, high = span.partition("-")
        cores += range(int(low), int(high or low) + 1)
    return cores


def _own_cores() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))
