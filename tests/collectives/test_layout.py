"""Tensors as parts: every element in exactly one, in order, whatever the tensors are."""

from __future__ import annotations

import random

import pytest
import torch

from manyhands.collectives.layout import Layout
from manyhands.core.errors import UsageError

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8)


@pytest.mark.parametrize("seed", range(30))
def test_every_element_is_in_one_part(seed):
    dice = random.Random(seed)
    sizes = [dice.choice((0, 1, 3, 64, 1000, 100_000)) for _ in range(dice.randrange(1, 12))]
    dtypes = [dice.choice(DTYPES[: dice.randrange(1, 6)]) for _ in sizes]
    tensors = [torch.empty(n, dtype=d) for n, d in zip(sizes, dtypes, strict=True)]
    if not sum(sizes):
        tensors.append(torch.empty(5))
    part_bytes = dice.choice((64, 1000, 64 << 10, 1 << 20))
    layout = Layout.of(tensors, part_bytes)
    at = dict.fromkeys(range(len(tensors)), 0)
    last = -1
    for k, part in enumerate(layout.parts):
        assert part.k == k
        assert 0 < part.num_bytes <= max(part_bytes, part.dtype.itemsize)
        assert part.numel == sum(s.stop - s.start for s in part.slices)
        for piece in part.slices:
            assert tensors[piece.tensor].dtype is part.dtype
            assert piece.start == at[piece.tensor]  # in order, no hole, no overlap
            assert piece.tensor >= last
            last = piece.tensor
            at[piece.tensor] = piece.stop
    assert at == {index: tensor.numel() for index, tensor in enumerate(tensors)}


def test_it_depends_on_the_tensors_alone():
    tensors = [torch.empty(3, 5), torch.empty(10_000)]
    assert Layout.of(tensors, 1 << 16) == Layout.of([torch.zeros(15), torch.ones(10_000)], 1 << 16)


def test_large_tensors_have_parts_for_many_owners():
    assert Layout.of([torch.empty(1 << 20)], 16 << 20).num_parts >= 8
    assert Layout.of([torch.empty(100)], 1 << 20).num_parts == 1  # not cut for nothing


def test_slices_are_the_memory_itself():
    tensors = [torch.arange(10.0), torch.arange(90.0).view(9, 10)]
    layout = Layout.of(tensors, 128)
    flats = layout.check(tensors)
    for part in layout.parts:
        for piece in layout.slices(part.k, flats):
            piece.fill_(float(part.k))
    for part in layout.parts:
        for piece in part.slices:
            flat = tensors[piece.tensor].view(-1)
            assert (flat[piece.start : piece.stop] == part.k).all()


@pytest.mark.parametrize("shape", [(6,), (2, 3)])
def test_flat_ones_keep_the_memory_that_was_lent(shape):
    """Whatever becomes of the tensor: its owner may put other memory into it."""
    given = torch.full(shape, 3.0)
    (flat,) = Layout.of([given], 128).check([given])
    given.data = torch.full(shape, 9.0)
    assert flat.tolist() == [3.0] * 6


@pytest.mark.parametrize("tensor", range(5))
def test_what_is_ready(tensor):
    """The parts from `ready_from` on, and none before, need no tensor before this one."""
    tensors = [torch.empty(n) for n in (1000, 10, 10, 5000, 0)]
    layout = Layout.of(tensors, 1024)
    first = layout.ready_from(tensor)
    for part in layout.parts:
        needs = min(piece.tensor for piece in part.slices)
        assert (part.k >= first) == (needs >= tensor)


def test_what_cannot_be_averaged():
    with pytest.raises(UsageError, match="empty"):
        Layout.of([torch.empty(0)], 1024)
    with pytest.raises(UsageError, match="dense"):
        Layout.of([torch.eye(3).to_sparse()], 1024)
    with pytest.raises(UsageError, match=r"sum of torch\.bits8 tensors is not defined"):
        Layout.of([torch.empty(5), torch.empty(5, dtype=torch.bits8)], 1024)


def test_tensors_of_another_layout():
    layout = Layout.of([torch.empty(4, 6), torch.empty(3)], 1024)
    for wrong, text in (
        ([torch.empty(24)], "1 tensors"),
        ([torch.empty(24), torch.empty(4)], "tensor 1"),
        ([torch.empty(24, dtype=torch.float64), torch.empty(3)], "tensor 0"),
        ([torch.empty(6, 4).t(), torch.empty(3)], "one piece"),
        ([torch.empty(24, device="meta"), torch.empty(3)], "one piece"),
    ):
        with pytest.raises(UsageError, match=text):
            layout.check(wrong)
