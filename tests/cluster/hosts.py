"""A host of a fake cluster: its agent as a process that tests kill, and all that runs under it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from typing import TYPE_CHECKING, Self

import psutil

from manyhands.cluster.environment import HOST
from manyhands.cluster.messages import Phase
from manyhands.cluster.processes import marked
from manyhands.testing.processes import is_gone
from tests.cluster.offices import PATIENCE_S, FakeOffice, OfficeServer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class TestHost:
    """A context manager: no process of it is left after it, or it raises."""

    __test__ = False

    def __init__(self, folder: Path, *, lease_s: float = 60.0) -> None:
        self.name = f"h{uuid.uuid4().hex[:12]}"
        self.folder, self.state = folder, folder / "state"
        self.office = FakeOffice(lease_s=lease_s)
        self.agents: list[subprocess.Popen[str]] = []
        self._server = OfficeServer(self.office)

    @property
    def agent(self) -> subprocess.Popen[str]:
        return self.agents[-1]

    def start(
        self, *, environment: dict[str, str] | None = None, wait: bool = True, **options: object
    ) -> None:
        """A new agent; returns when it has said Hello and what it holds."""
        said = len(self.office.statuses)
        given = json.dumps({"host": self.name, "state": str(self.state), **options})
        with (self.folder / "agent.log").open("ab") as log:
            self.agents.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.cluster.agent_process", *self._port(), given],
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={**os.environ, **(environment or {})},
                    text=True,
                    start_new_session=True,
                )
            )
        if wait:
            self.office.wait(lambda: len(self.office.statuses) > said, "the agent's first Status")

    def shorten_lease(self, lease_s: float = 1.0) -> None:
        """By a coordinator that grants less; one that a test can wait for. A machine that is busy
        may miss it at once: what has to be there before is, by then.
        """
        said = len(self.office.hellos)
        self.office.lease_s = lease_s
        self.office.restart()
        self.office.wait(lambda: len(self.office.hellos) > said, "another Hello")
        said = len(self.office.statuses)
        # Keepers have been told of the lease when the agent says what it holds.
        self.office.wait(lambda: len(self.office.statuses) > said, "a Status after it")

    def _port(self) -> list[str]:
        return [str(self._server.port)]

    def family(self) -> list[psutil.Process]:
        """Keepers, ranks, and what they started, as far as they carry the mark."""
        found: list[psutil.Process] = []
        for pid in marked({HOST: self.name}):
            try:
                found.append(psutil.Process(pid))
            except psutil.NoSuchProcess:
                continue
        return found

    def keepers(self) -> list[psutil.Process]:
        return [process for process in self.family() if process.ppid() == self.agent.pid]

    def ranks(self) -> list[psutil.Process]:
        """What keepers have started, by age, whatever it is by now."""
        found: list[psutil.Process] = []
        for keeper in self.keepers():
            try:
                found += keeper.children()
            except psutil.NoSuchProcess:
                continue
        return sorted(found, key=lambda one: (one.create_time(), one.pid))

    def said(self, rank: int = 0, job: int = 1, attempt: int = 0) -> list[psutil.Process]:
        """The processes that a rank names after `up`, once it has."""
        self.office.wait_log(b"up ", rank, job, attempt)
        self.office.wait(
            lambda: b"\n" in self.office.logs[job, attempt, rank].partition(b"up ")[2], "a line"
        )
        line = bytes(self.office.logs[job, attempt, rank]).partition(b"up ")[2].splitlines()[0]
        return [psutil.Process(int(word)) for word in line.split()]

    def until(self, question: Callable[[], object]) -> None:
        """For what tells nobody of itself."""
        pause, end_s = threading.Event(), time.monotonic() + PATIENCE_S
        while not question():
            assert time.monotonic() < end_s
            pause.wait(0.02)

    def outlives(self, job: int) -> bool:
        """Whether the agent is there when the job has ended and is forgotten; else it has died."""
        office, begun = self.office, False

        def over() -> bool:
            nonlocal begun
            held = office.holding(job)
            begun = begun or held is not None
            if held is not None and held.phase is Phase.ENDED:
                office.want()
            return begun and held is None

        self.until(lambda: self.agent.poll() is not None or over())
        return self.agent.poll() is None

    def kill_agent(self) -> None:
        self.agent.kill()
        self.agent.wait()

    def words(self) -> str:
        """Waits for the agent's end: what it said on stdout."""
        assert self.agent.stdout is not None
        text = self.agent.stdout.read()
        self.agent.wait()
        return text.strip()

    def __enter__(self) -> Self:
        self._server.__enter__()
        return self

    def __exit__(self, kind, error, trace) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                # Of two kinds: two of one kind may arrive as one.
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCONT):
                    agent.send_signal(number)
                try:
                    agent.wait(PATIENCE_S)
                except subprocess.TimeoutExpired:
                    agent.kill()
                    raise
            agent.stdout.close()
        left = self.family()
        gone(left)
        self._server.__exit__(kind, error, trace)
        if kind is None:
            assert not self.family()


def gone(processes: list[psutil.Process]) -> bool:
    """Waits for them; a zombie is one."""
    for process in processes:
        try:
            fd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            continue
        try:
            if not is_gone(process):  # so the id is still its own
                select.select([fd], [], [], PATIENCE_S)
        finally:
            os.close(fd)
    return all(is_gone(process) for process in processes)
