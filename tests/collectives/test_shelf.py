"""The shelf: blocks filed under the machine's keys, and free again when their time has come."""

from __future__ import annotations

import pytest
import torch

from manyhands.collectives import events as e
from manyhands.collectives.bank import Bank
from manyhands.collectives.layout import Layout
from manyhands.collectives.messages import Fill, Part, Record, SelfReport, Share, Sum, Tag
from manyhands.collectives.pool import Pool
from manyhands.collectives.ranges import Ranges
from manyhands.collectives.results import Result
from manyhands.collectives.shelf import PartKey, Shelf
from manyhands.core.errors import UsageError
from manyhands.core.peers import NO_VIEW, ViewNumber

SIZE = 1000
CUT = ViewNumber(1, 4)
TAG = Tag(CUT, 0)


def part(k=1, round_=3, attempt=TAG) -> Part:
    report = None if k else SelfReport(1)
    return Part(round_, attempt, k, Ranges.whole(2), weight=2.0, report=report)


def head(k=1, round_=3, attempt=TAG) -> Sum:
    record = None if k else Record(b"", NO_VIEW, NO_VIEW, ())
    return Sum(round_, attempt, k, (Share(7, Ranges.whole(2)),), record=record)


class Fixture:
    def __init__(self) -> None:
        self.pool = Pool(SIZE, 100)
        self.told = []
        self.shelf = Shelf(self.pool, lambda *word: self.told.append(word))
        self.shelf.begin(CUT, 4 * SIZE)

    def block(self):
        return self.pool.take(SIZE)

    @property
    def num_free(self) -> int:
        return len(self.pool._free)


@pytest.fixture
def on():
    return Fixture()


class TestContributions:
    def test_they_lie_until_they_are_added_up(self, on):
        block = on.block()
        assert on.shelf.add_part(5, part(), block)
        assert on.shelf.parts[PartKey(3, TAG, 1, 5)].block is block
        assert on.num_free == 0
        on.shelf.drop_part(PartKey(3, TAG, 1, 5))
        assert on.num_free == 1
        on.shelf.drop_part(PartKey(3, TAG, 1, 5))  # once only
        assert on.num_free == 1

    def test_a_double_is_freed_at_once_and_the_first_stays(self, on):
        first, second = on.block(), on.block()
        assert on.shelf.add_part(5, part(), first)
        assert not on.shelf.add_part(5, part(), second)
        assert on.num_free == 1
        assert on.shelf.parts[PartKey(3, TAG, 1, 5)].block is first

    def test_a_sender_is_told_by_quarters(self, on):
        for k in range(8):
            on.shelf.add_part(5, part(k), on.block())
            on.shelf.drop_part(PartKey(3, TAG, k, 5))
        assert on.told == [(5, CUT, SIZE * (k + 1)) for k in range(8)]
        on.shelf.begin(CUT, 8 * SIZE)
        for k in range(4):
            on.shelf.add_part(5, part(k, 4), on.block())
            on.shelf.drop_part(PartKey(4, TAG, k, 5))
        assert on.told[8:] == [(5, CUT, 10 * SIZE), (5, CUT, 12 * SIZE)]

    def test_a_smaller_allowance_makes_the_rest_due(self, on):
        """Its senders count by the smaller one from now on, and would wait for good."""
        on.shelf.begin(CUT, 100 * SIZE)
        for k in range(3):
            on.shelf.add_part(5, part(k), on.block())
            on.shelf.drop_part(PartKey(3, TAG, k, 5))
        assert not on.told
        on.shelf.begin(CUT, 4 * SIZE)
        assert on.told == [(5, CUT, 3 * SIZE)]

    def test_after_a_cut_nothing_before_it_is_told(self, on):
        on.shelf.add_part(5, part(), on.block())
        on.shelf.begin(ViewNumber(1, 9), 4 * SIZE)
        on.shelf.drop_parts(lambda key: True)
        assert on.told == []
        assert on.num_free == 1

    def test_ones_own_has_no_block_and_nobody_is_told(self, on):
        on.shelf.add_part(5, part(), None, own=True)
        on.shelf.drop_parts(lambda key: True)
        assert on.told == []


class TestResults:
    def test_a_double_is_freed(self, on):
        assert on.shelf.add_sum(head(), on.block())
        assert not on.shelf.add_sum(head(), on.block())
        assert on.num_free == 1

    def test_discarding_what_came(self, on):
        for event in (
            e.SumArrived(5, head(), b""),
            e.Summed(head(), b""),
            e.FillArrived(5, Fill(CUT, head()), b""),
        ):
            on.shelf.add_sum(head(), on.block())
            on.shelf.add_sum(head(2), on.block())
            free = on.num_free
            on.shelf.discard(event)
            assert on.num_free == free + 1
            on.shelf.drop_sums(lambda key: True)
        on.shelf.add_part(5, part(), on.block())
        free = on.num_free
        on.shelf.discard(e.PartArrived(5, part()))
        assert on.num_free == free + 1

    def test_a_round_is_taken_and_all_else_of_it_goes(self, on):
        void = Tag(ViewNumber(1, 2), 0)
        for k in range(3):
            on.shelf.add_sum(head(k), on.block())
            on.shelf.add_sum(head(k, attempt=void), on.block())
        on.shelf.add_part(5, part(), on.block())
        on.shelf.add_part(5, part(round_=4), on.block())
        taken = on.shelf.take_round(3, TAG, 3)
        assert sorted(taken) == [0, 1, 2]
        assert on.num_free == 4  # three void results and a contribution
        assert list(on.shelf.parts) == [PartKey(4, TAG, 1, 5)]
        assert not on.shelf.sums

    def test_clearing_it_frees_everything(self, on):
        on.shelf.add_sum(head(), on.block())
        on.shelf.add_part(5, part(), on.block())
        on.shelf.clear()
        assert on.num_free == 2


class TestKept:
    """A result has two holders, the engine and the user; the last one frees it."""

    LIKE = (torch.empty(250),)

    def result(self, on):
        layout = Layout.of(self.LIKE, SIZE)
        codecs = Bank(layout, "fp32", on.pool).codecs
        block = on.block()
        block.tensor.view(torch.float32).fill_(3.0)
        return Result(layout, codecs, {0: block}, on.pool)

    @pytest.mark.parametrize("first", ["engine", "user"])
    def test_the_last_of_its_holders_frees_it(self, on, first):
        result = self.result(on)
        on.shelf.keep(result)
        if first == "user":
            result.close()
            result.close()  # which is only one of them, however often
            assert on.num_free == 0
            on.shelf.keep(None)
        else:
            on.shelf.keep(None)
            assert on.num_free == 0
            into = [torch.empty(250)]
            result.read_into(into)
            assert into[0].tolist() == [3.0] * 250
            result.close()
        assert on.num_free == 1

    def test_the_next_one_takes_its_place(self, on):
        first = self.result(on)
        on.shelf.keep(first)
        first.close()
        on.shelf.keep(self.result(on))
        assert on.num_free == 1

    def test_it_serves_those_who_lack_it(self, on):
        result = self.result(on)
        on.shelf.keep(result)
        assert on.shelf.result(head(0)) is result.block(0)
        held = on.block()
        on.shelf.add_sum(head(0), held)
        assert on.shelf.result(head(0)) is held

    def test_reading_a_closed_one(self, on):
        result = self.result(on)
        result.close()
        with pytest.raises(UsageError, match="closed"):
            result.read_into([torch.empty(250)])
