"""The owner's work: add in roster order, divide by the weight, encode once, refuse what is bad."""

from __future__ import annotations

import math

import pytest
import torch

from manyhands.collectives import layout
from manyhands.collectives.adder import Adder
from manyhands.collectives.bank import Bank, pool_for
from manyhands.collectives.layout import Layout
from manyhands.collectives.messages import Fault, Part, Share, Sum, Tag
from manyhands.collectives.ranges import EMPTY, Ranges
from manyhands.collectives.results import Result
from manyhands.collectives.shelf import Filed
from manyhands.core.peers import ViewNumber

ME = 2
K = 1  # the part under test; part 0 comes with a record
TAG = Tag(ViewNumber(1, 1), 0)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
OTHERS = (torch.complex64, torch.int32, torch.uint8, torch.uint16, torch.bool)


def ranges_of(peer) -> Ranges:
    return Ranges.of((10 * peer, 10 * peer + 5))


def part_of(peer, weight=1.0, *, exact=False) -> Part:
    return Part(0, TAG, K, ranges_of(peer), weight, exact=exact)


class Owner:
    """Member 2 of a round; the others' contributions come as bytes."""

    def __init__(self, dtype=torch.float32, wire="fp32", *, numel=300, refuse=True) -> None:
        self.first = torch.zeros(1, dtype=torch.int16)
        self.layout = Layout.of([self.first, torch.empty(numel, dtype=dtype)], 1 << 20)
        self.pool = pool_for(self.layout, wire, 1 << 20)
        self.bank = Bank(self.layout, wire, self.pool)
        self.adder = Adder(self.layout, self.bank, self.pool, refuse=refuse)
        self.filed: dict[int, Filed] = {}
        self.values: dict[int, torch.Tensor] = {}

    def give(self, peer, values, weight=1.0, *, exact=False) -> None:
        block = None
        self.bank.exact = exact
        if peer == ME and values is not None:
            self.bank.lend(self.layout.check([self.first, values]), weight)
        elif values is not None:
            block = self.pool.take(self.adder.wire_bytes(K, exact=exact))
            self.bank.codecs_of(exact=exact)[K].encode(values, block.tensor)
        self.filed[peer] = Filed(part_of(peer, weight, exact=exact), block)
        if values is not None:
            self.values[peer] = values

    def add(self, order, *, refused=EMPTY, exact=False):
        """The head, and what everybody will read."""
        shares = tuple(Share(peer, ranges_of(peer)) for peer in order)
        head = Sum(0, TAG, K, shares, refused, exact=exact)
        head, block = self.adder.add_up(head, self.filed, ME)
        assert block.tensor.numel() == self.adder.result_bytes(head)
        out = torch.full((self.layout.parts[K].numel,), 7, dtype=self.layout.parts[K].dtype)
        blocks = {0: self.pool.take(0), K: block}
        codecs = self.bank.codecs_of(exact=exact)
        Result(self.layout, codecs, blocks, self.pool).read_into([self.first, out])
        return head, out


def values_of(dtype, seed, numel=300) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(numel, generator=made, dtype=dtype)
    return torch.randint(0, 2, (numel,), generator=made).to(dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, *OTHERS], ids=str)
def test_the_mean_in_roster_order(dtype):
    owner = Owner(dtype)
    for peer, weight in ((1, 3.0), (ME, 2.0), (3, 1.0)):
        owner.give(peer, values_of(dtype, peer), weight)
    order = (3, 1, ME)  # of the roster, not of the numbers
    head, mean = owner.add(order)
    assert head.weight == 6
    each = [owner.values[peer] for peer in order]
    if dtype is torch.bool:
        expected = each[0] | each[1] | each[2]
    elif dtype in (torch.float16, torch.bfloat16):
        expected = (((each[0].float() + each[1].float()) + each[2].float()) / 6).to(dtype)
    elif dtype.is_floating_point or dtype.is_complex:
        expected = ((each[0] + each[1]) + each[2]) / 6
    else:
        expected = sum(one.to(torch.int64) for one in each).to(dtype)
    assert torch.equal(mean, expected)


@pytest.mark.parametrize("wire", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_result_does_not_depend_on_who_adds_it_up(wire, dtype):
    """In int8 it does: an owner need not round its own, and owes what it leaves out of the sum."""
    results = []
    for me in (1, ME, 3):  # who is the owner, whose contribution does not travel
        owner = Owner(dtype, wire)
        for peer in (1, ME, 3):
            mine = {me: ME, ME: me}.get(peer, peer)
            owner.give(mine, values_of(dtype, peer), 1.0)
        order = [{me: ME, ME: me}.get(peer, peer) for peer in (1, ME, 3)]
        head, mean = owner.add(order)
        results.append((mean, head.squared_norm))
    assert all(torch.equal(mean, results[0][0]) for mean, _ in results)
    assert len({norm for _, norm in results}) == 1


@pytest.mark.parametrize(
    ("dtype", "wire", "tolerance"),
    [
        *((torch.float32, wire, 1e-6) for wire in ("fp32", "bf16", "int8")),
        (torch.float64, "fp32", 1e-12),
        (torch.float16, "fp32", 1e-12),
    ],
)
@pytest.mark.parametrize("size", [1.0, 1e-3], ids=str)
def test_the_norm_is_that_of_what_everybody_reads(dtype, wire, tolerance, size):
    owner = Owner(dtype, wire)
    for peer in (1, ME):
        owner.give(peer, values_of(dtype, peer) * size)
    head, mean = owner.add((1, ME))
    expected = math.fsum(x * x for x in mean.double().tolist())
    assert head.squared_norm == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("numel", [1 << 15, (1 << 15) + 1, 100_000])
def test_the_norm_of_several_pieces_in_whichever_thread(monkeypatch, numel, autocast):
    """The user's, which adds up if its contribution comes last, may have autocast on."""
    monkeypatch.setattr(layout, "_MIN_PARTS", 1)  # all of it is one part
    owner = Owner(numel=numel)
    for peer in (1, ME):
        owner.give(peer, values_of(torch.float32, peer, numel))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        head, mean = owner.add((1, ME))
    expected = math.fsum(x * x for x in mean.double().tolist())
    assert head.squared_norm == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("size", [1e-30, 1e-22, 1e-18, 1e18, 1e25, 1e37], ids=str)
def test_squares_beyond_the_numbers_of_fp32_count(size):
    owner = Owner(torch.float32)
    owner.give(ME, values_of(torch.float32, ME) * size)
    head, mean = owner.add((ME,))
    expected = math.fsum(x * x for x in mean.double().tolist())
    assert head.squared_norm == pytest.approx(expected, rel=1e-6)


class TestEmpty:
    def test_weight_zero_adds_nothing_and_is_no_fault(self):
        owner = Owner()
        owner.give(1, None, 0.0)
        owner.give(ME, torch.full((300,), 4.0), 2.0)
        head, mean = owner.add((1, ME))
        assert (head.weight, head.refused, mean.tolist()) == (2.0, EMPTY, [2.0] * 300)

    @pytest.mark.parametrize("wire", ["fp32", "int8"])
    def test_nothing_at_all_gives_zeros(self, wire):
        """Which need no bytes to be told."""
        owner = Owner(wire=wire)
        for peer in (1, ME):
            owner.give(peer, None, 0.0)
        head, mean = owner.add((1, ME))
        assert owner.adder.result_bytes(head) == 0
        assert (head.weight, head.squared_norm, mean.tolist()) == (0.0, 0.0, [0.0] * 300)


class TestRefused:
    @pytest.mark.parametrize("wire", ["fp32", "fp16", "bf16", "int8"])
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64], ids=str)
    @pytest.mark.parametrize("whose", [1, ME])
    def test_what_is_not_finite(self, whose, dtype, bad, wire):
        owner = Owner(dtype, wire)
        for peer in (1, ME, 3):
            values = values_of(dtype, peer)
            if peer == whose:
                values[77] = bad
            owner.give(peer, values)
        head, _ = owner.add((1, ME, 3))
        assert head.refused == ranges_of(whose)
        assert head.faults == (Fault(whose, owner.layout.parts[K].slices[0].tensor),)
        assert math.isfinite(head.squared_norm)

    def test_two_that_cancel_out_to_a_nan(self):
        owner = Owner()
        for peer, bad in ((1, math.inf), (ME, -math.inf), (3, 1.0)):
            values = torch.ones(300)
            values[0] = bad
            owner.give(peer, values)
        head, _ = owner.add((1, ME, 3))
        assert head.refused == ranges_of(1) | ranges_of(ME)

    def test_not_where_it_is_to_be_seen(self):
        owner = Owner(refuse=False)
        owner.give(1, torch.full((300,), math.nan))
        owner.give(ME, torch.ones(300))
        head, mean = owner.add((1, ME))
        assert head.refused == EMPTY
        assert mean.isnan().all()

    def test_what_is_large_is_not_refused(self):
        """Squares beyond fp64 are no fault of anybody's."""
        owner = Owner(torch.float64)
        for peer in (1, ME):
            owner.give(peer, torch.full((300,), 1e250, dtype=torch.float64))
        head, mean = owner.add((1, ME))
        assert head.refused == EMPTY
        assert head.squared_norm == 0
        assert mean.tolist() == [1e250] * 300

    @pytest.mark.parametrize(
        ("dtype", "wire"),
        [
            *((torch.float32, wire) for wire in ("fp32", "bf16", "int8")),
            (torch.float64, "fp32"),  # other codecs carry no more than fp32 does: they clip
            (torch.complex64, "fp32"),
        ],
        ids=str,
    )
    def test_finite_ones_whose_mean_is_not(self, dtype, wire):
        """Nobody's fault alone: none of them counts, and the attempt without them ends it."""
        largest = torch.finfo(dtype).max * 0.99
        owner = Owner(dtype, wire)
        for peer in (1, ME, 3):
            values = values_of(dtype, peer)
            values[77] = largest if peer != 3 else 1.0
            owner.give(peer, values)
        owner.give(4, None, 0.0)
        head, mean = owner.add((1, ME, 3, 4))
        assert not mean.isfinite().all()
        assert head.refused == ranges_of(1) | ranges_of(ME) | ranges_of(3)
        assert head.squared_norm == 0
        owner = Owner(dtype, wire)
        for peer in (1, ME, 3, 4):
            owner.give(peer, None, 0.0)
        head, mean = owner.add((1, ME, 3, 4))
        assert head.refused == EMPTY
        assert mean.isfinite().all()

    def test_a_weight_so_small_that_the_mean_is_not_finite(self):
        owner = Owner()
        owner.give(1, torch.ones(300), 1e-40)
        owner.give(ME, torch.ones(300), 1e-40)
        head, _ = owner.add((1, ME))
        assert head.refused == ranges_of(1) | ranges_of(ME)

    def test_one_that_is_not_finite_among_some_that_are_too_large(self):
        """First those that are at fault for certain; what is left may do, or not."""
        owner = Owner()
        for peer, value in ((1, 3e38), (ME, 3e38), (3, math.nan)):
            owner.give(peer, torch.full((300,), value))
        assert owner.add((1, ME, 3))[0].refused == ranges_of(3)

    def test_a_mean_that_is_not_finite_where_it_is_to_be_seen(self):
        owner = Owner(refuse=False)
        for peer in (1, ME):
            owner.give(peer, torch.full((300,), 3e38))
        head, mean = owner.add((1, ME))
        assert head.refused == EMPTY
        assert mean.isinf().all()

    def test_one_of_the_wrong_size_is_not_added_and_stays_refused(self):
        owner = Owner()
        owner.give(ME, torch.ones(300))
        owner.filed[1] = Filed(part_of(1), owner.pool.take(40))
        assert not owner.adder.is_whole(*owner.filed[1])
        head, mean = owner.add((1, ME), refused=ranges_of(1))
        assert head.refused == ranges_of(1)
        assert head.faults == (Fault(1),)
        assert mean.tolist() == [0.5] * 300

    def test_what_makes_a_contribution_whole(self):
        owner = Owner()
        is_whole, take = owner.adder.is_whole, owner.pool.take
        assert is_whole(part_of(1), take(1200))
        assert not is_whole(part_of(1), take(1196))
        assert not is_whole(part_of(1), None)
        assert is_whole(part_of(1, 0.0), None)
        assert not is_whole(part_of(1, 0.0), take(1200))
        assert not is_whole(Part(0, TAG, 900, EMPTY, 1.0), take(1200))  # there is no such part

    def test_bytes_that_are_no_bool(self):
        owner = Owner(torch.bool)
        block = owner.pool.take(300)
        block.tensor.fill_(1)
        assert owner.adder.is_whole(part_of(1), block)
        block.tensor[5] = 2
        assert not owner.adder.is_whole(part_of(1), block)

    def test_bytes_of_its_own_that_are_no_bool(self):
        """Judged as another owner would: whose part it is must not matter."""
        owner = Owner(torch.bool)
        owner.give(1, torch.zeros(300, dtype=torch.bool))
        mine = torch.zeros(300, dtype=torch.uint8)
        owner.give(ME, mine.view(torch.bool))
        assert owner.adder.is_own_whole(part_of(ME))
        mine[5] = 2
        assert not owner.adder.is_own_whole(part_of(ME))
        assert owner.adder.is_own_whole(part_of(ME, 0.0))
        assert not owner.add((1, ME))[1].any()


def test_contributions_stay_as_they_were():
    """An attempt that a death makes void is repeated with the same values."""
    for wire in ("fp32", "bf16"):
        owner = Owner(wire=wire)
        for peer in (1, ME, 3):
            owner.give(peer, values_of(torch.float32, peer), 2.0)
        before = {peer: values.clone() for peer, values in owner.values.items()}
        first, again = owner.add((1, ME, 3)), owner.add((1, ME, 3))
        assert first[0] == again[0]
        assert torch.equal(first[1], again[1])
        assert all(torch.equal(values, before[peer]) for peer, values in owner.values.items())


def test_in_inference_mode_and_outside_of_it():
    owner = Owner(wire="bf16")
    with torch.inference_mode():
        owner.give(1, torch.ones(300))
        owner.give(ME, torch.ones(300))
        owner.add((1, ME))
    assert owner.add((1, ME))[1].tolist() == [1.0] * 300


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("giver", [1, ME])
@pytest.mark.parametrize("dtype", [*FLOATS, *OTHERS], ids=str)
def test_what_one_peer_gives_in_a_resync_arrives_to_the_bit(wire, giver, dtype):
    """Whatever the codec, and also what no mean could be."""
    owner, values = Owner(dtype, wire), values_of(dtype, 5)
    if dtype.is_floating_point:
        values[:3] = torch.tensor([-math.inf, -0.0, 1e-7])
    for peer in (1, ME, 3):
        gives = peer == giver
        owner.give(peer, values if gives else None, float(gives), exact=True)
    assert owner.adder.is_whole(owner.filed[1].part, owner.filed[1].block)
    head, adopted = owner.add((1, ME, 3), exact=True)
    assert (head.weight, head.refused, head.faults) == (1.0, EMPTY, ())
    assert torch.equal(adopted.view(torch.uint8), values.view(torch.uint8))


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_who_takes_a_round_for_another_is_refused(wire, exact):
    """Its bytes are right for what it says, and wrong for this round."""
    owner = Owner(torch.float32, wire)
    owner.give(1, values_of(torch.float32, 1), exact=not exact)
    owner.give(ME, values_of(torch.float32, ME), exact=exact)
    head, _ = owner.add((1, ME), exact=exact)
    assert head.refused == ranges_of(1)
    assert head.faults == (Fault(1),)
