"""A process that has loaded torch, and crews that are forked from it."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver

import pytest

from tests.compat.deepbooster.crew import Crew


@pytest.fixture(scope="session")
def context():
    """Starts before the leak check of the first test that uses it looks at processes."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["tests.compat.deepbooster.program"])
    loaded = made.Process()  # does nothing, and is there once torch is
    loaded.start()
    loaded.join()
    loaded.close()
    yield made
    forkserver._forkserver._stop()


@pytest.fixture
def new_crew(context, broker, tmp_path):
    return lambda num: Crew(context, broker, tmp_path, num)
