"""What is left of worker processes when their parent is killed: nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from manyhands.testing.processes import end_all, is_gone

ROOT = Path(__file__).parents[2]
SHARED = Path("/dev/shm")
PATIENCE_S = 60.0

PROGRAM = """
import sys
import torch
import torch.multiprocessing
from manyhands.data import Loader
from tests.data import samples

if __name__ == "__main__":
    strategy, said = sys.argv[1:]
    torch.multiprocessing.set_sharing_strategy(strategy)
    table = samples.Stuck(39, said)
    loader = Loader(table, 8, shuffle=False, workers=2, kind="process")
    for numbers, images in loader:
        print(len(images), flush=True)
"""


class Parent:
    """A process with a loader, and all that it has started."""

    def __init__(self, folder: Path, strategy: str) -> None:
        self.tmp, self.said = folder / "tmp", folder / "said"
        self.tmp.mkdir()
        script = folder / "program.py"
        script.write_text(PROGRAM)
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            [sys.executable, script, strategy, self.said],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(self.tmp)},
        )
        self.family: set[psutil.Process] = set()

    def until(self, wanted, what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not wanted():
            assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s: {what}"
            assert self.process.poll() is None, "it ended by itself"
            self.look()
            time.sleep(0.01)
        self.look()

    def look(self) -> None:
        self.family |= set(psutil.Process(self.process.pid).children(recursive=True))
        for process in psutil.process_iter():  # torch's manager of shared memory has left home
            try:
                if process.environ().get("TMPDIR") == str(self.tmp):
                    self.family.add(process)
            except psutil.Error:
                continue

    def shared(self) -> set[Path]:
        """What has a name in shared memory, and is of one of them."""
        pids = {str(process.pid) for process in self.family}
        named = {p for p in SHARED.iterdir() if pids & set(p.name.split("_"))}
        for process in self.family:
            try:
                named |= {Path(m.path) for m in process.memory_maps() if str(SHARED) in m.path}
            except psutil.Error:
                continue
        return {path for path in named if path.exists()}

    def close(self) -> None:
        self.look() if self.process.poll() is None else None
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        end_all([process for process in self.family if not is_gone(process)])


@pytest.fixture
def parent(request, tmp_path_factory):
    # A short name: torch has a socket in it, whose path may have 107 characters.
    made = Parent(tmp_path_factory.mktemp("p"), request.param)
    yield made
    made.close()


@pytest.mark.parametrize("parent", ["file_descriptor", "file_system"], indirect=True)
def test_a_parent_that_is_killed_while_its_workers_read(parent):
    """One of them will never be done with its sample. Whatever torch shares memory by."""
    readers = lambda: sum("spawn_main" in " ".join(commands(p)) for p in parent.family)  # noqa: E731
    parent.until(lambda: readers() == 2, "two workers")
    parent.until(parent.said.exists, "one that is stuck")
    assert parent.process.stdout.readline() == b"8\n"
    had = parent.shared()
    os.kill(parent.process.pid, signal.SIGKILL)
    parent.process.wait()
    deadline = time.monotonic() + PATIENCE_S
    while left := [
        *(process for process in parent.family if not is_gone(process)),
        *(path for path in had if path.exists()),
        *parent.shared(),
        *parent.tmp.iterdir(),
    ]:
        assert time.monotonic() < deadline, f"left: {left}"
        time.sleep(0.01)


def commands(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
