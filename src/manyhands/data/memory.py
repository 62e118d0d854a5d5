"""Memory: whether an error says that there was none, whoever of torch and Python has raised it."""

from __future__ import annotations

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
