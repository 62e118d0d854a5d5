"""The sample of DeepBooster's README, step by step; `python sample.py NUMBER URL`, in a notebook's
place. What differs: the import, the broker, the device, and how many lines and epochs there are.
"""

import itertools
import json
import random
import sys
import time

import torch
from torch import nn

from manyhands.compat import deepbooster

number, url = int(sys.argv[1]), sys.argv[2]


class Sleeper(nn.Module):
    def __init__(self):
        super().__init__()
        widths = (10, 1000, 1000, 1000, 1)
        pairs = itertools.pairwise(widths)
        layers = [layer for a, b in pairs for layer in (nn.Linear(a, b), nn.Tanh())]
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        time.sleep(10)
        return self.layers(x)


path = "."
with open(f"{path}/chunk{number}.jsonl", "w") as f:
    for _ in range(1):
        rows = torch.rand((1000, 10)).tolist()
        f.write(json.dumps({"input": rows, "label": random.randint(0, 4)}) + "\n")

model = Sleeper()

trainer_params = {
    "model": model,
    "criterion": nn.MSELoss(),
    "optimizer": torch.optim.Adam(model.parameters(), lr=0.01),
    "device": torch.device("cpu"),
    "n_epoch": 1,
    "ignition_queue": f"start_{number}",
    "my_queue": f"test{number}",
    "trainers_queues": ["test1", "test2"],
    "url_parameters": url,
    "chunk_path": f"./chunk{number}.jsonl",
    "transformer": torch.Tensor,
    "apply_transformer_to_label": True,
}

trainer = deepbooster.Trainer(**trainer_params)

trainer.start()

print(json.dumps([float(p.detach().double().sum()) for p in model.parameters()]))
