"""A Ctrl-C ends a training when all of its devices have ended: torch aborts a process otherwise."""

import os
import signal
import threading
import time

import pytest
import torch

from manyhands.compat.fluxdistributed.hands import run_hands


@pytest.fixture
def _interruptible():
    """Whoever runs the tests in the background may have SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_it_waits_for_all_devices():
    over, met = [], threading.Barrier(3)

    def act(rank, carrier):
        met.wait(60)
        try:
            while True:
                carrier.sum(torch.zeros(1), range(2)).wait()
        finally:
            if rank == 0:
                time.sleep(0.3)  # as one that is in the middle of a backward
            over.append(rank)

    def interrupt():
        met.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_hands([torch.device("cpu")] * 2, act)
    assert sorted(over) == [0, 1]
    thread.join()
