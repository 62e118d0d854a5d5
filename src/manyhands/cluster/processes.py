"""Processes that nobody keeps: those that an agent before this one left, found by their
environment, and those that killed keepers left, which become children of the agent's.

Where there is no /proc (macOS) none is found: see `keeper` for what ends there by group.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Collection, Mapping

from manyhands.cluster import keeper


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
    except OSError:  # an old kernel, or a sandbox: by its number, and looked at again later
        keeper.signal_each([pid], signal.SIGKILL)
        return not _has(pid, wanted)
    try:
        if not _has(pid, wanted):
            return True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        ended = select.poll()  # not select: the descriptor may be beyond what that takes
        ended.register(fd, select.POLLIN)
        return bool(ended.poll(patience_s * 1000))
    finally:
        os.close(fd)


class Strays:
    """Children of this process that it did not start. Those that it has when this is made are not
    among them: they are somebody else's affair.
    """

    def __init__(self) -> None:
        self._strangers = frozenset(_children())

    def end(self, kept: Collection[int | None]) -> bool:
        """Kill all but `kept`; whether none is left. If not, SIGCHLD will come."""
        while pids := self._find(kept):
            keeper.signal_each(pids, signal.SIGKILL)
            if not [pid for pid in pids if _reap(pid)]:
                return False
        return True

    def end_all(self) -> None:
        """Kill every one, and wait for it; but for those that are another user's (sudo)."""
        while pids := [pid for pid in self._find(()) if _may_kill(pid)]:
            for pid in pids:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)

    def _find(self, kept: Collection[int | None]) -> list[int]:
        return [pid for pid in _children() if pid not in kept and pid not in self._strangers]


def _children() -> list[int]:
    return [pid for pid, parent in keeper.parents().items() if parent == os.getpid()]


def _may_kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except PermissionError:
        return False
    except ProcessLookupError:
        pass
    return True


def _reap(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True
