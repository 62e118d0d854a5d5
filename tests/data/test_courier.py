"""Batches on a device: here, and on a GPU while that computes."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass

import pytest
import torch

from manyhands.core.errors import UsageError
from manyhands.data import Loader
from manyhands.data.courier import Courier
from tests.data import samples

pytestmark = pytest.mark.usefixtures("started_gpu")
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU here: copies on a side stream are NOT tested"
)


def test_on_the_cpu_batches_are_as_they_were():
    with Loader(samples.Wide(), 8, device="cpu", workers=1) as loader:
        for numbers, images in loader:
            assert torch.equal(images[:, 0, 0, 0], numbers.float())


def test_other_devices_get_copies():
    courier = Courier("meta")
    batch = {"x": torch.ones(3), "names": ["a"]}
    came = courier.arrive(courier.send(courier.pinned(batch)))
    assert came["x"].device.type == "meta"
    assert came["names"] == ["a"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_cuda_is_refused_with_the_remedy():
    with pytest.raises(UsageError, match="no GPU of CUDA here") as caught:
        Loader(samples.Wide(), 8, device="cuda")
    assert caught.value.hint


@needs_gpu
@pytest.mark.parametrize("kind", ["direct", "thread", "process"])
def test_a_gpu_sees_the_samples_that_were_read(kind):
    """Though it is behind with its work, and batches are let go of at once: each copy waits for
    its turn, and no copy is written over what is still to be read.
    """
    workers = {} if kind == "direct" else {"workers": 2, "kind": kind}
    work = torch.rand(2048, 2048, device="cuda")
    found = []
    with Loader(samples.Wide(), 8, shuffle=False, device="cuda", **workers) as loader:
        for _ in range(6):
            for numbers, images in loader:
                assert numbers.is_cuda
                assert images.is_cuda
                for _ in range(20):
                    work = (work @ work).clamp_(-1, 1)
                found.append(images.flatten(1).mean(1) - numbers + 0 * work[0, 0])
                found.append(images.flatten(1).amax(1) - images.flatten(1).amin(1))
                del numbers, images
    torch.cuda.synchronize()
    assert torch.cat(found).abs().max() == 0


@needs_gpu
def test_copies_are_of_pinned_memory_and_do_not_wait():
    courier = Courier("cuda")
    batch = courier.pinned([torch.rand(1 << 22), "name"])
    assert batch[0].is_pinned()
    busy = torch.rand(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    for _ in range(50):
        busy = (busy @ busy).clamp_(-1, 1)
    done = torch.cuda.Event()
    done.record()
    sent = courier.send(batch)
    sent.done.synchronize()
    assert not done.query()  # the copy is there, and the GPU still computes
    assert torch.equal(courier.arrive(sent)[0].cpu(), batch[0])


@dataclass
class Pair:
    """As a collate of the user's may have it; nobody can move what it has."""

    x: torch.Tensor


class Moving(Pair):
    """It can be moved."""

    def to(self, device):
        return Moving(self.x.to(device))


def over(courier, batch):
    return courier.arrive(courier.send(courier.pinned(batch)))


def test_things_of_the_users_own_are_moved_by_their_own_means():
    came = over(Courier("meta"), [Moving(torch.ones(3)), UserDict(a="no tensor"), 5])
    assert came[0].x.device.type == "meta"
    assert came[1:] == [UserDict(a="no tensor"), 5]


@pytest.mark.parametrize("thing", [Pair(torch.ones(3)), UserDict(x=torch.ones(3))])
def test_what_nobody_can_move_is_refused_by_name(thing):
    """It would stay on the CPU, without a word."""
    with pytest.raises(UsageError, match=type(thing).__name__) as caught:
        over(Courier("meta"), {"own": thing})
    assert "to(device)" in caught.value.hint
    assert over(Courier("cpu"), {"own": thing}) == {"own": thing}  # where it is already


@needs_gpu
def test_a_gpu_without_a_number_is_the_one_that_is_current():
    """And stays it, whichever becomes that later."""
    courier = Courier("cuda")
    assert courier.device == torch.device("cuda", torch.cuda.current_device())
    (came,) = over(courier, [Moving(torch.ones(3))])
    assert came.x.device == courier.device
