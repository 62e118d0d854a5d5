"""Crew: processes that run the functions of `programs` together, under a test's eyes.

Every wait is bounded. A process that fails shows its rank and traceback; one that hangs shows the
stacks of all its threads, and is killed.
"""

from __future__ import annotations

import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path

ROOT = Path(__file__).parents[3]
PATIENCE_S = 45.0
LOADING_S = 120.0  # for torch with all its CUDA libraries, from a cold disk


class Zygote:
    """Starts workers quickly; one for the whole session."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.collectives.backend.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            # PowerSGD's hook synchronises CUDA even for tensors on the CPU, and fails there.
            env=os.environ
            | {"OMP_NUM_THREADS": "1", "MKL_CBWR": "COMPATIBLE", "CUDA_VISIBLE_DEVICES": ""},
        )
        self._started: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._status: dict[int, int] = {}
        self._reader = threading.Thread(target=self._read, name="zygote", daemon=True)
        self._reader.start()
        assert self._started.get(timeout=LOADING_S) is None

    def start(self, orders: dict) -> int:
        """A new worker's process id."""
        self._process.stdin.write(json.dumps(orders).encode() + b"\n")
        self._process.stdin.flush()
        pid = self._started.get(timeout=PATIENCE_S)
        assert pid is not None
        return pid

    def status(self, pid: int, timeout_s: float) -> int | None:
        """How it has ended (-9: by signal 9); None if it has not."""
        with self._changed:
            self._changed.wait_for(lambda: pid in self._status, timeout_s)
            return self._status.get(pid)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)
        self._reader.join()
        self._process.stdout.close()

    def _read(self) -> None:
        for line in self._process.stdout:
            said = json.loads(line)
            if "status" in said:
                with self._changed:
                    self._status[said["pid"]] = said["status"]
                    self._changed.notify_all()
            else:
                with self._changed:
                    # Numbers come round again in a long session: this one is of a new process.
                    self._status.pop(said.get("pid"), None)
                self._started.put(said.get("pid"))


@dataclass
class Answer:
    """What one process made of a call: a value, or a traceback."""

    ok: bool
    value: object


class Crew:
    """`world` processes; each is in the group once `join` has returned."""

    def __init__(self, zygote: Zygote, world: int, *, env: dict[str, str] | None = None) -> None:
        self.world, self._zygote = world, zygote
        self._folder = tempfile.TemporaryDirectory(prefix="crew-")
        self.folder = Path(self._folder.name)
        self.pids: list[int] = []
        self._lines: dict[int, Connection] = {}
        self._dead: set[int] = set()
        self.broken = False
        """Whether a call has failed: what its processes do now, nobody knows."""
        try:
            with Listener(str(self.folder / "socket"), backlog=world) as listener:
                for rank in range(world):
                    self.pids.append(
                        zygote.start(
                            {
                                "rank": rank,
                                "socket": str(self.folder / "socket"),
                                "log": str(self.log(rank)),
                                "env": env or {},
                            }
                        )
                    )
                for _ in range(world):
                    line = listener.accept()
                    self._lines[pickle.loads(line.recv_bytes())] = line
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.close(checked=kind is None and not self.broken)

    def log(self, rank: int) -> Path:
        """What that process has written to stdout and stderr."""
        return self.folder / f"rank-{rank}.log"

    def join(self, url: str, **options) -> Crew:
        """Everybody enters the process group."""
        self.call("life", "join", url=url, world=self.world, **options)
        return self

    def begin(self, module: str, function: str, *args, ranks=None, **kwargs) -> None:
        """Have these ranks (all) call `programs.MODULE.FUNCTION`, without waiting for it.

        A module with a dot in its name is one of another folder's.
        """
        for rank in self._alive() if ranks is None else ranks:
            self._lines[rank].send_bytes(pickle.dumps((module, function, args, kwargs)))

    def finish(self, *, ranks=None, timeout_s: float = PATIENCE_S) -> dict[int, Answer]:
        """The answers of these ranks (all that live) to what they were begun on."""
        deadline = time.monotonic() + timeout_s
        answers: dict[int, Answer] = {}
        waiting = {self._lines[r]: r for r in (self._alive() if ranks is None else ranks)}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                said = [f"--- rank {r}:\n{a.value}" for r, a in answers.items() if not a.ok]
                said.append(self._stuck(sorted(waiting.values()), timeout_s))
                raise AssertionError("\n".join(said))
            for line in ready:
                rank = waiting.pop(line)
                try:
                    answers[rank] = Answer(*pickle.loads(line.recv_bytes()))
                except (EOFError, ConnectionError):
                    status = self._zygote.status(self.pids[rank], PATIENCE_S)
                    self._dead.add(rank)
                    said = f"process ended with {status}\n{self._log_of(rank)}"
                    answers[rank] = Answer(False, said)
        return answers

    def call(self, module: str, function: str, *args, ranks=None, **kwargs) -> dict[int, object]:
        """begin, and finish: all must succeed. Returns what each rank returned."""
        patience_s = kwargs.pop("patience_s", PATIENCE_S)
        try:
            self.begin(module, function, *args, ranks=ranks, **kwargs)
            answers = self.finish(ranks=ranks, timeout_s=patience_s)
        except (AssertionError, OSError):
            self.broken = True
            raise
        failed = {rank: answer.value for rank, answer in answers.items() if not answer.ok}
        if failed:
            self.broken = True
            raise AssertionError(
                "\n".join(f"--- rank {r} of {self.world}:\n{text}" for r, text in failed.items())
            )
        return {rank: answers[rank].value for rank in sorted(answers)}

    def kill(self, rank: int) -> None:
        """As kill -9 does; returns when the process has ended."""
        self._dead.add(rank)
        os.kill(self.pids[rank], signal.SIGKILL)
        status = self._zygote.status(self.pids[rank], PATIENCE_S)
        assert status == -signal.SIGKILL, f"it ended with {status}: {self.report()}"

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.pids[rank], number)

    def ended(self, rank: int, timeout_s: float = PATIENCE_S) -> int:
        """Wait for the end of a process that was told to end; its exit status."""
        status = self._zygote.status(self.pids[rank], timeout_s)
        assert status is not None, self._stuck([rank], timeout_s)
        self._dead.add(rank)
        return status

    def report(self) -> str:
        """What all of them have written, and said last."""
        logs = [f"--- rank {rank}:\n{self._log_of(rank)}" for rank in range(self.world)]
        said = []
        for rank, line in self._lines.items():
            with suppress(EOFError, OSError):
                if line.poll():
                    said.append(f"--- rank {rank} answered: {pickle.loads(line.recv_bytes())}")
        return "\n".join(["", *logs, *said])

    def close(self, *, checked: bool = False) -> None:
        """Have everybody leave and end; `checked`: they must end well, with no thread left."""
        problems: list[str] = []
        try:
            if checked:
                for rank in self._alive():
                    self._lines[rank].send_bytes(pickle.dumps(("life", "leave", (), {})))
                for rank, answer in self.finish().items():
                    if not answer.ok:
                        problems.append(f"rank {rank} leaving:\n{answer.value}")
        finally:
            for line in self._lines.values():
                line.close()
            for rank, pid in enumerate(self.pids):
                status = self._zygote.status(pid, 20.0 if checked else 0.0)
                if status is None:
                    problems.append(f"rank {rank} did not end: {self._log_of(rank)}")
                    self._force(pid)
                elif status != 0 and rank not in self._dead:
                    problems.append(f"rank {rank} ended with {status}:\n{self._log_of(rank)}")
            self._folder.cleanup()
        assert not (checked and problems), "\n".join(problems)

    def _alive(self) -> list[int]:
        return [rank for rank in sorted(self._lines) if rank not in self._dead]

    def _force(self, pid: int) -> None:
        for number in (signal.SIGCONT, signal.SIGKILL):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                break
        self._zygote.status(pid, PATIENCE_S)

    def _stuck(self, ranks: list[int], timeout_s: float) -> str:
        for rank in ranks:
            os.kill(self.pids[rank], signal.SIGCONT)
            os.kill(self.pids[rank], signal.SIGUSR1)
        time.sleep(0.5)  # for the stacks to be written; the test has failed anyway
        said = "\n".join(f"--- rank {rank}:\n{self._log_of(rank)}" for rank in ranks)
        return f"ranks {ranks} have not answered within {timeout_s:g} s\n{said}"

    def _log_of(self, rank: int) -> str:
        try:
            return self.log(rank).read_text()[-8000:]
        except FileNotFoundError:
            return "(no log)"
