"""Shares and records: the same answer for everybody, from what everybody knows."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from manyhands.collectives.messages import Newcomer, Record, SelfReport
from manyhands.collectives.ranges import Ranges
from manyhands.collectives.shares import (
    ONE_CLASS,
    RESYNC,
    Classes,
    Closure,
    next_members,
    next_record,
    share_out,
)
from manyhands.core.peers import NO_VIEW, Member, PeerId, PeerState, View, ViewNumber

NUMBER = ViewNumber(1, 9)
ACTIVE, LEAVING, WATCHING = PeerState.ACTIVE, PeerState.LEAVING, PeerState.WATCHING


def view_of(**states):
    roster = tuple(
        Member(PeerId(name, int(name[1:])), state, NUMBER) for name, state in states.items()
    )
    return View(NUMBER, roster, NUMBER, roster)


@given(st.integers(0, 500), st.lists(st.integers(1, 1 << 40), min_size=1, max_size=9))
def test_shares_partition_the_round_in_proportion(count, numbers):
    members = tuple(range(1, len(numbers) + 1))
    speeds = dict(zip(members, numbers, strict=True))
    shares = share_out(Ranges.whole(count), members, speeds)
    assert [share.peer for share in shares] == list(members)
    assert [p for share in shares for p in share.ranges] == list(range(count))
    total = sum(numbers)
    for share in shares:
        assert abs(len(share.ranges) * total - count * speeds[share.peer]) < total


def test_of_equal_remainders_the_earlier_member_counts():
    shares = share_out(Ranges.whole(4), (7, 3, 5), {7: 1, 3: 1, 5: 1})
    assert [len(share.ranges) for share in shares] == [2, 1, 1]


def test_holes_are_shared_out_too():
    shares = share_out(Ranges.of((0, 2), (10, 12)), (1, 2), {1: 3, 2: 1})
    assert [share.ranges for share in shares] == [Ranges.of((0, 2), (10, 11)), Ranges.of((11, 12))]


def test_members_are_the_active_in_roster_order():
    view = view_of(p9=ACTIVE, p2=WATCHING, p5=LEAVING, p1=ACTIVE)
    assert next_members(view, (1, 5)) == (9, 1)


def test_a_member_that_was_removed_stays_until_the_cut():
    assert next_members(view_of(p9=ACTIVE), (4, 9, 3)) == (9, 4, 3)


def closure(view, *, members=(1, 5), speeds=(8, 4), last=False, asks=((), ())):
    reports = {m: SelfReport(s, a) for m, s, a in zip(members, speeds, asks, strict=True)}
    return Closure(
        view=view,
        members=members,
        reports=reports,
        prev=b"chain",
        generation=NO_VIEW,
        quarantine=Ranges.of((2, 3)),
        governing=Record(b"", NO_VIEW, NO_VIEW, (), sync=3),
        last=last,
        following=Ranges.whole(16),
    )


def test_a_newcomer_counts_as_the_slowest():
    record = next_record(closure(view_of(p1=ACTIVE, p5=ACTIVE, p7=ACTIVE)))
    assert record.speeds == (8, 4, 0)
    assert [len(share.ranges) for share in record.shares] == [8, 4, 4]
    assert (record.prev, record.view, record.quarantine) == (b"chain", NUMBER, Ranges.of((2, 3)))
    assert (record.closing, record.sync) == (False, 3)


def test_one_whose_speed_is_not_known_counts_as_the_slowest():
    shares = share_out(Ranges.whole(100), (1, 2, 3), {1: 6, 2: 0, 3: 2})
    assert [len(share.ranges) for share in shares] == [60, 20, 20]
    shares = share_out(Ranges.whole(9), (1, 2, 3), {1: 0, 2: 0})
    assert [len(share.ranges) for share in shares] == [3, 3, 3]


def test_the_last_round_and_everybody_leaving_are_closed_by_all():
    for view, last in (
        (view_of(p1=ACTIVE, p5=LEAVING), True),
        (view_of(p1=LEAVING, p5=LEAVING), False),
    ):
        record = next_record(closure(view, last=last))
        assert record.closing
        assert record.members == (1, 5)
        assert not any(share.ranges for share in record.shares)


def test_the_newest_ask_of_each_newcomer_is_passed_on():
    asks = ((Newcomer(7, 2), Newcomer(8, 0)), (Newcomer(7, 1),))
    record = next_record(closure(view_of(p1=ACTIVE, p5=ACTIVE), asks=asks))
    assert record.snapshot_for == (Newcomer(7, 2), Newcomer(8, 0))


class TestResyncs:
    """When one is due, who gives, and what it is called in the record."""

    BOTH = Classes(b"a and b", (5, 1))

    def record(self, *, governing=None, view=None, last=False, **closed):
        found = closure(view or view_of(p1=ACTIVE, p5=ACTIVE, p7=ACTIVE), last=last)
        governing = governing or Record(b"", NO_VIEW, NO_VIEW, (), classes=b"a and b")
        return next_record(replace(found, governing=governing, **closed))

    def test_the_first_anchor_gives_when_it_is_time(self):
        record = self.record(classes=self.BOTH, is_time=True)
        assert (record.resync, record.num_resyncs, record.anchors) == (True, 1, (5, 1))
        assert [share.peer for share in record.shares if share.ranges] == [5]
        assert record.share_of(5) == RESYNC
        assert record.members == (1, 5, 7)

    def test_at_other_times_only_when_there_are_other_classes(self):
        record = self.record(classes=self.BOTH)
        assert (record.resync, record.num_resyncs) == (False, 0)
        assert sum(len(share.ranges) for share in record.shares) == 16
        before = Record(b"", NO_VIEW, NO_VIEW, (), classes=b"a", num_resyncs=3)
        record = self.record(classes=self.BOTH, governing=before)
        assert (record.resync, record.num_resyncs, record.classes) == (True, 4, b"a and b")

    def test_not_of_one_class_nor_at_the_end_nor_after_one(self):
        before = Record(b"", NO_VIEW, NO_VIEW, (), classes=b"a", resync=True, num_resyncs=3)
        for closed in (
            {"classes": ONE_CLASS},
            {"classes": self.BOTH, "last": True},
            {"classes": self.BOTH, "governing": before},
        ):
            assert not self.record(is_time=True, **closed).resync

    def test_an_anchor_that_leaves_does_not_give(self):
        view = view_of(p1=ACTIVE, p5=LEAVING, p7=ACTIVE)
        record = self.record(classes=self.BOTH, is_time=True, view=view)
        assert record.share_of(1) == RESYNC
        view = view_of(p1=LEAVING, p5=LEAVING, p7=ACTIVE)
        assert not self.record(classes=self.BOTH, is_time=True, view=view).resync
