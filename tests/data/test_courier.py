"""Batches on a device: here, and on a GPU while that computes."""

from __future__ import annotations

import pytest
import torch

from manyhands.core.errors import UsageError
from manyhands.data import Loader
from manyhands.data.courier import Courier
from tests.data import samples

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
