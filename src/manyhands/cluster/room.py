"""Room: the free slots of the hosts, and the jobs that could be ended to make more.

Any slots make a gang, so whether a job fits is a question of numbers. Which slots it gets is
decided here, once it is known that it fits: on the fewest hosts, and of those the tightest.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from manyhands.cluster.job import Place


class Floor:
    """The free slots, host by host. Not thread-safe; slots only go, they never come back."""

    def __init__(self, free: Mapping[str, Sequence[int]]) -> None:
        self.count = sum(map(len, free.values()))
        """Free slots in all."""
        self._free = {name: sorted(slots) for name, slots in free.items()}
        self._hosts: dict[int, list[str]] = {}
        """By the number of their free slots; each list a heap, so that the first name is next."""
        for name in sorted(self._free):
            if slots := self._free[name]:
                self._hosts.setdefault(len(slots), []).append(name)
        self._levels = sorted(self._hosts)

    def take(self, num_slots: int) -> tuple[Place, ...]:
        """So many slots, which must be there. The emptiest hosts first, whole, as long as no host
        could hold the rest; then the one that holds it with the least to spare. No choice of
        hosts is smaller, and large gaps stay for large jobs.
        """
        if num_slots > self.count:
            raise ValueError(f"{num_slots} slots were asked for, {self.count} are free")
        self.count -= num_slots
        places: list[Place] = []
        while num_slots:
            tightest = bisect_left(self._levels, num_slots)
            level = self._levels[min(tightest, len(self._levels) - 1)]
            place = self._take_from(level, min(level, num_slots))
            places.append(place)
            num_slots -= len(place.slots)
        return tuple(places)

    def _take_from(self, level: int, num_slots: int) -> Place:
        names = self._hosts[level]
        name = heapq.heappop(names)
        if not names:
            del self._hosts[level]
            self._levels.remove(level)
        slots = self._free[name]
        taken, left = tuple(slots[:num_slots]), slots[num_slots:]
        self._free[name] = left
        if left:
            if len(left) not in self._hosts:
                self._hosts[len(left)] = []
                insort(self._levels, len(left))
            heapq.heappush(self._hosts[len(left)], name)
        return Place(name, taken)


class Candidate(NamedTuple):
    """A job that could be ended to make room. Compares by age: the youngest is the largest."""

    started_s: float
    id: int
    num_slots: int
    grace_s: float


class Victims:
    """Candidates of one priority. Takes the fewest that give the slots asked for; among those the
    smallest that do, so that no large job ends for a small gap; among equals the youngest, which
    has the least to lose.
    """

    def __init__(self, candidates: Iterable[Candidate]) -> None:
        self._by_size: dict[int, list[Candidate]] = {}
        for candidate in sorted(candidates):
            self._by_size.setdefault(candidate.num_slots, []).append(candidate)
        self._by_size.pop(0, None)  # one whose hosts are all gone gives nothing
        self._sizes = sorted(self._by_size)
        self.count = sum(size * len(those) for size, those in self._by_size.items())
        """Slots that all of them give together."""
        self.longest_s = max(
            (one.grace_s for those in self._by_size.values() for one in those), default=0.0
        )
        """The longest grace of any, taken or not."""

    def take(self, num_slots: int) -> list[Candidate]:
        """Those to end for so many slots, which they must have together."""
        taken: list[Candidate] = []
        while num_slots > 0:
            tightest = bisect_left(self._sizes, num_slots)
            size = self._sizes[min(tightest, len(self._sizes) - 1)]
            taken.append(self._pop(size))
            num_slots -= size
        return taken

    def _pop(self, size: int) -> Candidate:
        those = self._by_size[size]
        candidate = those.pop()
        if not those:
            del self._by_size[size]
            self._sizes.remove(size)
        self.count -= size
        return candidate


def taken_from(classes: Sequence[Victims], num_slots: int) -> list[Candidate]:
    """Whom to end for so many slots, of classes given from the lowest priority up: nobody of a
    class if those below would do without him.
    """
    taken: list[Candidate] = []
    for at in range(len(classes) - 1, -1, -1):
        below = sum(victims.count for victims in classes[:at])
        if num_slots > below:
            found = classes[at].take(num_slots - below)
            num_slots -= sum(one.num_slots for one in found)
            taken += found
    return taken


def least_above(sizes: Iterable[int], num_slots: int) -> int | None:
    """The smallest sum of some of these numbers that is at least `num_slots` (itself above 0), or
    None if all together are less. Sums are bits of one integer, so thousands take milliseconds.
    """
    counts: dict[int, int] = {}
    for size in sizes:
        counts[size] = counts.get(size, 0) + 1
    if sum(size * many for size, many in counts.items()) < num_slots:
        return None
    # No smallest sum is larger: without any one of its parts it would be below num_slots.
    mask = (1 << (num_slots + max(counts))) - 1
    sums = 1
    for size, many in sorted(counts.items()):
        step = 1
        while many:  # 1, 2, 4, ... of a size at once: every number of them is a sum of these
            step = min(step, many)
            sums |= (sums << size * step) & mask
            many -= step
            step *= 2
    above = sums >> num_slots
    return num_slots + (above & -above).bit_length() - 1
