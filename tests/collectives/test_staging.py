"""Memory between a CPU and a GPU, used again."""

from dataclasses import dataclass

import pytest
import torch

from manyhands.collectives.staging import Staging

pytestmark = pytest.mark.usefixtures("started_gpu")


def test_what_is_on_the_cpu_is_not_copied():
    staging = Staging()
    tensor = torch.arange(3.0)
    assert staging.fetch([tensor])[0] is tensor
    staging.send([tensor], lambda room: room[0].fill_(7))
    assert tensor.tolist() == [7.0] * 3


@dataclass
class There:
    """What is asked of a tensor on a GPU, where none need be."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    is_cuda: bool = True


def test_memory_is_used_again_for_tensors_like_those_before_and_for_no_others(monkeypatch):
    """A tensor may have moved to a GPU since, or be another one: what it was is its owner's."""
    monkeypatch.setattr(
        "manyhands.collectives.staging._pinned_like",
        lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype),  # pinned only with a GPU
    )
    staging, here = Staging(), torch.arange(6.0)
    there = There((6,))
    (room,) = staging._room_for([here])
    assert room is here
    (room,) = staging._room_for([there])
    assert room is not here
    assert staging._room_for([there])[0] is room  # as in every round
    for other in (There((6,), torch.int32), There((2, 3), torch.int32), There((7,))):
        (changed,) = staging._room_for([other])
        assert (changed.shape, changed.dtype) == (other.shape, other.dtype)
        assert changed.data_ptr() not in (room.data_ptr(), here.data_ptr())
    assert staging._room_for([here, there])[0] is here
    assert staging._room_for([here])[0] is here


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
class TestGpu:
    def test_there_and_back(self):
        staging = Staging()
        there, here = torch.zeros(1000, device="cuda"), torch.zeros(10)
        staging.send([there, here], lambda room: [t.fill_(5) for t in room])
        assert (there.sum().item(), here.sum().item()) == (5000.0, 50.0)
        fetched = staging.fetch([there + 1, here])
        assert [t.device.type for t in fetched] == ["cpu", "cpu"]
        assert fetched[0].tolist() == [6.0] * 1000

    def test_a_tensor_that_moves_there_and_changes(self):
        staging = Staging()
        here = torch.zeros(10)
        staging.fetch([here])
        assert staging.fetch([torch.ones(10, device="cuda")])[0].tolist() == [1.0] * 10
        assert not here.any()  # its owner's
        (fetched,) = staging.fetch([torch.full((2, 5), 7, dtype=torch.int32, device="cuda")])
        assert fetched.tolist() == [[7] * 5] * 2
        assert fetched.dtype is torch.int32
        staging.send([there := torch.zeros(4, device="cuda")], lambda room: room[0].fill_(3))
        assert there.tolist() == [3.0] * 4

    def test_a_gpu_that_is_behind_gets_what_was_sent(self):
        """Not what is sent after it."""
        staging = Staging()
        first, second = (torch.zeros(1 << 16, device="cuda") for _ in range(2))
        torch.cuda._sleep(1 << 28)  # cycles: what follows waits for that
        staging.send([first], lambda room: room[0].fill_(1))
        staging.send([second], lambda room: room[0].fill_(2))
        assert (first.unique().tolist(), second.unique().tolist()) == ([1.0], [2.0])
