"""A worker with a GPU and one without."""

import asyncio

import pytest
import torch

from tests.compat.bossman.test_training import MODEL, Alone, batches, distributed, loop

pytestmark = pytest.mark.usefixtures("started_gpu")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_two_devices(hands, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    hands.start("a", "--device", device)
    hands.start("b", "--device", "cpu")

    async def main():
        async with await distributed(2, MODEL, seed=5, device=device) as boss:
            alone = Alone(MODEL)
            for x, y in batches(3):
                wanted = alone.step(x, y)
                prediction, found = await loop(boss, x.to(device), y.to(device))
                assert prediction.device.type == device
                assert found == pytest.approx(wanted, rel=1e-4)
            for x, y in batches(2):
                wanted = alone.step(x, y, 4)
                found = await boss.train_step(x, y, torch.nn.MSELoss(), 4)
                assert found == pytest.approx(wanted, rel=1e-4)
            await boss.node_mem_clear()
            for name, tensor in (await boss.state_dict()).items():
                # Adam turns a difference of rounding into one of a step where gradients vanish.
                assert (tensor - alone.model.state_dict()[name]).abs().max() < 0.02, name

    asyncio.run(main())
    hands.finish()
