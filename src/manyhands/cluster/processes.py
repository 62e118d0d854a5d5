"""Processes that an agent before this one left: found by their environment, and ended.

Where there is no /proc (macOS) none is found: see `keeper` for what ends there by group.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Mapping


def marked(marks: Mapping[str, str]) -> list[int]:
    """Living processes that were started with all these variables, this one left out."""
    wanted = [os.fsencode(f"{name}={value}") for name, value in marks.items()]
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()] if _has_proc() else []
    return [pid for pid in pids if pid != os.getpid() and _has(pid, wanted)]


def _has_proc() -> bool:
    return os.path.isdir("/proc/self")


def _has(pid: int, wanted: list[bytes]) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:  # gone, or another user's
        return False
    return all(variable in variables for variable in wanted)


def end_marked(marks: Mapping[str, str], patience_s: float) -> list[int]:
    """Kill them all, and those that they start meanwhile; who is left after `patience_s` each.

    By pidfd: an id that was read may be another process's a moment later.
    """
    while pids := marked(marks):
        wanted = [os.fsencode(f"{name}={value}") for name, value in marks.items()]
        left = [pid for pid in pids if not _end(pid, wanted, patience_s)]
        if left:
            return left
    return []


def _end(pid: int, wanted: list[bytes], patience_s: float) -> bool:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        if not _has(pid, wanted):
            return True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        return bool(select.select([fd], [], [], patience_s)[0])  # readable: it has ended
    finally:
        os.close(fd)
