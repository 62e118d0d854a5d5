"""What comes out of a worker process is what went in, of any kind and size."""

from __future__ import annotations

import multiprocessing
import os
from collections import OrderedDict
from dataclasses import dataclass
from threading import Thread
from typing import NamedTuple

import pytest
import torch

from manyhands.data.parcel import receive, send


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclass
class Batch:
    """What a collate of the user's may make."""

    images: torch.Tensor
    names: list[str]


def through(thing):
    """By a real pipe, from one thread to another."""
    mine, theirs = multiprocessing.Pipe()
    sender = Thread(target=send, args=(theirs, thing, os.getpid()))
    sender.start()
    try:
        return receive(mine)
    finally:
        sender.join()
        mine.close()
        theirs.close()


@pytest.mark.parametrize("size", [3, 100_000], ids=["inline", "memory"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
)
def test_tensors_of_any_kind(dtype, size):
    tensor = (torch.arange(2 * size) % 2).to(dtype).view(2, size)
    (came, again), number = through(([tensor, tensor[1].clone()], 7))
    assert came.dtype is dtype
    assert torch.equal(came, tensor)
    assert torch.equal(again, tensor[1])
    assert number == 7
    came[0, 0] = 1  # it is the user's, and so is its neighbour
    assert torch.equal(again, tensor[1])


def test_batches_of_any_form():
    x = torch.rand(4, 30_000)
    channels = torch.rand(2, 3, 5, 7).to(memory_format=torch.channels_last)
    came = through(
        {
            "pair": Pair(x, torch.arange(4)),
            "own": Batch(x, ["a", "b"]),
            "ordered": OrderedDict(b=x.t(), a=None),
            "empty": torch.zeros(0, 5),
            "sliced": x[:, ::3],
            "wide": x[:1].expand(5, -1),
            "channels": channels,
            "scalar": torch.tensor(2.5),
            "texts": ("ä" * 100_000, b"\x00" * 10),
        }
    )
    assert isinstance(came["pair"], Pair)
    assert torch.equal(came["pair"].x, x)
    assert came["own"].names == ["a", "b"]
    assert torch.equal(came["own"].images, x)
    assert torch.equal(came["ordered"]["b"], x.t())
    assert torch.equal(came["sliced"], x[:, ::3])
    assert torch.equal(came["wide"], x[:1].expand(5, -1))
    assert came["channels"].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(came["channels"], channels)
    assert came["empty"].shape == (0, 5)
    assert came["scalar"].item() == 2.5
    assert came["texts"] == ("ä" * 100_000, b"\x00" * 10)


def test_nothing_stays_open():
    def opened():
        return len(os.listdir("/proc/self/fd"))

    before = opened()
    for _ in range(3):
        came = through(torch.rand(100_000))
        assert opened() <= before + 1  # of the memory itself
        del came
    assert opened() == before
