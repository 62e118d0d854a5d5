"""torch, as all of these tests want it."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _torch(tmp_path_factory):
    """One thread; and what optimizers load of the compiler has its folder where it may stay."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        with suppress(ImportError):  # torch shows its tracing with it; its thread would stay
            patch.setattr(import_module("tqdm").tqdm, "monitor_interval", 0)
        yield
    torch.set_num_threads(before)
