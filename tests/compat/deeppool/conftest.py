"""Torch as these tests want it, and a few real digits as a folder of pictures."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module

import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits


@pytest.fixture(scope="session", autouse=True)
def _torch(tmp_path_factory):
    """One thread; and what optimizers load of the compiler has its folder where it may stay."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        with suppress(ImportError):  # torch shows its tracing with it; its thread would stay
            patch.setattr(import_module("tqdm").tqdm, "monitor_interval", 0)
        parameter = torch.nn.Parameter(torch.zeros(1))
        torch.optim.SGD([parameter], lr=0.1).step()  # the first step loads half of torch
        with torch.device("meta"):
            torch.nn.init.normal_(torch.nn.Linear(1, 1).weight)  # and so does this
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def few_digits(tmp_path_factory):
    """72 of them, of three kinds: in `train` 48, in `test` 24."""
    return digits(tmp_path_factory.mktemp("digits"), 16)


@pytest.fixture(scope="session")
def digits_for_128(tmp_path_factory):
    """264 in `train`, two global batches of 128, and 24 in `test`."""
    return digits(tmp_path_factory.mktemp("digits"), 88)


def digits(folder, train):
    """So many of each of three kinds in `train`, and eight in `test`."""
    found = load_digits()
    for digit in (0, 1, 2):
        images = found.images[found.target == digit][: train + 8]
        for number, values in enumerate(images):
            place = folder / ("train" if number < train else "test") / str(digit) / f"{number}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            grey = bytes(int(value) * 255 // 16 for value in values.ravel())
            Image.frombytes("L", (8, 8), grey).save(place)
    return folder
