"""Precision: whether torch.autocast is on where a peer computes, and to which type it casts.

What crosses between stages is of the type that autocast gives it, so all peers must have it alike.
It is for forwards only: backwards and optimizers run as if it were off, as torch advises.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal, get_args

import torch

from manyhands.core.errors import UsageError

Precision = Literal["bfloat16", "float16"]
"""What one peer may tell another to cast to."""

_AS_IT_IS = nullcontext()
_KINDS = ("cpu", "cuda")


def precision_of(device: torch.device) -> str | None:
    """The type to which autocast casts on this device now, such as "bfloat16"; None: it is off."""
    kind = device.type
    if not torch.is_autocast_enabled(kind):
        return None
    return str(torch.get_autocast_dtype(kind)).removeprefix("torch.")


def precision_here() -> Precision | None:
    """That of the caller's block, for devices of any kind: whoever is told casts on its own.

    Raises UsageError for what cannot be told in one word.
    """
    found = {precision_of(torch.device(kind)) for kind in _KINDS} - {None}
    for known in get_args(Precision):
        if found == {known}:
            return known
    if not found:
        return None
    raise UsageError(
        f"autocast is to {' and '.join(sorted(map(str, found)))} here",
        hint=f"one of: {', '.join(get_args(Precision))}; workers cast to it on their own devices",
    )


def casting(device: torch.device, precision: str | None) -> AbstractContextManager[object]:
    """In the block it is as `precision_of` said."""
    if precision is None and not torch.is_autocast_enabled(device.type):
        return _AS_IT_IS
    if precision_of(device) == precision:
        return _AS_IT_IS
    dtype = None if precision is None else getattr(torch, precision)
    return torch.autocast(device.type, dtype=dtype, enabled=precision is not None)


def forget_casts(device: torch.device) -> None:
    """Weights that autocast has cast and keeps to the end of its block: they change in a step."""
    if torch.is_autocast_enabled(device.type):
        torch.clear_autocast_cache()


def said(precision: str | None) -> str:
    """In words."""
    return "without autocast" if precision is None else f"under autocast to {precision}"
