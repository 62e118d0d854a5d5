"""Peers: the processes of a demo. What they say, when they begin, and their end."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Self, cast

from manyhands.cli.guard import Guard
from manyhands.core.errors import LinkTimeout, ManyhandsError

_WAIT_S = 120.0  # for news of any; importing torch takes most of it on a slow machine
_GRACE_S = 2.0  # for those that are asked to end
News = dict[str, Any] | str | None  # facts; a line for the user; the end


class Peers:
    """Leaving the block ends those that run. If this process is killed, the guard does."""

    def __init__(self) -> None:
        self._news: SimpleQueue[tuple[str, News]] = SimpleQueue()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._readers: list[threading.Thread] = []
        self._killed: set[str] = set()
        self._left = 0
        self._stack = ExitStack()
        self._guard = self._stack.enter_context(Guard(_GRACE_S))

    def start(self, name: str, *arguments: str, environment: Mapping[str, str]) -> None:
        """A Python process; what reads its stdin waits until it may `begin`."""
        process = self._guard.start(
            [sys.executable, *arguments],
            environment=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._processes[name] = process
        self._left += 1
        reader = threading.Thread(target=self._listen, args=(name, process), daemon=True)
        self._readers.append(reader)
        reader.start()

    def begin(self, name: str) -> None:
        """It may."""
        stdin = self._processes[name].stdin
        assert stdin is not None
        stdin.close()

    def kill(self, name: str) -> None:
        """SIGKILL: it has no chance to say good-bye."""
        self._killed.add(name)
        self._processes[name].kill()

    def news(self) -> Iterator[tuple[str, dict[str, Any] | str]]:
        """What they say, and from whom, until all have ended. Raises if one fails, or all fall
        silent.
        """
        while self._left:
            try:
                name, said = self._news.get(timeout=_WAIT_S)
            except Empty:
                raise LinkTimeout("news of the demo's processes", _WAIT_S) from None
            if said is not None:
                yield name, said
                continue
            self._left -= 1
            process = self._processes[name]
            code = process.wait()
            self._guard.forget(process)
            if code and name not in self._killed:
                raise ManyhandsError(f"{name} ended with code {code}; what it said is above")

    def _listen(self, name: str, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._news.put((name, _facts(line) or line.decode(errors="replace").rstrip()))
        self._news.put((name, None))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()
        for reader in self._readers:
            reader.join()
        for process in self._processes.values():
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def _facts(line: bytes) -> dict[str, Any] | None:
    try:
        found: object = json.loads(line)
    except ValueError:
        return None
    return cast("dict[str, Any]", found) if isinstance(found, dict) else None
