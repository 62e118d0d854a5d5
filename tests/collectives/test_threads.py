"""Threads that calculate with one core leave everybody else's number as it was."""

import threading

import pytest
import torch

from manyhands.collectives.threads import start_thread


@pytest.fixture
def three_cores():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_cores")
def test_many_at_once():
    """Each caller keeps its number, new threads get the old one, and started ones have one core."""
    at_once = threading.Barrier(8)
    kept, given = [], []

    def start() -> None:
        at_once.wait()
        start_thread(lambda: given.append(torch.get_num_threads()), "calculates").join()
        kept.append(torch.get_num_threads())

    for _ in range(30):
        callers = [threading.Thread(target=start) for _ in range(8)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        after = threading.Thread(target=lambda: kept.append(torch.get_num_threads()))
        after.start()
        after.join()
    assert set(given) == {1}
    assert set(kept) == {3}
