"""Tables for the tests of loaders: a worker process finds them by name."""

from __future__ import annotations

import os
import random
import signal
import threading

import torch
from torch.utils.data import Dataset

from manyhands.data import generator
from manyhands.data.table import BadSample


class Numbers:
    """A number, and what its own generator gives for it. Some are bad, and say where."""

    def __init__(self, size: int = 40, bad: tuple[int, ...] = ()) -> None:
        self.size, self.bad = size, frozenset(bad)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int):
        if index in self.bad:
            raise BadSample(self.where(index), "it is torn")
        return index, torch.rand((), generator=generator()).item()

    def where(self, index: int) -> str:
        return f"numbers/{index}.txt"


class Wide(Numbers):
    """As large as an image."""

    def __getitem__(self, index: int):
        return super().__getitem__(index)[0], torch.full((3, 64, 64), float(index))


class Foreign(Dataset):
    """A data set that knows nothing of ours: it raises what it likes, and draws from anything."""

    def __init__(self, errors: dict[int, Exception] | None = None) -> None:
        self.errors = errors or {}

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int):
        if index in self.errors:
            raise self.errors[index]
        return index, torch.rand(()).item(), random.random()


class Deadly(Numbers):
    """One of them kills whoever reads it: once, if there is a file to say so."""

    def __init__(self, victim: int, seen: str) -> None:
        super().__init__()
        self.victim, self.seen = victim, seen

    def __getitem__(self, index: int):
        if index == self.victim and not os.path.exists(self.seen):
            with open(self.seen, "w"):
                pass
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Opened(Numbers):
    """Has a file system: says whose process opened it, and which one reads."""

    def __init__(self, filesystem) -> None:
        super().__init__()
        self.filesystem = filesystem

    def __getitem__(self, index: int):
        return self.filesystem._pid, os.getpid()


class Counted(Numbers):
    """Fails when it is asked for more than is to be read by then."""

    def __init__(self, ahead: int) -> None:
        super().__init__()
        self.ahead, self.taken, self.read = ahead, 0, 0
        self.lock = threading.Lock()

    def __getitem__(self, index: int):
        with self.lock:
            self.read += 1
            assert self.read <= self.taken + self.ahead, (self.read, self.taken)
        return super().__getitem__(index)


class Marking(Numbers):
    """Leaves a file for each sample that is read, in whichever process."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def __getitem__(self, index: int):
        open(os.path.join(self.folder, str(index)), "x").close()
        return super().__getitem__(index)


class Gated(Numbers):
    """Those who read wait at a gate."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.waiting, self.gate = at, threading.Event(), threading.Event()

    def __getitem__(self, index: int):
        if index == self.at:
            self.waiting.set()
            assert self.gate.wait(30)
        return super().__getitem__(index)


def double(sample):
    """A transform that can be sent to a process."""
    return sample[0] * 2, *sample[1:]


def jitter(sample):
    """One that draws."""
    return sample[0], torch.rand(2, generator=generator()).tolist()


def fails_at_seven(sample):
    if sample[0] == 7:
        raise ArithmeticError("seven")
    return sample


class Stuck(Wide):
    """One that nobody comes back from; it says so in a file."""

    def __init__(self, at: int, said: str) -> None:
        super().__init__()
        self.at, self.said = at, said
        self.shared = torch.ones(1 << 16)  # travels with the table

    def __getitem__(self, index: int):
        if index == self.at:
            with open(self.said, "w"):
                pass
            signal.pause()
        return super().__getitem__(index)
