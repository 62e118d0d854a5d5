"""A guardian: what a benchmark has started ends with it, however it ends.

    with guarded():
        ...

    python benchmarks/guardian.py FOLDER     what `guarded` starts; waits for the end of its input

The guardian is a process that holds one end of a pipe. The system closes the other end when the
benchmark is gone, by SIGKILL too, which no code of the benchmark's own could answer. It knows whom
to end by a folder that only the processes of this block have as TMPDIR: children whose parent is
gone, and RabbitMQ's, which has a session of its own, are found as well.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import psutil

from manyhands.testing.processes import end_all

PATIENCE_S = 20.0
ENDING = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def guarded():
    """Programs that the block starts are gone after it, and all temporary files. Main thread only.

    SIGINT and SIGTERM end the block by SystemExit(128 + number), and from then on are ignored:
    a clean-up that is interrupted would be none. After SIGKILL, or any other signal that ends this
    process at once, all is gone soon after it instead of before.
    """
    folder = tempfile.mkdtemp(prefix="bench-")
    guardian = subprocess.Popen(
        [sys.executable, __file__, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,  # who reads ours to the end does not wait for the guardian
        start_new_session=True,  # Ctrl-C and `timeout` signal a whole group
    )
    before = {number: signal.signal(number, _end) for number in ENDING}
    os.environ["TMPDIR"], tempfile.tempdir = folder, folder
    try:
        yield
    finally:
        guardian.stdin.close()
        code = guardian.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
    if code:
        raise RuntimeError(f"the guardian ended with {code}: processes or files may be left")


def _end(number: int, frame: object) -> None:
    for each in ENDING:
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


def processes_of(folder: str) -> list[psutil.Process]:
    """Those that were started with it as TMPDIR, and their forks."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == folder:
                found.append(process)
        except psutil.Error:
            continue  # it ended just now, or is another user's and so not ours
    return found


def main(folder: str) -> None:
    sys.stdin.buffer.read()
    deadline = time.monotonic() + PATIENCE_S
    while found := processes_of(folder):  # again: one of them may have started another meanwhile
        if time.monotonic() > deadline:
            sys.exit(f"the benchmark is over, and these do not end: {found}")
        end_all(found)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main(sys.argv[1])
