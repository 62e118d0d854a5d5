"""Alone: a round that only one peer is in. Its own contribution is the result, as it is.

Whoever comes later begins from a later state, so nobody will ask for the values: they are neither
added up, nor encoded, nor kept.
"""

from __future__ import annotations

import cmath
import secrets
from collections.abc import Sequence
from itertools import groupby

import msgspec
import torch
from torch import Tensor

from manyhands.collectives.bank import Bank
from manyhands.collectives.events import Concluded
from manyhands.collectives.instructions import Commit
from manyhands.collectives.messages import Sum
from manyhands.collectives.results import Own, has_mean

_DIGEST_BYTES = 16


class Alone:
    """Of one engine, whose lock guards it. `refuse`: see adder."""

    def __init__(self, bank: Bank, *, refuse: bool) -> None:
        self._bank, self._refuse = bank, refuse
        # A codec that rounds does so for one peer too.
        self._possible = all(codec.raw for codec in bank.codecs)
        self._own: Own | None = None

    def fits(self) -> bool:
        """Whether what is in the bank could be a result: values that are refused could not.

        It looks at all of them: ask when the share is complete.
        """
        if not self._possible or self._bank.empty or any(map(_only_stored, self._bank.flats)):
            return False
        return not self._refuse or are_finite(self._bank.flats)

    def conclude(self, head: Sum, notes: bytes) -> Concluded:
        """It has no norm: who wants one takes it of the mean."""
        weight = self._bank.weight
        self._own = Own(self._bank.flats, weight)
        head = msgspec.structs.replace(head, weight=weight, notes=notes)
        return Concluded(head, secrets.token_bytes(_DIGEST_BYTES))

    def take(self, commit: Commit) -> Own | None:
        """What was concluded, if it is this round's result."""
        own, self._own = self._own, None
        return own if commit.alone else None


def _only_stored(tensor: Tensor) -> bool:
    """Whether torch has no sum for its dtype; an owner adds them up as wider ones."""
    dtype = tensor.dtype
    return dtype is torch.complex32 or (dtype.is_floating_point and dtype.itemsize == 1)


@torch.no_grad()
def are_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether all values are. Also no if their sum is too large for a number: then look closer."""
    means = [tensor for tensor in tensors if has_mean(tensor)]
    on_gpu = [tensor for tensor in means if tensor.is_cuda]
    if on_gpu and not _are_finite_there(on_gpu):
        return False
    return all(cmath.isfinite(tensor.sum().item()) for tensor in means if not tensor.is_cuda)


def _are_finite_there(tensors: Sequence[Tensor]) -> bool:
    """One question to each GPU, not one for each tensor: it has to finish before it can answer."""
    by_device = groupby(sorted(tensors, key=lambda t: t.device.index), lambda t: t.device)
    norms = (torch.stack(torch._foreach_norm(list(ts))) for _, ts in by_device)  # pyright: ignore
    return all(bool(norm.isfinite().all()) for norm in norms)
