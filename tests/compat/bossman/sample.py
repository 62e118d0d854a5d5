"""The example of BossMan's README, as a program. What differs: the imports, the number of epochs,
`get_batch`, which it leaves to the reader, and a last line that says what was learned.
"""

import asyncio
import json
import math
import sys

import torch
from torch import nn

from manyhands.compat.bossman import BossMan, wrapped_linear

# fmt: off
TEST_RESIDUAL_SMALL = [
      (nn.Linear, {'in_features':1, 'out_features':512}, (32,  1)),
      (nn.ReLU,   {}, (32,512)),
      (wrapped_linear, {
          'in_features':512,
          'out_features':512,
          'out_variables': ["res_1"]
          }, [(32, 512)]),
      (nn.ReLU,   {}, (32,512)),
      (nn.Linear, {'in_features':512, 'out_features':512}, (32,512)),
      (nn.ReLU,   {}, (32,512)),
      (wrapped_linear, {
          'in_features':512,
          'out_features':512,
          'dependencies':["res_1"],
          'out_variables': []
      }, [(32, 512), (32,512)]),
      (nn.ReLU,   {}, (32,512)),
      (nn.Linear, {'in_features':512, 'out_features':1}, (32, 512)),
      (nn.Sigmoid,   {}, (32,1))
  ]


def get_batch(size):
    x = torch.rand(size, 1) * math.pi  # where a sigmoid can follow sin(x)
    return x, torch.sin(x)


async def main(model, num_workers):
    #Set up server and await connections
    workers = await BossMan.setup_host(num_workers)
    boss = BossMan(workers, model)
    await boss.distribute_model()
    await boss.send_optimizer(torch.optim.Adam, {"lr":3e-3})
    boss.gather_dependencies()
    #Server set up begin regular training
    loss_fn = torch.nn.MSELoss()
    EPOCHS = int(sys.argv[1])
    for _ in range(EPOCHS):
        x,y = get_batch(32)
        prediction = await boss.forward(x, {})
        loss = loss_fn(prediction, y)
        loss.backward()
        await boss.backward(prediction.grad)
        await boss.optim_step()
# fmt: on
    with torch.no_grad():
        x, y = get_batch(512)
        found = loss_fn(await boss.forward(x, {}), y)
    print(json.dumps({"loss": float(found), "plan": boss.plan.to_json()}), flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    asyncio.run(main(TEST_RESIDUAL_SMALL, 2))
