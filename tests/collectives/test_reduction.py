"""Sums of parts: roster order whatever order contributions come in, for every dtype there is."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from manyhands.collectives.codecs import codec_for
from manyhands.collectives.pool import Pool
from manyhands.collectives.reduction import Contribution, Operator, PartSum, arithmetic_for
from manyhands.core.errors import UsageError
from manyhands.wire.tensors import DTYPES

NUM = 4
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
EIGHTS = (torch.float8_e4m3fn, torch.float8_e5m2)
COMPLEX = (torch.complex64, torch.complex128)
INTS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
WIDE_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
ALL = (*FLOATS, *EIGHTS, *COMPLEX, *INTS, *WIDE_UNSIGNED, torch.bool)

FUNCTIONS = {
    Operator.SUM: torch.add,
    Operator.MEAN: torch.add,
    Operator.PRODUCT: torch.mul,
    Operator.MIN: torch.minimum,
    Operator.MAX: torch.maximum,
    Operator.AND: torch.bitwise_and,
    Operator.OR: torch.bitwise_or,
    Operator.XOR: torch.bitwise_xor,
}


def values_of(dtype, seed, numel=37) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    if dtype.is_complex or dtype in (torch.float32, torch.float64):
        return torch.randn(numel, generator=made, dtype=dtype)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=made).to(dtype)
    return torch.randint(0, 5, (numel,), generator=made).to(dtype)


def is_defined(operator, dtype) -> bool:
    real = not (dtype.is_floating_point or dtype.is_complex)
    if operator in (Operator.AND, Operator.OR, Operator.XOR):
        return real
    if operator in (Operator.MIN, Operator.MAX):
        return not dtype.is_complex and dtype not in WIDE_UNSIGNED
    return operator is not Operator.MEAN or not real


def folded(operator, dtype, given) -> torch.Tensor:
    """One after the other, in fp32 where the dtype is narrower than that."""
    if dtype in WIDE_UNSIGNED:
        total = given[0].to(torch.int64)
        for values in given[1:]:
            total = FUNCTIONS[operator](total, values.to(torch.int64))
        return total.to(dtype)
    wide = torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
    total = given[0].to(wide)
    for values in given[1:]:
        total = FUNCTIONS[operator](total, values.to(wide))
    return total


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("operator", Operator)
def test_every_operator_and_dtype(operator, dtype):
    if not is_defined(operator, dtype):
        with pytest.raises(UsageError, match="not defined"):
            arithmetic_for(operator, dtype)
        return
    given = [values_of(dtype, seed) for seed in range(NUM)]
    before = [values.clone() for values in given]
    arithmetic = arithmetic_for(operator, dtype)
    total = torch.empty(37, dtype=arithmetic.total_dtype)
    adding = PartSum(NUM, arithmetic, codec_for("fp32", dtype), lambda: total)
    released = []
    for place in (2, 0, 3, 1):
        plain = given[place].view(arithmetic.dtype)
        release = lambda place=place: released.append(place)  # noqa: E731
        assert adding.missing()
        assert place in adding.missing()
        assert adding.offer(place, Contribution(plain, False, release)) == (place == 1)
    assert adding.complete
    assert not adding.missing()
    assert sorted(released) == list(range(NUM))
    expected = folded(operator, dtype, given)
    assert torch.equal(total.view(expected.dtype), expected)
    for values, was in zip(given, before, strict=True):
        assert torch.equal(values.view(torch.uint8), was.view(torch.uint8))  # they stay intact


@pytest.mark.parametrize("order", list(itertools.permutations(range(NUM))))
def test_the_order_of_coming_changes_no_bit(order):
    given = [values_of(torch.float32, seed) * 10.0**seed for seed in range(NUM)]
    arithmetic = arithmetic_for(Operator.SUM, torch.float32)
    total = torch.empty(37)
    adding = PartSum(NUM, arithmetic, codec_for("fp32", torch.float32), lambda: total)
    for place in order:
        adding.offer(place, Contribution(given[place], False, lambda: None))
    assert torch.equal(total, ((given[0] + given[1]) + given[2]) + given[3])


def test_another_order_would():
    """What the test above relies on."""
    given = [values_of(torch.float32, seed) * 10.0**seed for seed in range(NUM)]
    right = ((given[0] + given[1]) + given[2]) + given[3]
    assert not torch.equal(right, given[0] + (given[1] + (given[2] + given[3])))


@pytest.mark.parametrize("wire", ["bf16", "fp16", "int8"])
@pytest.mark.parametrize("coded", list(itertools.product([False, True], repeat=3)))
def test_plain_and_coded_ones_together(wire, coded):
    codec = codec_for(wire, torch.float32)
    given = [values_of(torch.float32, seed, 600) for seed in range(3)]
    arithmetic = arithmetic_for(Operator.SUM, torch.float32)
    total, expected = torch.empty(600), torch.zeros(600)
    adding = PartSum(3, arithmetic, codec, lambda: total)
    arrived = []
    for values, is_coded in zip(given, coded, strict=True):
        bytes_ = torch.empty(codec.num_bytes(600, torch.float32), dtype=torch.uint8)
        codec.encode(values, bytes_)
        decoded = torch.empty(600)
        codec.decode(bytes_, decoded)
        arrived.append(Contribution(bytes_ if is_coded else values, is_coded, lambda: None))
        expected = expected + (decoded if is_coded else values)
    for place in random.sample(range(3), 3):
        adding.offer(place, arrived[place])
    assert torch.equal(total, expected)


def test_dropping_releases_what_was_not_added():
    released = []
    arithmetic = arithmetic_for(Operator.SUM, torch.float32)
    adding = PartSum(4, arithmetic, codec_for("fp32", torch.float32))
    for place in (0, 2, 3):
        values = torch.ones(3)
        adding.offer(place, Contribution(values, False, lambda p=place: released.append(p)))
    adding.drop()
    assert sorted(released) == [0, 2, 3]


@pytest.mark.parametrize("again", [0, 1, 2], ids=["first", "added", "waiting"])
def test_a_member_that_offers_twice_is_refused_and_nothing_is_kept(again):
    """What it gave first counts; the memory of what it gave then is free."""
    pool = Pool(12, keep_blocks=8)
    given = []

    def offer(place, value) -> bool:
        block = pool.take(12)
        given.append(block)
        values = block.tensor.view(torch.float32).fill_(value)
        release = lambda: pool.give(block)  # noqa: E731
        return adding.offer(place, Contribution(values, False, release, final=place == 3))

    arithmetic = arithmetic_for(Operator.SUM, torch.float32)
    adding = PartSum(4, arithmetic, codec_for("fp32", torch.float32))
    early = {0: (0,), 1: (0, 1), 2: (0, 2)}[again]
    for place in early:
        offer(place, 10.0**place)
    missing = adding.missing()
    with pytest.raises(UsageError, match=f"member {again} "):
        offer(again, 7.0)
    assert adding.missing() == missing
    assert [offer(place, 10.0**place) for place in missing][-1]
    assert adding.total.tolist() == [1111.0] * 3
    adding.drop()
    free = {block.tensor.data_ptr() for block in pool._free}
    assert free == {block.tensor.data_ptr() for block in given}


@pytest.mark.parametrize("name", ["bits8", "bits16", "int4", "uint1", "float4_e2m1fn_x2"])
@pytest.mark.parametrize("operator", Operator)
def test_dtypes_that_torch_only_stores(operator, name):
    """They travel, but have no sum: an error where it is asked for, not where it is made."""
    with pytest.raises(UsageError, match="not defined"):
        arithmetic_for(operator, DTYPES[name])


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("me", range(3))
@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_a_total_of_coded_ones_is_made_in_the_final_ones_memory_if_that_is_early(order, me, wire):
    """Not if it is late: the coded ones before it have been added up by then. Same bits."""
    codec = codec_for(wire, torch.float32)
    given = [values_of(torch.float32, seed) * 10.0**seed for seed in range(3)]
    coded = []
    for values in given:
        coded.append(torch.empty(codec.num_bytes(len(values), torch.float32), dtype=torch.uint8))
        codec.encode(values, coded[-1])
    read = [values.clone() for values in given]
    for place in range(3):
        if place != me:
            codec.decode(coded[place], read[place])
    expected = (read[0] + read[1]) + read[2]
    room, asked, released = torch.empty_like(given[0]), [], []
    memory = lambda: asked.append(True) or room  # noqa: E731
    adding = PartSum(3, arithmetic_for(Operator.SUM, torch.float32), codec, memory)
    for place in order:
        values = given[place] if place == me else coded[place]
        release = lambda place=place: released.append(place)  # noqa: E731
        adding.offer(place, Contribution(values, place != me, release, final=place == me))
    assert torch.equal(adding.total, expected)
    in_place = adding.total.data_ptr() == given[me].data_ptr()
    assert in_place is not bool(asked)
    assert in_place or adding.total.data_ptr() == room.data_ptr()
    if me == 0 or (me == 1 and order.index(1) < order.index(0)):  # as at its owner
        assert in_place
    adding.drop()
    assert sorted(released) == [0, 1, 2]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("me", range(3))
def test_the_total_ends_in_the_final_ones_memory(order, me):
    given = [values_of(torch.float32, seed) * 10.0**seed for seed in range(3)]
    expected = (given[0] + given[1]) + given[2]
    adding = PartSum(
        3, arithmetic_for(Operator.SUM, torch.float32), codec_for("fp32", torch.float32)
    )
    released = []
    for place in order:
        release = lambda place=place: released.append(place)  # noqa: E731
        adding.offer(place, Contribution(given[place], False, release, final=place == me))
    assert adding.total.data_ptr() == given[me].data_ptr()
    assert torch.equal(given[me], expected)
    assert sorted(released) == [place for place in range(3) if place != me]
    adding.drop()
    assert len(released) == 3
