"""The scheduler's rules, one by one. That they hold together: test_simulation.py."""

from __future__ import annotations

import math
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.cluster.job import Place, Priority
from manyhands.cluster.schedule import Decisions, Entry, Host, Promise, decide

HIGH, NORMAL, LOW = Priority.HIGH, Priority.NORMAL, Priority.BEST_EFFORT


def hosts(*sizes: int) -> list[Host]:
    return [Host(f"h{n}", tuple(range(size))) for n, size in enumerate(sizes)]


def wants(
    id_: int,
    slots: int,
    priority: Priority = NORMAL,
    *,
    limit_s: float | None = None,
    grace_s: float = 5.0,
    queued_s: float | None = None,
) -> Entry:
    """Queued in the order of the ids, unless it is said otherwise."""
    return Entry(id_, slots, priority, id_ if queued_s is None else queued_s, limit_s, grace_s)


def runs(entry: Entry, *places: tuple[str, int], since_s: float = 0.0) -> Entry:
    """On the first slots of each host from a number on, as `("h0", 2)`: one slot, number 2."""
    held: dict[str, list[int]] = {}
    for host, slot in places:
        held.setdefault(host, []).append(slot)
    where = tuple(Place(host, tuple(slots)) for host, slots in held.items())
    assert sum(len(place.slots) for place in where) == entry.slots
    return msgspec.structs.replace(entry, places=where, started_s=since_s)


def ends(entry: Entry, since_s: float | None = 0.0) -> Entry:
    return msgspec.structs.replace(entry, ending=True, ending_s=since_s)


def span(host: str, first: int, count: int) -> list[tuple[str, int]]:
    return [(host, first + n) for n in range(count)]


def placed(decisions: Decisions) -> list[int]:
    return [id_ for id_, _ in decisions.place]


# The line


def test_nothing_to_do() -> None:
    assert decide(0.0, [], []) == Decisions()
    assert decide(0.0, hosts(2), []) == Decisions()


def test_a_gang_is_placed_whole_on_the_fewest_hosts() -> None:
    decisions = decide(0.0, hosts(1, 2, 2, 1), [wants(1, 4)])
    assert decisions.place == ((1, (Place("h1", (0, 1)), Place("h2", (0, 1)))),)
    assert decisions.waits == {}


def test_half_a_gang_is_not_placed() -> None:
    decisions = decide(0.0, hosts(2, 2), [runs(wants(1, 1), ("h0", 0)), wants(2, 4)])
    assert decisions.place == decisions.preempt == ()
    assert decisions.waits == {
        2: "is next: wants 4 slots, 3 of 4 are free; jobs without a time limit have the others"
    }


def test_higher_priorities_then_earlier_submissions_go_first() -> None:
    line = [wants(1, 1, LOW), wants(2, 1), wants(3, 1, HIGH), wants(4, 1), wants(5, 1, HIGH)]
    assert placed(decide(0.0, hosts(8), line)) == [3, 5, 2, 4, 1]
    assert placed(decide(0.0, hosts(3), line)) == [3, 5, 2]


def test_the_time_in_the_line_counts_before_the_id() -> None:
    line = [wants(1, 1, queued_s=9.0), wants(2, 1, queued_s=3.0), wants(3, 1, queued_s=3.0)]
    assert placed(decide(0.0, hosts(8), line)) == [2, 3, 1]


def test_more_than_all_hosts_have_waits_and_holds_nobody_up() -> None:
    decisions = decide(0.0, hosts(2, 2), [wants(1, 8, HIGH), wants(2, 4)])
    assert placed(decisions) == [2]
    assert decisions.waits == {1: "wants 8 slots, the hosts have 4"}
    assert decide(0.0, [], [wants(1, 1)]).waits == {1: "wants 1 slot, there are no hosts"}


# Preemption


def test_a_higher_job_ends_a_lower_one_and_starts_when_it_is_gone() -> None:
    low, high = runs(wants(1, 2, LOW), *span("h0", 0, 2)), wants(2, 2, HIGH)
    first = decide(10.0, hosts(2), [low, high])
    assert first.preempt == ((1, 2),)
    assert first.place == ()
    assert first.waits == {2: "wants 2 slots; jobs are ending to make room for it"}
    later = decide(11.0, hosts(2), [ends(low, 10.0), high])
    assert later.preempt == later.place == ()
    assert later.waits == first.waits
    waiting = wants(1, 2, LOW)
    gone = decide(12.0, hosts(2), [waiting, high])
    assert placed(gone) == [2]
    assert gone.preempt == ()


@pytest.mark.parametrize("priority", [HIGH, NORMAL, LOW])
def test_equals_and_higher_ones_are_never_preempted(priority: Priority) -> None:
    for other in Priority:
        running = runs(wants(1, 1, other), ("h0", 0))
        decisions = decide(0.0, hosts(1), [running, wants(2, 1, priority)])
        assert decisions.preempt == (((1, 2),) if other.rank < priority.rank else ())


def test_nobody_is_preempted_if_that_makes_no_room() -> None:
    running = [runs(wants(1, 1, LOW), ("h0", 0)), runs(wants(2, 1, HIGH), ("h0", 1))]
    assert decide(0.0, hosts(2), [*running, wants(3, 2, HIGH)]).preempt == ()


def test_the_lowest_the_fewest_the_youngest() -> None:
    running = [
        runs(wants(1, 2), *span("h0", 0, 2)),
        runs(wants(2, 1, LOW), ("h0", 2), since_s=3.0),
        runs(wants(3, 1, LOW), ("h0", 3), since_s=4.0),
        runs(wants(4, 2, LOW), *span("h0", 4, 2), since_s=1.0),
    ]
    for slots, victims in ((1, {3}), (2, {4}), (3, {4, 3}), (4, {2, 3, 4}), (5, {1, 4, 3})):
        preempt = decide(9.0, hosts(6), [*running, wants(9, slots, HIGH)]).preempt
        assert {victim for victim, _ in preempt} == victims, slots


def test_what_is_ending_counts_and_only_the_rest_is_preempted() -> None:
    running = [
        ends(runs(wants(1, 2, HIGH), *span("h0", 0, 2))),
        runs(wants(2, 1, LOW), ("h0", 2)),
        runs(wants(3, 1, LOW), ("h0", 3)),
    ]
    assert decide(1.0, hosts(4), [*running, wants(4, 2, HIGH)]).preempt == ()
    assert decide(1.0, hosts(4), [*running, wants(4, 3, HIGH)]).preempt == ((3, 4),)


def test_a_rush_of_high_jobs_preempts_at_once_and_each_only_once() -> None:
    running = [runs(wants(n, 1, LOW), ("h0", n), since_s=n) for n in range(4)]
    rush = [wants(10 + n, 1, HIGH) for n in range(3)]
    first = decide(9.0, hosts(4), [*running, *rush])
    assert first.preempt == ((3, 10), (2, 11), (1, 12))
    told = [running[0], *(ends(one, 9.0) for one in running[1:])]
    assert decide(9.5, hosts(4), [*told, *rush]).preempt == ()


def test_who_waits_behind_one_that_waits_counts_what_is_soon_for_that_one() -> None:
    """What 1 leaves comes for 10, since 2 might take as long; 11 would not have waited for it."""
    running = [
        ends(runs(wants(1, 2, HIGH, grace_s=30.0), *span("h0", 0, 2)), 95.0),
        runs(wants(2, 11, grace_s=30.0), *span("h0", 2, 11)),
        *(runs(wants(3 + n, 1, LOW, grace_s=0.0), ("h0", 13 + n)) for n in range(3)),
    ]
    line = [wants(10, 2, HIGH), wants(11, 1)]
    assert decide(100.0, hosts(16), [*running, *line]).preempt == ((5, 11),)
    assert decide(100.0, hosts(16), [*running, line[0]]).preempt == ()
    line = [wants(10, 1, HIGH), wants(11, 1)]
    assert decide(100.0, hosts(16), [*running, *line]).preempt == ()
    assert decide(100.0, hosts(16), [*running, line[1]]).preempt == ((5, 11),)


def test_slots_that_come_free_for_one_go_to_nobody_else() -> None:
    coming = [ends(runs(wants(1, 1, LOW), ("h0", 0))), wants(2, 2, HIGH)]
    decisions = decide(1.0, hosts(2), [*coming, wants(3, 1), wants(4, 1, LOW, limit_s=0.1)])
    assert decisions.place == decisions.preempt == ()
    assert set(decisions.waits) == {2, 3, 4}


def test_of_a_job_with_a_lost_host_only_what_is_there_counts() -> None:
    wounded = runs(wants(1, 3, LOW), ("gone", 0), ("gone", 1), ("h0", 0))
    whole = runs(wants(2, 1, LOW), ("h0", 1))
    decisions = decide(0.0, hosts(2), [wounded, whole, wants(3, 2, HIGH)])
    assert {victim for victim, _ in decisions.preempt} == {1, 2}
    nowhere = runs(wants(1, 1, LOW), ("gone", 0))
    assert decide(0.0, hosts(1), [nowhere, wants(3, 1, HIGH)]).preempt == ()
    assert placed(decide(0.0, hosts(1), [nowhere, wants(3, 1, HIGH)])) == [3]


def test_a_host_that_is_back_with_a_job_on_it_is_not_free() -> None:
    ending = ends(runs(wants(1, 2), *span("h0", 0, 2)))
    decisions = decide(0.0, hosts(2, 1), [ending, wants(2, 1), wants(3, 1)])
    assert decisions.place == ((2, (Place("h1", (0,)),)),)


def test_a_slot_that_is_not_usable_any_more_is_no_room() -> None:
    running = runs(wants(1, 2, LOW), *span("h0", 0, 2))
    decisions = decide(0.0, [Host("h0", (1, 2))], [running, wants(2, 2, HIGH)])
    assert decisions.preempt == ((1, 2),)
    assert placed(decide(0.0, [Host("h0", (1, 2))], [running, wants(2, 1, HIGH)])) == [2]


# Behind the head. In all of these, job 1 has 2 of 4 slots until 100 + 5, job 2 wants 3.

FIRST = runs(wants(1, 2, limit_s=100.0), *span("h0", 0, 2))
HEAD = wants(2, 3)


def behind(*others: Entry, now_s: float = 10.0) -> Decisions:
    return decide(now_s, hosts(4), [FIRST, HEAD, *others])


def test_the_head_is_promised_when_limit_and_grace_are_over() -> None:
    assert behind().promise == Promise(2, 105.0)
    assert behind().waits == {2: "is next: wants 3 slots, 2 of 4 are free"}


@pytest.mark.parametrize(("limit_s", "may"), [(90.0, True), (90.5, False), (None, False)])
def test_who_is_surely_gone_by_then_goes_first(limit_s: float | None, may: bool) -> None:
    decisions = behind(wants(3, 2, limit_s=limit_s, grace_s=5.0))
    assert placed(decisions) == ([3] if may else [])
    if not may:
        assert decisions.waits[3] == "wants 2 slots; would delay job 2"
    assert decisions.promise == Promise(2, 105.0)


def test_one_slot_is_not_needed_by_the_head_and_is_given_once() -> None:
    decisions = behind(wants(3, 1), wants(4, 1))
    assert placed(decisions) == [3]
    assert decisions.waits[4] == "wants 1 slot; would delay job 2"


def test_lower_ones_fill_what_is_free_until_the_longest_grace_before_that() -> None:
    high = msgspec.structs.replace(HEAD, priority=HIGH)
    first = msgspec.structs.replace(FIRST, priority=HIGH)
    for now_s, may in ((10.0, True), (99.5, True), (100.0, False)):
        decisions = decide(now_s, hosts(4), [first, high, wants(3, 2, LOW, grace_s=5.0)])
        assert placed(decisions) == ([3] if may else []), now_s
        assert decisions.promise == Promise(2, 105.0)
    both = [wants(3, 1, LOW, grace_s=5.0), runs(wants(4, 1, LOW, grace_s=50.0), ("h0", 3))]
    for now_s, may in ((54.5, True), (55.0, False)):
        assert placed(decide(now_s, hosts(4), [first, high, *both])) == ([3] if may else []), now_s


def test_a_lower_one_in_front_of_the_head_is_told_in_time_for_it() -> None:
    """It starts when it would have without: two of its four slots come at 100."""
    first = runs(wants(1, 2, limit_s=100.0, grace_s=0.0), *span("h0", 0, 2))
    head, low = wants(2, 4), wants(3, 2, LOW, grace_s=50.0)
    filled = decide(10.0, hosts(4), [first, head, low])
    assert placed(filled) == [3]
    assert (filled.promise, filled.again_s) == (Promise(2, 100.0), 50.0)
    low = runs(low, *span("h0", 2, 2), since_s=10.0)
    for now_s, told in ((49.5, ()), (50.0, ((3, 2),))):
        decisions = decide(now_s, hosts(4), [first, head, low])
        assert decisions.preempt == told
        assert decisions.promise == Promise(2, 100.0)
    told = decide(51.0, hosts(4), [first, head, ends(low, 50.0)])
    assert (told.preempt, told.promise) == ((), Promise(2, 100.0))
    assert placed(decide(100.0, hosts(4), [head])) == [2]


@pytest.mark.parametrize(
    ("other", "may"),
    [
        (wants(4, 1, grace_s=9_000.0), True),
        (wants(4, 1, LOW, grace_s=0.0), True),
        (wants(4, 1, LOW, limit_s=10.0, grace_s=3_600.0), True),
        (wants(4, 1, LOW, grace_s=3_601.0), False),
    ],
)
def test_what_the_head_leaves_is_for_lower_ones_too(other: Entry, may: bool) -> None:
    """It is too late to tell job 2 in time, but nobody need be told: seven slots come for four."""
    first = runs(wants(1, 6, limit_s=1_800.0, grace_s=0.0), *span("h0", 0, 6))
    there = runs(wants(2, 1, LOW, grace_s=3_600.0), ("h0", 6))
    decisions = decide(1.0, hosts(8), [first, there, wants(3, 4), other])
    assert (placed(decisions), decisions.preempt) == ([4] if may else [], ())
    assert decisions.promise == Promise(3, 1_800.0)


def test_what_the_head_leaves_is_given_to_lower_ones_once() -> None:
    first = runs(wants(1, 5, limit_s=1_800.0, grace_s=0.0), *span("h0", 0, 5))
    there = runs(wants(2, 1, LOW, grace_s=3_600.0), ("h0", 5))
    line = [wants(3, 6), wants(4, 1, LOW, grace_s=0.0), wants(5, 1, LOW, grace_s=0.0)]
    decisions = decide(1.0, hosts(8), [first, there, *line])
    assert (placed(decisions), decisions.preempt) == ([4], ())
    assert decisions.waits[5] == "wants 1 slot; would delay job 3"


def test_who_ends_later_than_a_lower_one_does_not_keep_it() -> None:
    """Job 1 was cancelled, and has a day for it. Job 2 would be gone in five seconds."""
    slow = ends(runs(wants(1, 2, grace_s=86_400.0), *span("h0", 0, 2)))
    low = runs(wants(2, 2, LOW), *span("h0", 2, 2))
    assert decide(1.0, hosts(4), [slow, low, wants(3, 2)]).preempt == ((2, 3),)
    soon = msgspec.structs.replace(slow, grace_s=6.0)
    assert decide(1.0, hosts(4), [soon, low, wants(3, 2)]).preempt == ()


def test_a_lower_one_that_is_ending_is_waited_for_whatever_its_grace() -> None:
    """Else the next tick would tell 2 as well, who has no grace, after 1 was told, who has."""
    young = runs(wants(1, 2, LOW, grace_s=86_400.0), *span("h0", 0, 2), since_s=5.0)
    old = runs(wants(2, 2, LOW, grace_s=0.0), *span("h0", 2, 2))
    assert decide(9.0, hosts(4), [young, old, wants(3, 2)]).preempt == ((1, 3),)
    assert decide(10.0, hosts(4), [ends(young, 9.0), old, wants(3, 2)]).preempt == ()


def test_lower_ones_that_run_are_room_for_the_head() -> None:
    low = runs(wants(3, 2, LOW), *span("h0", 2, 2))
    assert behind(low).promise == Promise(2, 105.0)
    assert behind(low).preempt == ()
    after = decide(60.0, hosts(4), [HEAD, low])
    assert after.preempt == ((3, 2),)


def test_room_is_made_behind_the_head_for_who_may_start() -> None:
    low = runs(wants(3, 2, LOW, grace_s=10.0), *span("h0", 2, 2))
    # It would start at 20 at the latest, when the lower one is gone.
    assert behind(low, wants(4, 2, limit_s=80.0)).preempt == ((3, 4),)
    assert behind(low, wants(4, 2, limit_s=80.5)).preempt == ()
    assert behind(low, wants(4, 2)).preempt == ()


def test_an_ending_job_is_gone_its_grace_after_it_was_told() -> None:
    head = wants(2, 4)
    ending = ends(runs(wants(1, 1, grace_s=50.0), ("h0", 0)), 10.0)
    other = runs(wants(3, 1, limit_s=20.0), ("h0", 1))
    running = [ending, other, head]
    assert decide(30.0, hosts(4), running).promise == Promise(2, 60.0)
    unknown = [ends(ending, None), other, head]
    assert decide(30.0, hosts(4), unknown).promise == Promise(2, 80.0)


def test_who_is_over_its_time_is_counted_as_gone_any_moment() -> None:
    assert behind(now_s=200.0).promise == Promise(2, 200.0)


def test_without_a_limit_nothing_is_promised() -> None:
    endless = runs(wants(1, 2), *span("h0", 0, 2))
    others = [wants(3, 2, limit_s=1.0), wants(4, 1), wants(5, 1, LOW)]
    decisions = decide(0.0, hosts(4), [endless, HEAD, *others])
    assert decisions.promise == Promise(2, math.inf)
    # 3 might be in the head's way, however short it is, and so might 5 for its grace. 4 takes what
    # is left over in any case.
    assert placed(decisions) == [4]
    assert decisions.waits[3] == "wants 2 slots; would delay job 2"
    assert decisions.waits[5] == "wants 1 slot; would delay job 2"


@pytest.mark.parametrize(("graces", "may"), [((0, 0), True), ((0, 5), False), ((5, 0), False)])
def test_without_a_promise_lower_ones_fill_only_if_they_are_gone_at_once(
    graces: tuple[float, float], may: bool
) -> None:
    endless = runs(wants(1, 2), *span("h0", 0, 2))
    there = runs(wants(3, 1, LOW, grace_s=graces[0]), ("h0", 2))
    low = wants(4, 1, LOW, grace_s=graces[1])
    assert placed(decide(0.0, hosts(4), [endless, wants(2, 4), there, low])) == ([4] if may else [])


def test_without_a_promise_nobody_is_told_for_one_behind_the_head() -> None:
    """With its grace, who is told may take longer than by itself."""
    endless = runs(wants(1, 2, HIGH), *span("h0", 0, 2))
    low = runs(wants(3, 2, LOW, grace_s=0.0), *span("h0", 2, 2))
    line = [wants(2, 3, HIGH), wants(4, 1, grace_s=0.0)]
    decisions = decide(0.0, hosts(4), [endless, low, *line])
    assert (decisions.place, decisions.preempt) == ((), ())
    assert decisions.waits[4] == "wants 1 slot; others are first"
    limited = msgspec.structs.replace(endless, limit_s=100.0)
    assert decide(0.0, hosts(4), [limited, low, *line]).preempt == ((3, 4),)


def test_without_a_promise_no_lower_one_with_a_longer_grace_goes_first() -> None:
    """Were 1 cancelled, with a day for it, the head would wait for it as long as the grace of 4."""
    endless = runs(wants(1, 2), *span("h0", 0, 2))
    there = runs(wants(3, 2, LOW, grace_s=5.0), *span("h0", 2, 2))
    for grace_s, may in ((5.0, True), (6.0, False)):
        low = wants(4, 1, LOW, grace_s=grace_s)
        decisions = decide(0.0, hosts(6), [endless, there, wants(2, 5), low])
        assert placed(decisions) == ([4] if may else []), grace_s


def test_what_is_left_over_whoever_ends_first() -> None:
    # Free: 1. If 2 more come the head has its 3 and nothing is left; if 4 come, 2 are.
    running = [runs(wants(1, 2), *span("h0", 0, 2)), runs(wants(2, 4), *span("h0", 2, 4))]
    assert placed(decide(0.0, hosts(7), [*running, wants(3, 3), wants(4, 1)])) == []
    # With 4 and 4 one is left, whoever ends.
    running[0] = runs(wants(1, 4), *span("h1", 0, 4))
    assert placed(decide(0.0, hosts(7, 4), [*running, wants(3, 6), wants(4, 1)])) == [4]


def test_without_backfill_nobody_passes_the_head() -> None:
    line = [FIRST, HEAD, wants(3, 1), wants(4, 1, LOW, limit_s=1.0)]
    assert decide(0.0, hosts(4), line, backfill=False).place == ()


# Anything


@st.composite
def moments(draw: st.DrawFn) -> tuple[float, list[Host], list[Entry]]:
    """Hosts, and jobs of which some already have slots, rightly."""
    where = hosts(*draw(st.lists(st.integers(0, 4), max_size=4)))
    free = [(host.name, slot) for host in where for slot in host.slots]
    entries: list[Entry] = []
    for id_ in range(draw(st.integers(0, 10))):
        entry = wants(
            id_,
            draw(st.integers(1, 6)),
            draw(st.sampled_from(list(Priority))),
            limit_s=draw(st.none() | st.floats(0.1, 1e6)),
            grace_s=draw(st.floats(0.0, 100.0)),
            queued_s=draw(st.floats(0.0, 10.0)),
        )
        if entry.slots <= len(free) and draw(st.booleans()):
            taken, free = free[: entry.slots], free[entry.slots :]
            entry = runs(entry, *taken, since_s=draw(st.floats(0.0, 100.0)))
            if draw(st.booleans()):
                entry = ends(entry, draw(st.none() | st.floats(0.0, 100.0)))
        entries.append(entry)
    return 100.0, where, entries


@settings(max_examples=300)
@given(moments(), st.randoms(use_true_random=False))
def test_whatever_comes(moment: tuple[float, list[Host], list[Entry]], draw: random.Random) -> None:
    now_s, where, entries = moment
    decisions = decide(now_s, where, entries)
    by_id = {one.id: one for one in entries}
    taken = [(p.host, slot) for one in entries for p in one.places for slot in p.slots]
    for id_, places in decisions.place:
        mine = [(place.host, slot) for place in places for slot in place.slots]
        assert len(mine) == by_id[id_].slots
        assert not by_id[id_].places
        taken += mine
    assert len(set(taken)) == len(taken)
    assert set(taken) <= {(host.name, slot) for host in where for slot in host.slots}
    for victim, whom in decisions.preempt:
        assert by_id[victim].places
        assert not by_id[victim].ending
        assert by_id[victim].rank < by_id[whom].rank
        assert whom in decisions.waits
    assert len({victim for victim, _ in decisions.preempt}) == len(decisions.preempt)
    waiting = {one.id for one in entries if not one.places} - set(placed(decisions))
    assert set(decisions.waits) == waiting
    draw.shuffle(where)
    draw.shuffle(entries)
    assert decide(now_s, where, entries) == decisions
