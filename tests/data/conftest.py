"""What the tests of data have in common: a cache folder of their own, and small real images."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """Where a user's cache would be."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder
