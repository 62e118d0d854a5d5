"""Memory between a CPU and a GPU, used again."""

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

    def test_a_gpu_that_is_behind_gets_what_was_sent(self):
        """Not what is sent after it."""
        staging = Staging()
        first, second = (torch.zeros(1 << 16, device="cuda") for _ in range(2))
        torch.cuda._sleep(1 << 28)  # cycles: what follows waits for that
        staging.send([first], lambda room: room[0].fill_(1))
        staging.send([second], lambda room: room[0].fill_(2))
        assert (first.unique().tolist(), second.unique().tolist()) == ([1.0], [2.0])
