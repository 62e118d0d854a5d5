"""Cap: how many samples one pass may have, on a device whose memory has an end.

A share grows when others go. A loop whose body runs out of memory is over, and so would be the next
peer's, whose share has then grown too. So a share that is larger than any pass before is computed
in several, unless what those took leaves room for more.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

_SAFE = 0.8  # of the memory that is left: an allocator's blocks are not as one would lay them


class Memory(NamedTuple):
    """Of this process, in bytes."""

    used: int
    peak: int  # since it was last to be counted anew
    limit: int  # that it can have


class Look(Protocol):
    """Looks at the memory of a device."""

    def __call__(self, *, anew: bool = False) -> Memory:
        """`anew`: its peak is counted from now on."""
        ...


class Cap:
    """Of one peer. `look` is asked only around passes that are larger than all before.

    Without it, nothing is known of an end: a pass is as large as it is asked to be.
    """

    def __init__(self, look: Look | None) -> None:
        self._look = look
        self._largest = 0  # samples of a pass that went well
        self._each = 0.0  # bytes that it took for each of them, at most
        self._before: int | None = None  # bytes in use when a larger one began

    def most(self, asked: int) -> int:
        """Samples of one pass at most, of so many that are to be computed."""
        if self._look is None or not self._largest or asked <= self._largest:
            return asked
        memory = self._look()
        room = _SAFE * (memory.limit - memory.used)
        fits = asked
        if self._each and self._each * asked > room:
            fits = int(room / self._each)
        return max(self._largest, fits)

    def begin(self, num_samples: int) -> None:
        """A pass over so many."""
        larger = self._look is not None and num_samples > self._largest
        # What was taken before, to load weights say, would else count as this pass's.
        self._before = self._look(anew=True).used if self._look is not None and larger else None

    def survived(self, num_samples: int) -> None:
        """It is done, its backward too: over so many, fewer perhaps than it began with."""
        if self._look is None or self._before is None or num_samples <= self._largest:
            return
        # Somebody may have reset the peak within the pass: then nothing is known of it.
        taken = max(0, self._look().peak - self._before)
        self._largest, self._each = num_samples, taken / num_samples
        self._before = None


def memory_of(device: torch.device) -> Look | None:
    """How to look at a GPU's; None for others: what a CPU has, other programs share and swap. And
    for an allocator that counts nothing: one that was plugged in.
    """
    if device.type != "cuda":
        return None

    def look(*, anew: bool = False) -> Memory:
        if anew:
            torch.cuda.reset_peak_memory_stats(device)
        free, total = torch.cuda.mem_get_info(device)
        used, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        # What the allocator keeps is ours already, in use or not.
        ours = free + torch.cuda.memory_reserved(device)
        allowed = torch.cuda.get_per_process_memory_fraction(device) * total
        return Memory(used, peak, min(ours, int(allowed)))

    try:
        look()
    except RuntimeError:
        return None
    return look
