"""Processes and meeting points, as the tests of replicas have them."""

from __future__ import annotations

import pytest

from tests.collectives.rounds_peer import Zygote
from tests.replica.conftest import _torch, hub, url  # noqa: F401
from tests.trainer.hands import PROGRAM


@pytest.fixture(scope="package")
def zygote(_torch):  # noqa: F811
    made = Zygote(PROGRAM, "torch._dynamo")  # that an optimizer loads with its first step
    yield made
    made.close()
