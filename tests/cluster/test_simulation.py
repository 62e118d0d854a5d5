"""The scheduler in thousands of random lives of a cluster; and that wrong ones would be found."""

from __future__ import annotations

import math

import msgspec
import pytest

from manyhands.cluster.job import Place, Priority
from manyhands.cluster.room import Floor, least_above
from manyhands.cluster.schedule import Decisions, Entry, Host, Running, Tick, decide

from .simulation import Broken, Job, World, random_world, run

TRACES = 3_200
FOUND = (2_821, 15_001, 16_505, 42_741, 5_557, 21_864, 39_743)
"""In which something was found once that few traces find."""
BLOCKS = 8


@pytest.mark.parametrize("block", range(BLOCKS))
def test_everything_holds_in_random_traces(block: int) -> None:
    for seed in (*range(block, TRACES, BLOCKS), *FOUND[block : block + 1]):
        try:
            run(random_world(seed), seed=seed)
        except Broken as error:
            raise Broken(f"seed {seed}: {error}") from error


def test_the_traces_have_everything_in_them() -> None:
    """Preemption, of those in front of a head too; backfill, attempts after the first, heads with
    and without a promise.
    """
    seen = dict.fromkeys(("preempted", "in time", "backfilled", "again", "promised", "unknown"), 0)

    def watched(now_s: float, hosts: list[Host], entries: list[Entry]) -> Decisions:
        decisions = decide(now_s, hosts, entries)
        if decisions != decide(now_s, hosts, entries, backfill=False):
            seen["backfilled"] += 1
        if decisions.promise is not None:
            seen["unknown" if decisions.promise.by_s == math.inf else "promised"] += 1
            seen["in time"] += any(whom == decisions.promise.job for _, whom in decisions.preempt)
        return decisions

    for seed in range(200):
        jobs = run(random_world(seed), watched, seed=seed).jobs.values()
        seen["preempted"] += sum(job.preemptions for job in jobs)
        seen["again"] += sum(job.starts > 1 for job in jobs)
    assert seen.pop("in time") > 3, seen
    assert min(seen.values()) > 50, seen


def test_a_world_by_hand() -> None:
    """What the simulation does with time: a job is told at its limit, and takes its grace."""
    jobs = [
        Job(1, 2, Priority.NORMAL, 0.0, 10.0, 4.0, runs_s=99.0, stops_s=3.0),
        Job(2, 2, Priority.NORMAL, 1.0, None, 4.0, runs_s=5.0, stops_s=0.0),
        Job(3, 1, Priority.HIGH, 14.0, None, 4.0, runs_s=1.0, stops_s=0.0),
    ]
    starts: list[tuple[float, int]] = []

    class Watched(World):
        def start(self, job: Job, places: tuple[Place, ...]) -> None:
            super().start(job, places)
            starts.append((self.now_s, job.id))

    run(Watched({"a": Host("a", (0, 1))}, {job.id: job for job in jobs}, []))
    # 1 is gone at 13; 2 is preempted by 3 at 14, and begins again when that is over.
    assert starts == [(0.0, 1), (13.0, 2), (14.0, 3), (15.0, 2)]
    assert jobs[1].preemptions == 1


# Wrong schedulers, each with the first trace in which it is found out


class ForgetsGrace(Tick):
    def _may_follow(self, head: Entry, entry: Entry, starts_s: float) -> bool:
        return super()._may_follow(head, msgspec.structs.replace(entry, grace_s=0.0), starts_s)


class PutsAnybodyInFront(Tick):
    def _may_follow(self, head: Entry, entry: Entry, starts_s: float) -> bool:
        return True


class PutsNobodyInFront(Tick):
    def _may_follow(self, head: Entry, entry: Entry, starts_s: float) -> bool:
        return False


class TrustsLimitsWithoutAPromise(Tick):
    def _may_follow(self, head: Entry, entry: Entry, starts_s: float) -> bool:
        short = self._by_s == math.inf and entry.limit_s is not None
        return short or super()._may_follow(head, entry, starts_s)


class HopesForTheBestEnd(Tick):
    def _spare_slots(self, head: Entry) -> int:
        if self._spare is None:
            self._spare = self._total - head.slots
        return self._spare


class GivesOneSlotTooMany(Tick):
    def _promise(self, entry: Entry) -> None:
        super()._promise(entry)
        if self._spare is not None:
            self._spare += 1


class ForgetsThatRoomTakesTime(Tick):
    def _room_by_s(self, entry: Entry) -> float:
        return self._now_s


class PassesTheHeadOver(Tick):
    def _promise(self, entry: Entry) -> None:
        self._waits[entry.id] = "later"


class PreemptsEquals(Tick):
    def _lower(self, rank: int) -> list:
        return self._victims[: rank + 1]


class NeverPreempts(Tick):
    def _lower(self, rank: int) -> list:
        return []


class ForgetsWhoIsEnding(Tick):
    def __init__(self, *told, **options) -> None:
        super().__init__(*told, **options)
        self._soon, self._told = [0 for _ in self._soon], 0


class WaitsForWhoEndsLate(Tick):
    def _given_soon(self, one: Running, rank: int) -> int:
        return one.num_slots if one.told else 0


class ForgetsTheGraceOfTheTold(Tick):
    def _longest_below(self, rank: int) -> float:
        running = self._running
        self._running = {id_: one for id_, one in running.items() if not one.told}
        longest_s, self._running = super()._longest_below(rank), running
        return longest_s


class TakesEachForTheFirst(Tick):
    def _coming(self, rank: int) -> int:
        self._first = None
        return super()._coming(rank)


class TellsThemAtThePromisedTime(Tick):
    def _tell_s(self, by_s: float) -> float:
        return by_s


class FillsWithoutAPromise(Tick):
    def _may_fill(self, head: Entry, entry: Entry, starts_s: float) -> bool:
        return self._by_s == math.inf or super()._may_fill(head, entry, starts_s)


class LeavesNothingToLowerOnes(Tick):
    def _may_fill(self, head: Entry, entry: Entry, starts_s: float) -> bool:
        in_time = self._by_s == math.inf or not self._is_telling
        return in_time and super()._may_fill(head, entry, starts_s)


class FillsWhateverTheGrace(Tick):
    def _may_fill(self, head: Entry, entry: Entry, starts_s: float) -> bool:
        known, waits = self._by_s < math.inf, starts_s > self._now_s
        left = known and not waits and self._takes_spare(head, entry)
        return left or super()._may_fill(head, entry, starts_s)


class TakesLowerOnesForFree(Tick):
    def _spare_slots(self, head: Entry) -> int:
        if self._spare is None:
            others = [one for one in self._running.values() if one.entry.rank >= head.rank]
            room = self._total - sum(one.num_slots for one in others)
            least = least_above((one.num_slots for one in others), head.slots - room)
            self._spare = 0 if least is None else room + least - head.slots
        return self._spare


class TakesTheEndingForGone(Tick):
    def _gone_s(self, entry: Entry) -> float:
        return self._now_s if entry.ending else super()._gone_s(entry)


class ForgetsSinceWhenTheyEnd(Tick):
    def _gone_s(self, entry: Entry) -> float:
        return super()._gone_s(msgspec.structs.replace(entry, ending_s=None))


class HoldsNothing(Tick):
    def _begin(self, entry: Entry) -> bool:
        free, begun = self._free, super()._begin(entry)
        if begun and entry.id in self._waits:
            self._free, self._claimed = free, False
        return begun


class CountsLostHosts(Tick):
    def _held(self, entry: Entry, usable: dict[str, set[int]]):
        return super()._held(entry, usable)._replace(num_slots=entry.slots)


class GivesSlotsTwice(Tick):
    def __init__(self, now_s: float, hosts: list[Host], entries: list[Entry], **options) -> None:
        super().__init__(now_s, hosts, entries, **options)
        self._floor = Floor({host.name: host.slots for host in hosts})
        self._free = self._floor.count


class IgnoresPriorities(Tick):
    def __init__(self, *told, **options) -> None:
        super().__init__(*told, **options)
        self._line.sort(key=lambda one: (one.queued_s, one.id))


class LastComeFirst(Tick):
    def __init__(self, *told, **options) -> None:
        super().__init__(*told, **options)
        self._line.sort(key=lambda one: (-one.rank, -one.queued_s))


class TakesThemAsTheyCome(Tick):
    def __init__(self, now_s: float, hosts: list[Host], entries: list[Entry], **options) -> None:
        super().__init__(now_s, hosts, entries, **options)
        self._line = [one for one in entries if not one.places and not one.ending]
        self._line.sort(key=lambda one: -one.rank)


class ForgetsOneOfTheGang(Tick):
    def _start(self, entry: Entry) -> None:
        super()._start(entry)
        id_, places = self._place.pop()
        first = Place(places[0].host, places[0].slots[1:])
        self._place.append((id_, (first, *places[1:])))


class SpreadsOut(Tick):
    def _start(self, entry: Entry) -> None:
        free = {name: list(slots) for name, slots in self._floor._free.items()}
        super()._start(entry)
        taken: list[Place] = []
        while sum(len(place.slots) for place in taken) < entry.slots:
            taken += [
                Place(name, (slots.pop(0),))
                for name, slots in free.items()
                if slots and sum(len(place.slots) for place in taken) < entry.slots
            ]
        self._place[-1] = entry.id, tuple(taken[: entry.slots])


MUTANTS = {
    ForgetsGrace: 0,
    PutsAnybodyInFront: 0,
    PutsNobodyInFront: 0,
    TrustsLimitsWithoutAPromise: 0,
    HopesForTheBestEnd: 0,
    GivesOneSlotTooMany: 0,
    ForgetsThatRoomTakesTime: 1600,
    PassesTheHeadOver: 0,
    PreemptsEquals: 0,
    NeverPreempts: 0,
    ForgetsWhoIsEnding: 0,
    WaitsForWhoEndsLate: 70,
    ForgetsTheGraceOfTheTold: 0,
    TakesEachForTheFirst: 21_800,
    TellsThemAtThePromisedTime: 90,
    FillsWithoutAPromise: 0,
    LeavesNothingToLowerOnes: 5_500,
    FillsWhateverTheGrace: 100,
    TakesLowerOnesForFree: 220,
    TakesTheEndingForGone: 0,
    ForgetsSinceWhenTheyEnd: 0,
    HoldsNothing: 0,
    CountsLostHosts: 0,
    GivesSlotsTwice: 0,
    IgnoresPriorities: 0,
    LastComeFirst: 0,
    TakesThemAsTheyCome: 0,
    ForgetsOneOfTheGang: 0,
    SpreadsOut: 0,
}


@pytest.mark.parametrize("wrong", MUTANTS, ids=lambda wrong: wrong.__name__)
def test_a_wrong_scheduler_is_found_out(wrong: type[Tick]) -> None:
    def scheduler(now_s: float, hosts: list[Host], entries: list[Entry]) -> Decisions:
        return wrong(now_s, hosts, entries, backfill=True).decided()

    first = MUTANTS[wrong]
    for seed in range(first, first + 100):
        run(random_world(seed), seed=seed)  # or the trace itself is at fault
        try:
            run(random_world(seed), scheduler, seed=seed)
        except Broken:
            return
    pytest.fail(f"{wrong.__name__} passed for right")
