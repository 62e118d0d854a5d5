"""The bank: what a peer has computed of a round, and how it leaves."""

from __future__ import annotations

import pytest
import torch

from manyhands.collectives.bank import Bank, pool_for
from manyhands.collectives.layout import Layout


def make(like, wire="fp32", part_bytes=1 << 16):
    layout = Layout.of(like, part_bytes)
    pool = pool_for(layout, wire, 1 << 16)
    return Bank(layout, wire, pool), pool, layout


def lend(bank, layout, tensors, weight=1.0):
    bank.lend(layout.check(tensors), weight)


def sent(bank, k) -> bytes:
    views, left = bank.coded(k)
    data = b"".join(views)
    left()
    return data


class TestPasses:
    def test_the_first_is_lent_and_later_ones_are_added_to_it(self):
        first, second = torch.ones(10), torch.full((10,), 5.0)
        bank, _, layout = make([first])
        lend(bank, layout, [first], 2.0)
        assert bank.values(0).data_ptr() == first.data_ptr()
        lend(bank, layout, [second], 3.0)
        assert bank.weight == 5
        assert bank.values(0).tolist() == [6.0] * 10
        assert second.tolist() == [5.0] * 10

    def test_a_part_of_several_tensors_is_put_together_in_the_same_memory_each_time(self):
        """Pieces that come and go leave holes in the heap."""
        tensors = [torch.arange(5.0), torch.arange(5.0, 12.0)]
        bank, _, layout = make(tensors)
        lend(bank, layout, tensors)
        first = bank.values(0)
        assert first.tolist() == list(range(12))
        tensors[1].add_(1)
        again = bank.values(0)
        assert again.data_ptr() == first.data_ptr()
        assert again.tolist() == [*range(5), *range(6, 13)]

    def test_one_that_is_under_way_can_be_seen_and_replaced(self):
        bank, _, layout = make([torch.empty(4)])
        assert bank.show(layout.check([torch.full((4,), 9.0)]), 9.0)
        assert not bank.empty
        assert bank.weight == 9
        assert bank.show(layout.check([torch.full((4,), 1.0)]), 1.0)
        lend(bank, layout, [torch.full((4,), 2.0)], 2.0)
        assert (bank.weight, bank.values(0).tolist()) == (2.0, [2.0] * 4)
        assert not bank.show(layout.check([torch.empty(4)]), 1.0)  # what is done stays
        lend(bank, layout, [torch.full((4,), 3.0)], 3.0)
        assert (bank.weight, bank.values(0).tolist()) == (5.0, [5.0] * 4)

    def test_clearing_it_makes_what_was_under_way_old(self):
        bank, _, layout = make([torch.empty(4)])
        lend(bank, layout, [torch.ones(4)], 2.0)
        bank.clear()
        assert (bank.empty, bank.weight, bank.generation) == (True, 0.0, 1)
        assert bank.num_bytes(0) == 0
        lend(bank, layout, [torch.full((4,), 3.0)], 3.0)
        assert bank.values(0).tolist() == [3.0] * 4


class TestSending:
    def test_raw_parts_are_sent_from_where_they_are(self):
        tensors = [torch.arange(8.0), torch.arange(8.0)]
        bank, pool, layout = make(tensors)
        lend(bank, layout, tensors)
        views, _ = bank.coded(0)
        assert not bank.copies(0)
        tensors[1][0] = 7.0
        assert torch.frombuffer(bytearray(views[1]), dtype=torch.float32)[0] == 7
        assert not pool._free

    def test_of_very_many_tensors_a_copy_is_sent_and_given_back(self):
        tensors = [torch.full((2,), float(k)) for k in range(1000)]
        bank, pool, layout = make(tensors)
        lend(bank, layout, tensors)
        assert bank.copies(0)
        views, left = bank.coded(0)
        assert len(views) == 1
        assert torch.equal(torch.frombuffer(views[0], dtype=torch.float32), torch.cat(tensors))
        left()
        assert len(pool._free) == 1

    @pytest.mark.parametrize("wire", ["fp16", "bf16", "int8"])
    def test_a_codec_takes_a_block_and_gives_it_back(self, wire):
        tensors = [torch.randn(5000)]
        bank, pool, layout = make(tensors, wire)
        lend(bank, layout, tensors)
        first = sent(bank, 0)
        assert len(first) == bank.num_bytes(0) < 20_000
        assert len(pool._free) == 1
        assert sent(bank, 0) == first  # an attempt that is repeated sends the same
        assert len(pool._free) == 1

    def test_blocks_are_as_large_as_what_travels(self):
        like = [torch.empty(1 << 20)]
        sizes = {
            wire: make(like, wire, 1 << 20)[1].block_bytes for wire in ("fp32", "bf16", "int8")
        }
        assert sizes["bf16"] == sizes["fp32"] // 2
        assert sizes["int8"] < sizes["bf16"]


class TestFeedback:
    """What int8 leaves out is owed, unless nobody counted what it was left out of."""

    def test_a_committed_round(self):
        tensors = [torch.randn(300)]
        bank, _, layout = make(tensors, "int8")
        lend(bank, layout, tensors)
        first = sent(bank, 0)
        bank.committed()
        lend(bank, layout, tensors)
        assert sent(bank, 0) != first

    def test_one_that_was_refused(self):
        tensors = [torch.randn(300)]
        bank, _, layout = make(tensors, "int8")
        lend(bank, layout, tensors)
        first = sent(bank, 0)
        bank.clear()  # refused: it counted for nothing
        bank.committed()  # the round went on without it
        lend(bank, layout, tensors)
        assert sent(bank, 0) == first
