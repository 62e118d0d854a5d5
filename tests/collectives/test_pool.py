"""Blocks of memory that are used again."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from manyhands.collectives.pool import Pool


@pytest.mark.parametrize("size", [100, 1 << 20], ids=["small", "mapped"])
class TestPool:
    def test_the_same_memory_as_tensor_and_view(self, size):
        block = Pool(size, 2).take(size)
        block.view[:4] = b"\x01\x02\x03\x04"
        assert block.tensor[:4].tolist() == [1, 2, 3, 4]
        assert block.tensor.numel() == len(block.view) == size

    def test_it_is_used_again_also_when_only_a_piece_of_it_was(self, size):
        pool = Pool(size, 2)
        first = pool.take(size // 2)
        assert first.tensor.numel() == len(first.view) == size // 2
        at = first.tensor.data_ptr()
        pool.give(first)
        again = pool.take(size)
        assert again.tensor.data_ptr() == at
        assert again.tensor.numel() == len(again.view) == size

    def test_two_blocks_never_share_memory(self, size):
        pool = Pool(size, 8)
        for block in [pool.take(size) for _ in range(3)]:
            pool.give(block)
        taken = [pool.take(size - k) for k in range(5)]
        for k, block in enumerate(taken):
            block.tensor.fill_(k)
        for k, block in enumerate(taken):
            assert (block.tensor == k).all()

    def test_no_more_are_kept_than_agreed(self, size):
        pool = Pool(size, 2)
        for block in [pool.take(size) for _ in range(5)]:
            pool.give(block)
        assert len(pool._free) == 2

    def test_those_in_use_count_among_them(self, size):
        pool = Pool(size, 4)
        used, given = ([pool.take(size) for _ in range(num)] for num in (3, 4))
        for block in given:
            pool.give(block)
        assert len(pool._free) == 1
        for block in used:
            pool.give(block)
        assert len(pool._free) == 4

    def test_those_that_were_forgotten_do_not(self, size):
        """Whoever starts over gives nothing back."""
        pool = Pool(size, 4)
        blocks = [pool.take(size) for _ in range(8)]
        kept = blocks[:4]
        del blocks
        for block in kept:
            pool.give(block)
        assert len(pool._free) == 4

    def test_a_larger_one_is_made_to_measure_and_not_kept(self, size):
        pool = Pool(size, 2)
        block = pool.take(3 * size)
        assert block.tensor.numel() == 3 * size
        pool.give(block)
        assert not pool._free

    def test_one_made_in_inference_mode_can_be_used_outside(self, size):
        pool = Pool(size, 2)
        with torch.inference_mode():
            block = pool.take(size)
        assert not block.tensor.is_inference()
        block.tensor.add_(1)

    def test_threads(self, size):
        pool = Pool(size, 4)
        clashes = []

        def use(mark) -> None:
            for _ in range(200):
                block = pool.take(size)
                block.tensor[:64] = mark
                if not (block.tensor[:64] == mark).all():
                    clashes.append(mark)
                pool.give(block)

        threads = [threading.Thread(target=use, args=(mark,)) for mark in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not clashes


def test_what_is_not_kept_goes_back_to_the_system():
    """The allocator would keep pieces of this size to itself."""
    size, num = 256 << 10, 200
    pool = Pool(size, 0)
    blocks = [pool.take(size) for _ in range(num)]
    for block in blocks:
        block.tensor.fill_(1)
    between = resident()
    for block in blocks[::2]:  # every other one: nothing that lies together
        pool.give(block)
    del block
    blocks[::2] = [None] * (num // 2)
    assert between - resident() > 0.9 * size * num / 2


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
