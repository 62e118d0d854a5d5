"""The sample of DeepBooster's README, literally: as it stands there, but for what is listed here.

Its text is not ours to keep: it is read from where this project's sources lie (`../shared`, or the
folder that SHARED names). Without them nothing is tested; `test_sample.py` always is.
"""

from __future__ import annotations

import json
import os
import random
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from manyhands.compat import deepbooster
from manyhands.core.address import parse_address
from manyhands.links.amqp import login_of
from manyhands.links.amqp.queues import post, set_up

ROOT = Path(__file__).parents[3]
SEEDS = Path(os.environ.get("SHARED", ROOT.parent / "shared")) / "seeds"
PATIENCE_S = 200.0  # for programs of which each loads torch, where others work too
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FEW = 1  # epochs and lines: the net sleeps ten seconds in each forward

# In a notebook's place. Each instance draws from a seed of its own: one process can redo it.
DRIVER = """
import random, runpy, sys
import torch
number = int(sys.argv[1])
torch.manual_seed(number)
random.seed(number)
made = runpy.run_path("sample.py")
torch.save(made["model"].state_dict(), "weights.pt")
"""


def readme_sample() -> str:
    """The block of code that begins by fetching the package and ends by starting it."""
    for file in sorted(SEEDS.glob("000_*")):
        for block in BLOCK.findall(file.read_text()):
            if "deepbooster.Trainer(" in block:
                return block
    pytest.skip(f"no sample of DeepBooster's README in {SEEDS}: NOT TESTED (SHARED=FOLDER)")


def changed(text: str, url: str, number: int) -> str:
    """For one instance. All that is changed is here, and each of it is there just once."""
    changes = [
        # A notebook's lines that install the two packages.
        (r"^! git clone .*/amqp-interface\.git;.*\n", ""),
        (r"^! git clone .*/deepbooster\.git;.*\n", ""),
        (r"^import deepbooster$", "from manyhands.compat import deepbooster"),
        (r"(?<=')amqp://[^']+(?=')", url),
        (r"torch\.device\('cuda'\)", "torch.device('cpu')"),
        (r"(?<='n_epoch': )\d+", str(FEW)),
        (r"(?<=in range\()int\(\d\)(?=\):)", str(FEW)),
    ]
    if number != 1:  # "make sure you specify different my_queue and ignition_queue"
        changes += [
            (r"(?<='my_queue': ')test1(?=')", f"test{number}"),
            (r"(?<='ignition_queue': ')start_1(?=')", f"start_{number}"),
        ]
    for pattern, other in changes:
        found = re.findall(pattern, text, re.MULTILINE)
        assert len(found) == 1, f"{pattern} is there {len(found)} times, not once"
        text = re.sub(pattern, lambda _, other=other: other, text, flags=re.MULTILINE)
    return text


def one_process(folders: list[Path], monkeypatch) -> torch.nn.Module:
    """What they must come to: the mean gradient of their first lines, from the first's weights."""
    made = []
    monkeypatch.setattr(deepbooster, "Trainer", Mock())
    for number, folder in enumerate(folders, start=1):
        torch.manual_seed(number)
        random.seed(number)
        monkeypatch.chdir(folder)
        made.append(runpy.run_path("sample.py"))
    model, params = made[0]["model"], made[0]["trainer_params"]
    assert params["trainers_queues"] == ["test1", "test2"]
    for folder in folders:
        (line,) = map(json.loads, (folder / "chunk1.jsonl").read_text().splitlines())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one label for a thousand rows
            out = model.layers(torch.tensor(line["input"]))  # without the sleep
            loss = params["criterion"](out, torch.tensor(float(line["label"])))
        (loss / len(folders)).backward()
    params["optimizer"].step()
    return model


def test_the_readmes_sample_literally(broker, tmp_path, monkeypatch):
    text = readme_sample()
    url = broker.url().removesuffix("/%2F")  # as there: no vhost
    login = login_of(parse_address(url))
    env = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    folders = [tmp_path / "1", tmp_path / "2"]  # each notebook has a disk of its own
    programs = []
    for number, folder in enumerate(folders, start=1):
        folder.mkdir()
        (folder / "sample.py").write_text(changed(text, url, number))
        command = [sys.executable, "-c", DRIVER, str(number)]
        with (folder / "log").open("w") as log:
            programs.append(subprocess.Popen(command, cwd=folder, env=env, stderr=log))
    try:
        set_up(login, ["start_1", "start_2"])
        post(login, {"start_1": b"any message", "start_2": b""})
        ends = [program.wait(PATIENCE_S) for program in programs]
    finally:
        for program in programs:
            program.kill()
            program.wait()
    assert ends == [0, 0], [(folder / "log").read_text() for folder in folders]
    first, second = (torch.load(folder / "weights.pt") for folder in folders)
    expected = one_process(folders, monkeypatch).state_dict()
    assert first.keys() == second.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(first[name], second[name]), name
        # Adam's first step is 0.01 wherever there is a gradient.
        torch.testing.assert_close(first[name], value, rtol=0, atol=1e-4, msg=name)
