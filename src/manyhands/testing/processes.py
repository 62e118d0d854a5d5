"""Process trees: what a process started, and how to end all of it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import subprocess

__all__ = ["end_all", "end_tree", "is_gone", "tree_of"]

KILL_PATIENCE_S = 10.0


def tree_of(pid: int) -> list[psutil.Process]:
    """The process and all its descendants; empty when it is gone."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def is_gone(process: psutil.Process) -> bool:
    """Whether it has ended; a zombie has, whoever is to reap it."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def end_tree(process: subprocess.Popen[bytes], *, patience_s: float) -> None:
    """Ends a child and all its descendants, and reaps it.

    It is asked (SIGTERM) and after `patience_s` made (SIGKILL); with no patience it is not asked.
    """
    # Once it has been waited for, its id may be another process's.
    if process.poll() is not None:
        return
    # Before the signal: once their parent is gone, descendants cannot be found any more.
    family = tree_of(process.pid)
    if patience_s > 0:
        process.terminate()
        _wait(family, patience_s)
    end_all(family)
    process.wait()


def end_all(processes: list[psutil.Process]) -> None:
    """Makes them end (SIGKILL), children or not, and waits for it; reaps none."""
    for process in processes:
        try:
            process.kill()  # psutil checks that the id was not given to another process
        except psutil.NoSuchProcess:
            continue
    _wait(processes, KILL_PATIENCE_S)


def _wait(family: list[psutil.Process], patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while not all(is_gone(member) for member in family) and time.monotonic() < deadline:
        time.sleep(0.02)
