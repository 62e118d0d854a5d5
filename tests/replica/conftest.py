"""What the tests of replicas have in common: torch as they want it, processes, meeting points."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module

import pytest
import torch

from manyhands.links.hub import Hub
from tests.replica.hands import new_zygote
from tests.replica.training import alone


@pytest.fixture(autouse=True, scope="session")
def _torch(tmp_path_factory):
    """One thread; and what optimizers load of the compiler has its folder where it may stay."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        with suppress(ImportError):  # torch shows its tracing with it; its thread would stay
            patch.setattr(import_module("tqdm").tqdm, "monitor_interval", 0)
        alone(1)  # the first step loads half of torch
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package")
def zygote(_torch):
    made = new_zygote()
    yield made
    made.close()


@pytest.fixture(scope="package")
def hub():
    with Hub("127.0.0.1:0", insecure=True) as made:
        yield made


@pytest.fixture(params=("hub", "amqp"), scope="module")
def url(request):
    if request.param == "amqp":
        return request.getfixturevalue("broker").url()
    return f"{request.getfixturevalue('hub').address}?insecure=1"
