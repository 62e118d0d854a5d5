"""A peer in a process of its own, that a test can kill, stop and continue.

`python -m manyhands.testing.peer` reads commands from stdin and answers each on stdout, as one
JSON object a line: {"do": "open", "url": ..., "run": ..., "name": ..., "terms": {...}}, then
"ready", "leaving", "gone", "resign", "send", "receive", "until_error", "sleep", "lease", "flush",
"close". An answer has "error" (the name of the exception) and "message" when the command failed.
Commands run in one thread, the peer's user thread; the link's own threads go on beside it.
"""

from __future__ import annotations

import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import zlib
from typing import TYPE_CHECKING, Any, Self

import msgspec

from manyhands.core.errors import ManyhandsError
from manyhands.core.peers import PeerId, View, ViewNumber
from manyhands.links.base import Delivery, Event, Link, LinkSettings, open_link
from manyhands.links.messages import Gone, Leaving, Ready, Resign, Terms
from manyhands.testing.faulty import Kill, open_faulty
from manyhands.testing.processes import end_tree

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

__all__ = ["PeerProcess", "main"]

PATIENCE_S = 30.0
_SAMPLE_S = 0.02
Json = dict[str, Any]


class PeerProcess:
    """Drives one such process. `open` has it join a run."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "manyhands.testing.peer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._answers: queue.SimpleQueue[Json | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="peer process", daemon=True)
        self._reader.start()
        self.me = PeerId("?", 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def open(
        self, url: str, *, run: str, name: str, terms: Terms, kill_at: int | None = None
    ) -> Self:
        """Join a run; returns when the peer is in a view. It dies at its `kill_at`-th message."""
        given = msgspec.to_builtins(terms)
        answer = self.do("open", url=url, run=run, name=name, terms=given, kill_at=kill_at)
        self.me = PeerId(name, answer["incarnation"])
        return self

    def do(self, command: str, *, patience_s: float = PATIENCE_S, **arguments: object) -> Json:
        """Run a command and return its answer. Raises AssertionError when the peer cannot."""
        self.begin(command, **arguments)
        answer = self.answer(patience_s)
        assert "error" not in answer, f"{command}: {answer}"
        return answer

    def begin(self, command: str, **arguments: object) -> None:
        """Give a command without waiting for its answer; a stopped process finds it later."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": command, **arguments}).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self, patience_s: float = PATIENCE_S) -> Json:
        """The answer to the oldest command that has not been answered."""
        answer = self._answers.get(timeout=patience_s)
        assert answer is not None, f"peer process {self.pid} has ended"
        return answer

    def kill(self) -> None:
        """End it as kill -9 does."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Suspend the process with all its threads; returns when it stands still."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        """Resume a stopped process."""
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """End the process, whatever state it is in. Idempotent."""
        end_tree(self._process, patience_s=0)
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue  # a command that was never read

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(json.loads(line))
        self._answers.put(None)


class _Script:
    """What the commands act on, inside the process."""

    def __init__(self) -> None:
        self._link: Link | None = None
        self._last_lease_s = -math.inf
        self._commands: dict[str, Callable[[Json], Json]] = {
            "open": self._open,
            "ready": lambda _: self._tell(Ready()),
            "leaving": lambda _: self._tell(Leaving()),
            "gone": lambda given: self._tell(Gone(ViewNumber(*given["cut"]))),
            "resign": lambda given: self._tell(Resign(given["finished"], "as told")),
            "send": self._send,
            "receive": lambda given: _shown(self.link.receive(given.get("timeout_s", PATIENCE_S))),
            "until_error": self._until_error,
            "sleep": _sleep,
            "lease": self._lease,
            "flush": self._flush,
            "close": self._close,
        }

    @property
    def link(self) -> Link:
        assert self._link is not None, "not open yet"
        return self._link

    def run(self, given: Json) -> Json:
        """One command; the errors of a link are answers."""
        try:
            return self._commands[given["do"]](given)
        except ManyhandsError as error:
            return {"error": type(error).__name__, "message": str(error)}

    def _open(self, given: Json) -> Json:
        settings = LinkSettings(terms=msgspec.convert(given["terms"], Terms))
        url, run, name = given["url"], given["run"], given["name"]
        if given["kill_at"] is not None:
            script = [Kill(given["kill_at"])]
            self._link = open_faulty(url, script, run=run, name=name, settings=settings)
        else:
            self._link = open_link(url, run=run, name=name, settings=settings)
        threading.Thread(target=self._sample, daemon=True).start()
        return {"incarnation": self._link.me.incarnation}

    def _sample(self) -> None:
        while True:
            self._last_lease_s = max(self._last_lease_s, self.link.lease_start_s())
            time.sleep(_SAMPLE_S)

    def _tell(self, word: Ready | Leaving | Gone | Resign) -> Json:
        self.link.tell(word)
        return {}

    def _send(self, given: Json) -> Json:
        to = None if given.get("to") is None else PeerId(*given["to"])
        data = os.urandom(given.get("size", 0))
        message = given.get("message", "").encode() or str(zlib.crc32(data)).encode()
        self.link.send(to, message, [data] if data else [])
        return {"crc": zlib.crc32(data)}

    def _until_error(self, given: Json) -> Json:
        deadline = time.monotonic() + given.get("timeout_s", PATIENCE_S)
        while True:
            self.link.receive(max(0.0, deadline - time.monotonic()))

    def _lease(self, given: Json) -> Json:
        return {"last_start_s": self._last_lease_s, "now_s": time.monotonic()}

    def _flush(self, given: Json) -> Json:
        self.link.flush(given.get("timeout_s", PATIENCE_S))
        return {}

    def _close(self, given: Json) -> Json:
        self.link.close()
        return {}


def _sleep(given: Json) -> Json:
    time.sleep(given["seconds"])
    return {}


def _shown(event: Event) -> Json:
    match event:
        case Delivery():
            data = b"".join(event.buffers)
            return {
                "delivery": event.message.decode(),
                "sender": list(event.sender),
                "sizes": [len(buffer) for buffer in event.buffers],
                "crc": zlib.crc32(data),
            }
        case View():
            return {"view": msgspec.to_builtins(event)}
        case _:
            return {"gap": True}


def main() -> None:
    """Read commands until stdin ends."""
    script = _Script()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(script.run(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
