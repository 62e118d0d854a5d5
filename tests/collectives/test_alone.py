"""A round with a single peer: its contribution is the result, and its values are left alone."""

from __future__ import annotations

import pytest
import torch

from manyhands.collectives import alone
from manyhands.collectives.alone import are_finite
from manyhands.collectives.outcomes import Committed, Retry
from manyhands.links.hub import Hub
from tests.collectives.test_rounds import Group


def values(*numbers, dtype=torch.float32):
    return [torch.tensor(numbers, dtype=dtype), torch.arange(5.0, dtype=dtype)]


@pytest.fixture(params=["local://", "hub"])
def url(request):
    if request.param != "hub":
        yield request.param
        return
    with Hub("127.0.0.1:0", insecure=True) as hub:
        yield f"{hub.address}?insecure=1"


def test_the_mean_is_read_where_it_was_lent(url):
    given = values(2.0, -4.0, 6.0)
    like = [torch.empty(3), torch.empty(5)]
    with Group(url, 1, like) as group:
        (committed,) = group.round([given], [2.0])
        assert committed.result.alone
        assert committed.weight == 2.0
        for _ in range(2):  # the second reading is no other
            committed.result.read_into(given)
            assert given[0].tolist() == [1.0, -2.0, 3.0]
        elsewhere = [torch.zeros(3), torch.zeros(5)]
        committed.result.read_into(elsewhere)
        committed.result.close()
    assert elsewhere[0].tolist() == [1.0, -2.0, 3.0]
    assert elsewhere[1].tolist() == [0.0, 0.5, 1.0, 1.5, 2.0]


def test_one_head_for_parts_of_several_kinds(url):
    """More than one part, of which nobody else will ever see a head."""
    given = [*values(2.0, -4.0, 6.0), torch.tensor([7, -8])]
    like = [torch.empty_like(tensor) for tensor in given]
    with Group(url, 1, like) as group:
        assert group.peers[0].layout.num_parts == 2
        for _ in range(2):
            (committed,) = group.round([[tensor.clone() for tensor in given]], [2.0])
            assert committed.result.alone
            assert [head.k for head in committed.sums] == [0]
            assert (committed.weight, committed.squared_norm) == (2.0, 0.0)
            mean = [torch.empty_like(tensor) for tensor in given]
            committed.result.read_into(mean)
            committed.result.close()
            assert mean[0].tolist() == [1.0, -2.0, 3.0]
            assert mean[2].tolist() == [7, -8]  # added up, and that is all


def test_a_share_in_several_passes():
    like = [torch.empty(2)]
    with Group("local://", 1, like) as group:
        task = group.task(0)
        some, rest = task.ranges.pieces((1, len(task.ranges)))
        engine = group.peers[0]
        engine.contribute(task, [torch.tensor([1.0, 2.0])], weight=1.0, ranges=some)
        engine.contribute(task, [torch.tensor([3.0, 6.0])], weight=3.0, ranges=rest)
        committed = group.next(0, Committed)
        mean = [torch.empty(2)]
        committed.result.read_into(mean)
        committed.result.close()
    assert mean[0].tolist() == [1.0, 2.0]


def test_values_are_looked_at_once_a_round(monkeypatch):
    """Not after every pass: a GPU has to finish before it can answer."""
    looks = []
    monkeypatch.setattr(alone, "are_finite", lambda tensors: looks.append(1) or are_finite(tensors))
    with Group("local://", 1, [torch.empty(2)]) as group:
        task = group.task(0)
        looks.clear()
        pieces = task.ranges.pieces([1] * len(task.ranges))
        for ranges in pieces:
            given = [torch.tensor([1.0, 2.0])]
            group.peers[0].contribute(task, given, weight=1.0, ranges=ranges)
        committed = group.next(0, Committed)
        assert committed.result.alone
        committed.result.close()
    assert len(looks) == 1 < len(pieces)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_refused_is_no_result(bad):
    with Group("local://", 1, [torch.empty(3), torch.empty(5)]) as group:
        task = group.task(0)
        group.peers[0].contribute(task, values(1.0, bad, 2.0), weight=1.0)
        retry = group.next(0, Retry)
        assert retry.refused == task.ranges


def test_finite_values_whose_sum_is_not():
    """They are looked at closer, and count."""
    most = torch.finfo(torch.float32).max
    given = values(most, most, most)
    assert not are_finite(given)
    with Group("local://", 1, [torch.empty(3), torch.empty(5)]) as group:
        (committed,) = group.round([given], [1.0])
        assert not committed.result.alone
        mean = [torch.empty(3), torch.empty(5)]
        committed.result.read_into(mean)
        committed.result.close()
    assert mean[0].tolist() == [most] * 3


@pytest.mark.parametrize("wire", ["fp16", "bf16", "int8"])
def test_a_codec_rounds_for_one_peer_too(wire):
    given = values(1.0001, 2.0002, 3.0003)
    with Group("local://", 1, [torch.empty(3), torch.empty(5)], wire=wire) as group:
        (committed,) = group.round([given], [1.0])
        assert not committed.result.alone
        committed.result.close()


def test_somebody_who_only_watches_is_sent_the_values(url):
    like = [torch.empty(3), torch.empty(5)]
    with Group(url, 1, like) as group:
        group.add(like)
        group.peers[0].outlook.wait_for_view(lambda view: len(view.roster) == 2)
        (committed,) = group.round([values(1.0, 2.0, 3.0)], [1.0])
        assert not committed.result.alone
        assert committed.squared_norm == pytest.approx(14.0 + 30.0)
        committed.result.close()
