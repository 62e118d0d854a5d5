"""Heap: what a step has freed stays with the process, for the next step.

glibc hands the end of its heap back to the kernel as soon as a few megabytes of it are free, and a
training frees its gradients in every step: the next one gets them again page by page, each of them
cleared. For 2 M parameters these are about 1000 page faults a step, a tenth of its time.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
_MAP_BYTES = 32 << 20  # larger blocks are always the kernel's: glibc lets nobody raise this further
_STEP_BYTES = 256 << 20  # besides gradients: activations, batches
_SHARE = 16  # of a machine's memory: others may need what is free here
_INT_MAX = (1 << 31) - 1  # mallopt takes an int
_SET_BY_USER = ("MALLOC_", "GLIBC_TUNABLES")


def keep_freed(num_bytes: int, device: torch.device, environ: Mapping[str, str]) -> bool:
    """Keep free memory for gradients of so many bytes, and for what else a step needs.

    It holds for the rest of the process's life and for processes that it forks, and for each of
    malloc's heaps. False, and nothing is changed, for gradients that are not on the CPU, if the
    environment sets malloc up, and with other C libraries.
    """
    if device.type != "cpu" or sys.platform != "linux":
        return False
    if any(name.startswith(_SET_BY_USER) for name in environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    kept = kept_bytes(num_bytes, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return bool(mallopt(_MMAP_THRESHOLD, _MAP_BYTES) and mallopt(_TRIM_THRESHOLD, kept))


def kept_bytes(num_bytes: int, memory_bytes: int) -> int:
    """How much may be free, with gradients of so many bytes, on a machine with so much memory."""
    return min(2 * num_bytes + _STEP_BYTES, memory_bytes // _SHARE, _INT_MAX)
