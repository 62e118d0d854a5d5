"""What comes out of a worker process is what went in, of any kind and size."""

from __future__ import annotations

import multiprocessing
import os
import resource
import socket
from collections import OrderedDict
from contextlib import closing, contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import NamedTuple

import pytest
import torch

from manyhands.data import parcel
from manyhands.data.parcel import Lost, Parcel, receive, send


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
    sender = Thread(target=send, args=(theirs, thing))
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
        assert opened() == before  # not even of the memory, which is used
        del came
    assert opened() == before


@contextmanager
def no_more_files():
    """This process can open nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.open(os.devnull, os.O_RDONLY)
    os.close(probe)
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe, hard))  # the lowest number that is free
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def pipe():
    mine, theirs = multiprocessing.Pipe()
    with mine, theirs:
        yield mine, theirs


def test_a_batch_for_which_there_is_no_descriptor_is_lost_and_not_shifted():
    with pipe() as (mine, theirs), closing(Parcel(torch.rand(100_000))) as large:
        with no_more_files():
            large.send(theirs)  # of what is packed it needs nothing
            with pytest.raises(Lost, match="Too many open files"):
                receive(mine)
        # What is left on the line is the rest of that batch: it must not be read as another.
        assert mine.poll()


def test_anything_between_a_head_and_its_body_ends_the_line(monkeypatch):
    def failing(line, size):
        raise RuntimeError("received 0 items of ancdata")

    monkeypatch.setattr(parcel, "_mapped", failing)
    with pipe() as (mine, theirs), closing(Parcel(torch.rand(100_000))) as large:
        large.send(theirs)
        with pytest.raises(OSError, match="RuntimeError: received 0 items"):
            receive(mine)


def test_a_batch_that_there_is_no_memory_for_ends_the_line(monkeypatch):
    """Of what is not made of tensors: some of it may have been read when memory runs out."""
    with pipe() as (mine, theirs):
        send(theirs, ["text"])
        heads = [mine.recv()]

        def short():
            if not heads:
                raise MemoryError
            return heads.pop()

        monkeypatch.setattr(mine, "recv", short)
        with pytest.raises(Lost, match="no memory"):
            receive(mine)


def test_what_there_is_no_descriptor_for_is_not_begun():
    """Nothing has gone to the line, so that an error can."""
    with pipe() as (mine, theirs):
        with no_more_files(), pytest.raises(OSError, match="Too many open files"):
            send(theirs, torch.rand(100_000))
        assert not mine.poll()
        send(theirs, "an error")
        assert receive(mine) == "an error"


def test_a_default_of_the_users_for_sockets_is_not_the_lines():
    """It would make the line one that does not wait, for both ends of it."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(60.0)
    try:
        with pipe() as (mine, theirs), parcel.borrowed(theirs) as sock:
            assert sock.gettimeout() is None
            assert os.get_blocking(theirs.fileno())
            assert os.get_blocking(mine.fileno())
    finally:
        socket.setdefaulttimeout(before)
