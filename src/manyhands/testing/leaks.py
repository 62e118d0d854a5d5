"""no_leaks: fails when a block leaves a process, thread, open file, socket or temporary file."""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterator
    from pathlib import Path

PATIENCE_S = 20.0  # for what ends by itself, where others work too; a leak stays however long


@dataclass(frozen=True, kw_only=True, slots=True)
class Belongings:
    """What this process has at one moment; the difference of two of them is a leak."""

    processes: frozenset[psutil.Process]
    threads: frozenset[threading.Thread]
    descriptors: frozenset[tuple[int, str]]
    files: frozenset[Path]


@contextmanager
def no_leaks(
    *,
    tmp: Path | None = None,
    expected: Callable[[], Collection[int]] = tuple,
    patience_s: float = PATIENCE_S,
) -> Generator[None]:
    """Raises AssertionError naming what the block left behind; it is given time to wind down.

    Found are child processes (recursively), threads, open files and sockets. With `tmp`, also
    files left under that folder, and processes that detached themselves but carry it as TMPDIR.
    `expected` gives the ids of processes that may stay, asked at the end. An exception of the
    block passes unchanged. Nothing is garbage collected here: what waits for that is a leak.
    """
    older = frozenset(psutil.pids())  # no leaks: nobody need look at each of them once a test
    before = belongings(tmp, older)
    yield
    deadline = time.monotonic() + patience_s
    while found := leaks(before, belongings(tmp, older), expected()):
        if time.monotonic() > deadline:
            raise AssertionError(
                "left behind:\n  "
                + "\n  ".join(found)
                + "\nexpected: none; close, join or end it where it was made"
            )
        time.sleep(0.02)


def belongings(tmp: Path | None, older: Collection[int] = ()) -> Belongings:
    """What this process has now; detached processes with these ids are left out."""
    return Belongings(
        processes=frozenset(_processes(tmp, older)),
        threads=frozenset(threading.enumerate()),
        descriptors=frozenset(_descriptors()),
        files=frozenset() if tmp is None else frozenset(tmp.rglob("*")),
    )


def leaks(before: Belongings, after: Belongings, expected: Collection[int]) -> list[str]:
    """One line for each thing that is in `after` alone."""
    processes = [p for p in after.processes - before.processes if p.pid not in expected]
    descriptors = sorted(after.descriptors - before.descriptors)
    peers = _connections() if descriptors else {}
    return [
        *(_describe_process(process) for process in processes),
        *(
            f"thread {thread.name!r}{' (daemon)' if thread.daemon else ''}"
            for thread in after.threads - before.threads
        ),
        *(
            f"open descriptor {number} -> {target}{peers.get(number, '')}"
            for number, target in descriptors
        ),
        *(f"file {path}" for path in sorted(after.files - before.files)),
    ]


def _processes(tmp: Path | None, older: Collection[int]) -> Iterator[psutil.Process]:
    yield from psutil.Process().children(recursive=True)
    if tmp is None:
        return
    for pid in psutil.pids():
        if pid in older or pid == os.getpid():
            continue
        try:
            process = psutil.Process(pid)
            if process.environ().get("TMPDIR") == str(tmp):
                yield process
        except psutil.Error:
            continue  # it ended just now, or is another user's and so not ours


def _descriptors() -> Iterator[tuple[int, str]]:
    for name in os.listdir("/proc/self/fd"):
        try:
            yield int(name), os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the one that listdir itself had open


def _connections() -> dict[int, str]:
    described: dict[int, str] = {}
    for connection in psutil.Process().net_connections(kind="all"):
        ends = f"{connection.laddr or ''} -> {connection.raddr or ''}"
        described[connection.fd] = f" ({connection.status} {ends})"
    return described


def _describe_process(process: psutil.Process) -> str:
    try:
        status = process.status()
        # A zombie has no command line any more.
        command = process.name() if status == psutil.STATUS_ZOMBIE else " ".join(process.cmdline())
        return f"process {process.pid} ({status}): {command[:200]}"
    except psutil.Error:
        return f"process {process.pid} (just gone)"
