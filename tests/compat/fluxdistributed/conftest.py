"""A folder for what torch makes, and ImageNet's layout with real digits in it."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _torch_folder(tmp_path_factory):
    """What torch makes for compiled code, though nothing is compiled, must not be left elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield
