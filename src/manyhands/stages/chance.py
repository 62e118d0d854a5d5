"""Chance: the random numbers that layers draw, set and put back."""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

_torch: Any = torch  # its stubs leave these functions half typed


def seed_of(seed: int, *place: int) -> int:
    """A seed for one place of a run, such as a layer, or a layer at a step and microbatch."""
    words = ":".join(map(str, (seed, *place))).encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8, person=b"manyhands-stage").digest())


def set_seed(seed: int) -> None:
    """Of the generators of all devices."""
    _torch.manual_seed(seed)


@contextmanager
def forked(device: torch.device | None = None) -> Generator[None]:
    """Whatever is drawn inside, the generators (this device's too) are as before afterwards."""
    cuda = [device] if device is not None and device.type == "cuda" else []
    with _torch.random.fork_rng(cuda):
        yield


class Drawn:
    """Where the generators stood."""

    def __init__(self, device: torch.device | None) -> None:
        self._cpu = cast("Tensor", _torch.get_rng_state())
        self._device = device if device is not None and device.type == "cuda" else None
        self._cuda = None if self._device is None else _torch.cuda.get_rng_state(self._device)

    @contextmanager
    def again(self) -> Generator[None]:
        """Inside, the same numbers are drawn once more."""
        with forked(self._device):
            _torch.set_rng_state(self._cpu)
            if self._device is not None:
                _torch.cuda.set_rng_state(self._cuda, self._device)
            yield
