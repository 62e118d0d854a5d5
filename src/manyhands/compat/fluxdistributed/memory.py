"""Memory: how a device says that it has no more, and how it gets some back."""

from __future__ import annotations

import gc

import torch

_OF_CPU = ("DefaultCPUAllocator", "not enough memory")  # a plain RuntimeError of torch's


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: a GPU's, Python's, or torch's on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _OF_CPU)


def give_back(device: torch.device) -> None:
    """Return what nothing refers to any more to the device."""
    gc.collect()
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()
