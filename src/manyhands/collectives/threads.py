"""Threads that calculate beside the user's: with one core, so that the rest stays the user's."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

_STARTING = threading.Lock()  # torch's number is the process's, and so is this


def start_thread(act: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon thread in which torch uses one core; elsewhere that does not change.

    torch keeps the number of cores for each thread, and one for threads that are yet to come.
    Setting it changes both, so the latter is put back from here; by one at a time, or another
    would find the one core and put that back.
    """
    begun = threading.Event()

    def run() -> None:
        torch.set_num_threads(1)
        begun.set()
        act()

    thread = threading.Thread(target=run, name=name, daemon=True)
    with _STARTING:
        number = torch.get_num_threads()
        thread.start()
        begun.wait()
        torch.set_num_threads(number)
    return thread
