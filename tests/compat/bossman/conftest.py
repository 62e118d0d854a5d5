"""A process that has loaded torch, and workers that are forked from it."""

import multiprocessing
from multiprocessing import forkserver

import pytest
import torch

from tests.compat.bossman.hands import Hands, single_thread


@pytest.fixture(scope="session")
def context():
    """Starts before the leak check of the first test that uses it looks at processes."""
    if torch.cuda.is_available():  # what has used a GPU must not be forked
        yield multiprocessing.get_context("spawn")
        return
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["tests.compat.bossman.hands"])
    loaded = made.Process()  # does nothing, and is there once torch is
    loaded.start()
    loaded.join()
    loaded.close()
    yield made
    forkserver._forkserver._stop()


@pytest.fixture(autouse=True, scope="session")
def _torch(tmp_path_factory):
    """What optimizers load of the compiler has its folder where it may stay."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        if torch.cuda.is_available():
            torch.cuda.init()  # opens files that stay
        parameter = torch.nn.Parameter(torch.zeros(1))
        torch.optim.SGD([parameter], lr=0.1).step()  # the first step loads half of torch
        yield


@pytest.fixture
def hands(context, tmp_path, monkeypatch):
    for name in ("MODEL_HOST", "MODEL_PORT", "MODEL_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with single_thread(), Hands(context, tmp_path) as made:
        monkeypatch.setenv("MODEL_PORT", str(made.port))
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
        yield made
