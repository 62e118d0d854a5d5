"""Accelerate and Lightning Fabric train over a group of ours. Not installed: skipped, aloud."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


@pytest.mark.parametrize(
    ("package", "check"), [("accelerate", "accelerate"), ("lightning_fabric", "fabric")]
)
def test_frameworks(new_crew, package, check):
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install -r requirements-dev.lock")
    with new_crew(2) as crew:
        digests = crew.call("frameworks", check)
        assert len(set(digests.values())) == 1
