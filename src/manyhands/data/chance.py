"""Chance: the random numbers of the sample that is being read, in whatever thread that is.

torch's, Python's and numpy's generators are the process's: of several threads that read at once,
none can say which numbers are its own. So each thread has a generator, and where that begins
depends on the run's seed, the epoch and the sample's position in it alone.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch

from manyhands.data.fetch import seed_of
from manyhands.data.quarantine import replacement


class Origin(NamedTuple):
    """Where the random numbers of a sample begin: the run's seed, its epoch and its position. Of
    one that takes its place, `attempt` says which.
    """

    seed: int
    epoch: int
    position: int
    attempt: int = -1


class _Here(threading.local):
    """This thread's."""

    origin: Origin | None = None  # of the sample that is being read; None: none is
    begun: Origin | None = None  # of what `own` has begun
    own: torch.Generator | None = None


_HERE = _Here()


def generator() -> torch.Generator:
    """The generator of the sample that this thread is reading, for `generator=` of torch's
    functions: what a transform draws from it is the same in any thread, process and order.

    Ask for it anew for every sample. Where nothing is being read it is torch's own.
    """
    origin = _HERE.origin
    if origin is None:
        return torch.default_generator
    if _HERE.own is None:
        _HERE.own = torch.Generator()
    if _HERE.begun is not origin:
        _HERE.begun = origin
        _HERE.own.manual_seed(number_of(origin))
    return _HERE.own


def number_of(origin: Origin) -> int:
    """To seed a generator with."""
    seed = seed_of(origin.seed, origin.epoch, origin.position)
    return seed if origin.attempt < 0 else replacement(seed, origin.attempt, 1).seed


def begin_sample(origin: Origin) -> None:
    """This thread reads the sample whose random numbers begin there."""
    _HERE.origin = origin


def end_sample() -> None:
    """It reads none."""
    _HERE.origin = None
