"""docs/stages.md is true: its program runs, its pictures and errors are those of the code."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import manyhands as mh
from manyhands.stages.schedule import bubble_of, picture

TEXT = (Path(__file__).parents[2] / "docs/stages.md").read_text()
X = torch.zeros(8, 4)


def test_its_program_runs_and_draws_its_plans(tmp_path):
    program = "\n".join(re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL))
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    drawn = re.findall(r"stage .*?1f1b\n", done.stdout, flags=re.DOTALL)
    assert len(drawn) == 3
    for plan in drawn:
        assert f"```\n{plan}```" in TEXT


@pytest.mark.parametrize(
    "plan",
    [
        mh.Plan.even(6, 3, microbatches=6, schedule="afab"),
        mh.Plan.even(6, 3, microbatches=6),
        mh.Plan.even(6, 3, microbatches=6, stages_per_peer=2),
    ],
)
def test_its_schedules_are_drawn_by_the_code(plan):
    assert f"```\n{picture(plan)}\n```" in TEXT


@pytest.mark.parametrize(
    ("row", "stages_per_peer", "microbatches"),
    [
        ("one microbatch", 1, (1, 1, 1)),
        ("afab, 1f1b", 1, (8, 8, 16)),
        ("interleaved", 2, (8, 8, 16)),
    ],
)
def test_its_table_of_waiting_is_that_of_the_schedules(row, stages_per_peer, microbatches):
    wanted = re.search(rf"^\| {row}.*\| (\S+)% \| (\S+)% \| (\S+)% \|$", TEXT, re.MULTILINE)
    for peers, count, percent in zip((2, 4, 4), microbatches, wanted.groups(), strict=True):
        plan = mh.Plan.even(
            peers * stages_per_peer, peers, stages_per_peer=stages_per_peer, microbatches=count
        )
        assert f"{100 * bubble_of(plan):.1f}" == percent


class Stashing(nn.Module):
    def __init__(self, make=lambda x: x):
        super().__init__()
        self.make = make

    def forward(self, x):
        mh.stash("a", self.make(x))
        return x


class Popping(nn.Module):
    def forward(self, x):
        return x + mh.pop("a").sum()


class Writing(nn.Module):
    def forward(self, x):
        return x.add_(1)


def linear():
    return nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("layers", "extra", "what"),
    [
        ([linear(), Popping()], None, "taken, never given"),
        ([Stashing(), Stashing(), Popping()], None, "given twice"),
        ([Stashing(), linear()], None, "given, never taken"),
        ([linear()], {"m": X}, "an extra input that nobody takes"),
        ([linear(), Stashing(), Writing(), Popping()], None, "written to"),
        ([Stashing(lambda x: [x]), Popping()], None, "no tensor"),
        ([Stashing(lambda x: x.T @ x), Popping()], None, "without rows"),
        ([linear(), nn.Linear(5, 4)], None, "shapes that do not fit"),
    ],
)
def test_its_errors_are_those_of_the_code(layers, extra, what):
    said = re.search(rf"^\| {what}.*? \| `(.*)` \|$", TEXT, re.MULTILINE)[1]
    pipe = mh.Pipeline(
        layers,
        mh.Plan.even(len(layers), 1, names=list("abcd")[: len(layers)]),
        loss_fn=F.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    kind = mh.PlanError if what in ("without rows", "shapes that do not fit") else mh.VariableError
    with pytest.raises(kind) as caught:
        pipe.step(X, X, extra)
    assert caught.value.message == said
