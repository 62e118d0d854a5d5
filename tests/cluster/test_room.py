from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.cluster.job import Place
from manyhands.cluster.room import Candidate, Floor, Victims, least_above, taken_from

SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=7)


def candidate(id_: int, num_slots: int, started_s: float = 0.0) -> Candidate:
    return Candidate(started_s, id_, num_slots, 1.0)


def ids(candidates: list[Candidate]) -> set[int]:
    return {one.id for one in candidates}


def test_a_job_goes_to_the_host_that_it_fills_best() -> None:
    floor = Floor({"a": range(4), "b": [1, 3], "c": [0, 1]})
    assert floor.take(2) == (Place("b", (1, 3)),)
    assert floor.take(1) == (Place("c", (0,)),)
    assert floor.take(1) == (Place("c", (1,)),)
    assert floor.take(3) == (Place("a", (0, 1, 2)),)
    assert floor.count == 1


def test_a_large_job_takes_whole_hosts_and_the_tightest_for_the_rest() -> None:
    floor = Floor({"a": range(2), "b": range(4), "c": range(4), "d": range(3)})
    assert floor.take(6) == (Place("b", (0, 1, 2, 3)), Place("a", (0, 1)))
    assert floor.take(7) == (Place("c", (0, 1, 2, 3)), Place("d", (0, 1, 2)))
    with pytest.raises(ValueError, match="1 slots were asked for, 0 are free"):
        floor.take(1)


@given(SIZES, st.data())
def test_no_fewer_hosts_would_do(sizes: list[int], data: st.DataObject) -> None:
    floor = Floor({f"h{n}": range(size) for n, size in enumerate(sizes)})
    left = {f"h{n}": set(range(size)) for n, size in enumerate(sizes)}
    while floor.count:
        num_slots = data.draw(st.integers(1, floor.count))
        most = sorted(map(len, left.values()), reverse=True)
        fewest = next(k for k in itertools.count(1) if sum(most[:k]) >= num_slots)
        places = floor.take(num_slots)
        assert len({place.host for place in places}) == len(places) == fewest
        for place in places:
            assert left[place.host] >= set(place.slots)
            left[place.host] -= set(place.slots)
        assert sum(len(place.slots) for place in places) == num_slots
        assert floor.count == sum(map(len, left.values()))


def test_the_fewest_end_then_the_smallest_then_the_youngest() -> None:
    def victims() -> Victims:
        one, two, three, four = (candidate(1, 1), candidate(2, 2, 5.0), candidate(3, 2, 9.0), 4)
        return Victims([one, two, three, candidate(4, four), candidate(5, 0)])

    assert victims().count == 9
    assert ids(victims().take(1)) == {1}
    assert ids(victims().take(2)) == {3}
    assert ids(victims().take(3)) == {4}
    assert ids(victims().take(5)) == {4, 1}
    assert ids(victims().take(6)) == {4, 3}
    assert ids(victims().take(9)) == {1, 2, 3, 4}


def test_nobody_of_a_class_ends_if_those_below_would_do() -> None:
    def classes() -> list[Victims]:
        return [
            Victims([candidate(1, 1), candidate(2, 1), candidate(3, 1)]),
            Victims([candidate(4, 3), candidate(5, 8)]),
        ]

    assert ids(taken_from(classes(), 3)) == {1, 2, 3}
    # One of the upper class is needed, and then only one of the lower.
    assert ids(taken_from(classes(), 4)) == {4, 3}
    assert ids(taken_from(classes(), 7)) == {5}
    assert taken_from(classes(), 0) == []


@given(SIZES, st.data())
def test_the_fewest_really(sizes: list[int], data: st.DataObject) -> None:
    num_slots = data.draw(st.integers(1, sum(sizes)))
    taken = Victims(candidate(n, size) for n, size in enumerate(sizes)).take(num_slots)
    assert sum(one.num_slots for one in taken) >= num_slots
    most = sorted(sizes, reverse=True)
    assert sum(most[: len(taken) - 1]) < num_slots


@given(st.lists(st.integers(1, 9), max_size=8), st.integers(1, 40))
def test_the_smallest_sum_that_is_enough(sizes: list[int], num_slots: int) -> None:
    sums = (sum(some) for k in range(len(sizes) + 1) for some in itertools.combinations(sizes, k))
    enough = [one for one in sums if one >= num_slots]
    assert least_above(sizes, num_slots) == min(enough, default=None)
