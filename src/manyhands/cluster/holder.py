"""The holder of a lock file: a process of this machine that need be no child of ours."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import threading
from pathlib import Path
from typing import Self

LOCK = "lock"
"""In the state folder of an agent, which holds it while it works there."""


class Holder:
    """The process that holds a lock file and wrote its number there: an agent that of its state
    folder, `manyhands up` that of its store. It need be no child; its exit code is not known.
    """

    def __init__(self, pid: int, fd: int) -> None:
        self.pid, self._fd = pid, fd
        self._lock = threading.Lock()
        self._is_closed = False

    @classmethod
    def of(cls, lock: Path) -> Self | None:
        """None if nobody holds it, or it cannot be told who, or this system has no such thing."""
        pid = _holding(lock)
        if pid is None:
            return None
        try:
            fd = os.pidfd_open(pid)
        except (OSError, AttributeError):
            return None
        # It may have gone, and its number to another, before there was a descriptor of it.
        if _holding(lock) != pid:
            os.close(fd)
            return None
        return cls(pid, fd)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Blocks until it has ended, or time is up; whether it has. By one thread."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else 1000 * timeout_s))

    def send(self, number: int) -> None:
        """A signal, if it is still there."""
        with self._lock, contextlib.suppress(ProcessLookupError):
            if not self._is_closed:
                signal.pidfd_send_signal(self._fd, number)

    def close(self) -> None:
        """Idempotent. Not while somebody waits."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._fd)


def _holding(lock: Path) -> int | None:
    try:
        fd = os.open(lock, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        said = os.pread(fd, 32, 0).strip()
        return int(said) if said.isdigit() else None
    except OSError:  # a disk without locks
        return None
    finally:
        os.close(fd)
    return None
