"""The README's example, as docs/fluxdistributed.md has it, on real digits in ImageNet's layout."""

import re
import sys
import types
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from tests.compat.fluxdistributed.models import same

ROOT = Path(__file__).parents[3]


class Block(nn.Module):
    def __init__(self, inside, outside, stride):
        super().__init__()
        self.one = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.two = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outside) for _ in range(2))
        self.skip = nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x):
        y = F.relu(self.norms[0](self.one(x)))
        return F.relu(self.norms[1](self.two(y)) + self.skip(x))


def small_resnet():
    torch.manual_seed(0)
    shrink = nn.AvgPool2d(28)  # digits have few details
    return nn.Sequential(
        shrink, Block(3, 16, 1), Block(16, 32, 2), nn.Flatten(), nn.Linear(32 * 4 * 4, 10)
    )


def test_the_example_trains_a_small_resnet(imagenet, tmp_path, monkeypatch, capsys):
    text = (ROOT / "docs" / "fluxdistributed.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, flags=re.S)[1]
    for shown, here in {
        "range(1000)": "range(10)",
        "None,  # all GPUs": '["cpu", "cpu"],  # all GPUs',
        "96,  # rows": "10,  # rows",
    }.items():
        assert code.count(shown) == 1, shown
        code = code.replace(shown, here)
    file = tmp_path / "Data.toml"
    file.write_text(
        f"""data_config_version = 1

[[datasets]]
name = "imagenet"
uuid = "c7b2f4de-9f1f-4c9c-8c57-1f6a3a5d2b10"

    [datasets.storage]
    driver = "FileSystem"
    type = "BlobTree"
    path = "{imagenet}"
"""
    )
    monkeypatch.setenv("MANYHANDS_DATA_PATH", str(file))
    models = types.SimpleNamespace(resnet34=small_resnet)
    monkeypatch.setitem(sys.modules, "torchvision", types.SimpleNamespace(models=models))
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    names = {}
    exec(compile(code, "docs/fluxdistributed.md", "exec"), names)
    result = names["result"]
    assert result.steps == 2 * 20  # 400 digits, 2 devices of 10
    first, last = result.history[0], result.history[-1]
    assert last["val/top1"] > 0.5  # of unseen digits; by chance it is a tenth
    assert last["val/top5"] > last["val/top1"]
    assert last["val/top10"] == 1.0
    assert last["val/loss"] < first["train/loss"]
    (_, one), (_, two) = result.models
    assert same(one, two)
    assert same(names["model"], small_resnet())  # replicas are copies
    assert "step 40  train/loss" in capsys.readouterr().out
