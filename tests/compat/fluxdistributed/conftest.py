"""A folder for what torch makes, and ImageNet's layout with real digits in it."""

from __future__ import annotations

import pytest
import torch

from tests.compat.fluxdistributed.imagenet import write_imagenet


@pytest.fixture(scope="session", autouse=True)
def _torch_folder(tmp_path_factory):
    """What optimizers load of the compiler has its folder where it may stay."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        parameter = torch.nn.Parameter(torch.zeros(1))
        torch.optim.SGD([parameter], lr=0.1).step()  # the first step loads half of torch
        yield


@pytest.fixture(scope="session")
def imagenet(tmp_path_factory):
    """ImageNet's layout, and in it ten classes of real digits: 40 of each, and 10 to evaluate."""
    folder = tmp_path_factory.mktemp("imagenet")
    write_imagenet(folder, train=40, val=10)
    return folder
