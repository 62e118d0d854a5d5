"""The guard: ends the children of a launcher that died without a word (kill -9).

    python guard.py watch GRACE_S          the guard; its stdin is a pipe that the launcher holds
    python guard.py become FD COMMAND...   a child: gives the guard its id, then becomes COMMAND

It is a process of its own because a child that is stopped, or busy outside of Python, or that
has become another program, runs no code of ours. A child announces itself: so none can run
without the guard's knowledge, at whatever moment the launcher dies. This file imports nothing but
the standard library, and is run by its path, with `-I -S`, to start fast.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from subprocess import DEVNULL, Popen
from types import TracebackType
from typing import Self

_POLL_S = 0.05
_PYTHON = (sys.executable, "-I", "-S", os.path.abspath(__file__))


class Guard:
    """The launcher's side. Leaving the block ends whoever is still watched, and waits for it."""

    def __init__(self, grace_s: float) -> None:
        read, self._line = os.pipe()
        try:
            self._process = Popen(
                [*_PYTHON, "watch", str(grace_s)],
                stdin=read,
                stdout=DEVNULL,
                start_new_session=True,  # it must not die by what ends the launcher
            )
        finally:
            os.close(read)
        self._children: dict[int, Popen[bytes]] = {}

    def start(
        self,
        command: list[str],
        *,
        environment: dict[str, str],
        stdin: int | None,
        stdout: int | None,
        stderr: int | None,
    ) -> Popen[bytes]:
        """A watched child, the leader of a session (so of a process group) of its own."""
        child = Popen(
            [*_PYTHON, "become", str(self._line), *command],
            env=environment,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=(self._line,),
            start_new_session=True,
        )
        self._children[child.pid] = child
        return child

    def forget(self, child: Popen[bytes]) -> None:
        """It has ended: its id may soon be another process's."""
        del self._children[child.pid]
        with contextlib.suppress(BrokenPipeError):  # a guard that was killed guards no more
            os.write(self._line, b"-%d\n" % child.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._line)
        for child in self._children.values():
            child.wait()
        self._process.wait()


def watch(grace_s: float) -> None:
    """Learn of children until stdin ends, as it does with the launcher; then end those left.

    They are asked (SIGTERM, and SIGCONT for those that are stopped), and after `grace_s` made.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they were for all of a service, or of a terminal
    left: set[int] = set()
    for line in sys.stdin:
        group = int(line)
        left = left | {group} if group > 0 else left - {-group}
    left = {group for group in left if signal_group(group, signal.SIGTERM)}
    left = {group for group in left if signal_group(group, signal.SIGCONT)}
    deadline = time.monotonic() + grace_s
    while left and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        left = {group for group in left if signal_group(group, 0)}
    for group in left:
        signal_group(group, signal.SIGKILL)


def signal_group(group: int, number: int) -> bool:
    """Whether there was a process in the group to take it."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # macOS says the latter of a zombie
        return False
    return True


def become(line: int, command: list[str]) -> None:
    """Does not return."""
    os.write(line, b"%d\n" % os.getpid())
    os.close(line)
    os.execv(command[0], command)  # noqa: S606


if __name__ == "__main__":
    if sys.argv[1] == "watch":
        watch(float(sys.argv[2]))
    else:
        become(int(sys.argv[2]), sys.argv[3:])
