"""Means that travel in fewer bytes: near the exact ones, the same on all ranks. DDP: `test_ddp`."""

from __future__ import annotations

import pytest
import torch

import manyhands
from manyhands.collectives.backend.hooks import average
from manyhands.core.errors import UsageError


@pytest.mark.parametrize("wire", ["fp32", "bf16", "fp16", "int8"])
def test_means(crew, wire):
    assert len(set(crew.call("averages", "means", wire).values())) == 1


@pytest.mark.parametrize("check", ["narrow_already", "overflowing", "refusals"])
def test_average(crew, check):
    crew.call("averages", check)


def test_fewer_bytes_are_sent(crew):
    for sent in crew.call("averages", "bytes_of_each", ["fp32", "bf16", "int8"]).values():
        assert 0.45 < sent["bf16"] / sent["fp32"] < 0.55, sent
        assert 0.2 < sent["int8"] / sent["fp32"] < 0.3, sent


@pytest.mark.parametrize(
    ("wire", "words"),
    [
        ("int8", ("rounds off", "'bf16'")),
        ("fp8", ("'fp8'", "'bf16', 'fp16'")),
        ("fp32", ("'fp32'",)),
    ],
)
def test_what_gradients_do_not_travel_as(wire, words):
    with pytest.raises(UsageError) as raised:
        manyhands.compressed(wire)
    assert all(word in str(raised.value) for word in words)


def test_without_a_group():
    with pytest.raises(UsageError, match=r"there is no process group\nhint: .*init_process_group"):
        average(torch.ones(3), "bf16")
