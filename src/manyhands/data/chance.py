"""Chance: the random numbers of the sample that is being read, in whatever thread that is.

torch's, Python's and numpy's generators are the process's: of several threads that read at once,
none can say which numbers are its own. So each thread has a generator, and where that begins
depends on the run's seed, the epoch and the sample's position in it alone.
"""

from __future__ import annotations

import threading

import torch


class _Here(threading.local):
    """This thread's."""

    seed: int | None = None  # of the sample that is being read; None: none is
    begun: bool = False  # `own` is that sample's
    own: torch.Generator | None = None


_HERE = _Here()


def generator() -> torch.Generator:
    """The generator of the sample that this thread is reading, for `generator=` of torch's
    functions: what a transform draws from it is the same in any thread, process and order.

    Ask for it anew for every sample. Where nothing is being read it is torch's own.
    """
    if _HERE.seed is None:
        return torch.default_generator
    if _HERE.own is None:
        _HERE.own = torch.Generator()
    if not _HERE.begun:
        _HERE.begun = True
        _HERE.own.manual_seed(_HERE.seed)
    return _HERE.own


def begin_sample(seed: int) -> None:
    """This thread reads a sample whose random numbers begin there."""
    _HERE.seed, _HERE.begun = seed, False


def end_sample() -> None:
    """It has been read."""
    _HERE.seed = None
