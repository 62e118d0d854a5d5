"""Memory: how a device says that it has no more, and how it gets some back."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

_OF_TORCH = (  # plain RuntimeErrors of torch's
    "DefaultCPUAllocator",
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: a GPU's, Python's, or torch's own."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _OF_TORCH)


def give_back(device: torch.device) -> None:
    """Return what nothing refers to any more to the device."""
    gc.collect()
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()


def is_short(act: Callable[[], object]) -> bool:
    """Whether memory ran out while it was done; what else it raises is raised."""
    try:
        act()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return True
    return False
