"""Peers of a run as child processes: their output, their ends, and signals passed on to them.

One thread waits for everything at once: output of the children, signals (SIGCHLD among them),
the end of a grace. Children lead sessions of their own, so the terminal's Ctrl-C reaches the
launcher alone, and each of them once, through it. If the launcher itself is killed, `guard` ends
them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FrameType, TracebackType
from typing import IO, NamedTuple, Self

from manyhands.cli.guard import Guard, signal_group
from manyhands.cli.lines import Lines
from manyhands.cli.traces import Traces

GRACE_S = 30.0  # for children that were asked to leave: the round, a checkpoint
_CHUNK_BYTES = 1 << 20  # no pipe holds more, unless root made it
_TAIL_LINES = 10  # of stderr, kept for the summary
_OUT, _ERR = 1, 2
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def launch(
    command: Sequence[str],
    environments: Mapping[str, Mapping[str, str]],
    output: Output,
    signals: Signals,
) -> Outcome:
    """Run the command once for each name, in its environment, until all have ended.

    A child that dies leaves the others alone. SIGINT and SIGTERM are passed on (SIGHUP as
    SIGTERM); a second one, or GRACE_S without an end, kills.
    """
    with Guard(GRACE_S) as guard, Crew(output, signals, guard) as crew:
        for name, environment in environments.items():
            crew.start(name, command, dict(environment), alone=len(environments) == 1)
        ended, stopped_by = crew.wait()
    if stopped_by is not None:
        return Outcome(code=128 + stopped_by, stopped=True)
    _tell_failure(ended, output)
    return Outcome(code=exit_code([end.code for end in ended]), stopped=False)


class Outcome(NamedTuple):
    """The exit code of the whole, and whether a signal made it end."""

    code: int
    stopped: bool


@dataclass(frozen=True, slots=True)
class End:
    """How a child ended. `code` is negative for a signal, as in `subprocess`."""

    name: str
    code: int
    last: tuple[bytes, ...]
    """Lines of its stderr, as far as they passed through here."""

    def __str__(self) -> str:
        if self.code >= 0:
            return f"ended with code {self.code}"
        return f"was ended by {signal_name(-self.code)}"


def exit_code(codes: Sequence[int]) -> int:
    """The exit code for children that ended with these, in this order (negative: a signal).

    A death by signal is what elastic training lives through: it counts only if nobody got to
    the end. A script that fails by itself is a failure: the first one's code.
    """
    failed = [code for code in codes if code > 0]
    return failed[0] if failed else 0 if 0 in codes else 128 - codes[0]


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; numbers without a name (of real-time signals) stay numbers."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _tell_failure(ended: Sequence[End], output: Output) -> None:
    """The last words: who failed first, and how. It may have scrolled away since."""
    failed = [end for end in ended if end.code > 0] or [end for end in ended if end.code]
    if not failed or len(ended) == 1:
        return
    first, done = failed[0], sum(end.code == 0 for end in ended)
    output.say(f"{done} of {len(ended)} got to the end; the first failure: {first.name} {first}")
    if first.last:
        output.say("the last it said on stderr:")
        output.pass_on(_ERR, b"    ", first.last)


class Output:
    """The launcher's stdout and stderr, in whole lines.

    With `events`, stdout has JSON lines alone, and what children write goes to stderr.
    What is written where nobody reads any more is dropped; `lost` says that it came to that.
    """

    def __init__(self, *, events: bool) -> None:
        self.events = events
        self.wait: Callable[[int], bool] = _wait_for_reader
        """A seam: wait for a reader; whether it takes more now. Raises OSError to give it up."""
        self._lost: set[int] = set()
        # One that came closed (`>&-`) would be the number of the next socket, and get the words.
        while (fd := os.open(os.devnull, os.O_RDWR)) <= _ERR:
            pass
        os.close(fd)

    @property
    def lost(self) -> bool:
        """Whether a reader has gone away."""
        return bool(self._lost)

    @property
    def out(self) -> int:
        """Where a child's stdout goes."""
        return _ERR if self.events else _OUT

    def say(self, text: str) -> None:
        """A word of the launcher's own."""
        self.pass_on(_ERR, b"manyhands: ", [os.fsencode(text)])

    def event(self, kind: str, **facts: object) -> None:
        """Something that happened, for programs."""
        if self.events:
            self.pass_on(_OUT, b"", [json.dumps({"event": kind, **facts}).encode()])

    def pass_on(self, fd: int, prefix: bytes, lines: Sequence[bytes]) -> None:
        """Blocks while the reader is slow: so will the children."""
        data = memoryview(b"".join(prefix + line + b"\n" for line in lines))
        while data and fd not in self._lost:
            try:
                if self.wait(fd):
                    data = data[os.write(fd, data[: select.PIPE_BUF]) :]  # a pipe has room for that
            except BlockingIOError:
                pass  # another program has made our terminal non-blocking
            except OSError as error:  # a closed pipe, a terminal that is gone, a full disk
                self._lost.add(fd)
                if fd == _OUT:
                    self.say(f"stdout takes no more: {error.strerror}")


def _wait_for_reader(fd: int) -> bool:
    return bool(select.select([], [fd], [])[1])


class Signals:
    """Signals as bytes to read, rather than interruptions. One at a time, in the main thread.

    A stop that was ignored before (nohup, a shell's background job) stays ignored.
    """

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        for end in (self._read, self._write):
            end.setblocking(False)
        self._fd = signal.set_wakeup_fd(self._write.fileno())
        self._before = {
            number: signal.signal(number, _leave_to_reader)
            for number in (signal.SIGCHLD, *_STOPS)
            if number == signal.SIGCHLD or signal.getsignal(number) != signal.SIG_IGN
        }

    def fileno(self) -> int:
        """For a selector."""
        return self._read.fileno()

    def take(self) -> bytes:
        """The numbers of those that came, in order; does not block."""
        try:
            return self._read.recv(4096)
        except BlockingIOError:
            return b""

    def wait_for_stop(self, timeout_s: float) -> int | None:
        """The number of a signal that asks to stop; None after `timeout_s`, or earlier."""
        select.select([self], [], [], timeout_s)
        return next((number for number in self.take() if number in _STOPS), None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._fd)
        self._read.close()
        self._write.close()


def _leave_to_reader(number: int, frame: FrameType | None) -> None:
    """Python writes the number to the wakeup descriptor by itself."""


@dataclass(frozen=True, slots=True)
class Stream:
    """One output of a child, and where its lines go."""

    pipe: IO[bytes]
    fd: int
    lines: Lines = field(default_factory=Lines)
    traces: Traces = field(default_factory=Traces)
    tail: deque[bytes] = field(default_factory=lambda: deque[bytes](maxlen=_TAIL_LINES))


@dataclass(frozen=True, slots=True)
class Child:
    """A peer that was started here."""

    name: str
    process: subprocess.Popen[bytes]
    streams: tuple[Stream, ...]
    """Of stdout and stderr, or none if it has the launcher's."""


class Crew:
    """The children that run, and what becomes of them."""

    def __init__(self, output: Output, signals: Signals, guard: Guard) -> None:
        self._output, self._signals, self._guard = output, signals, guard
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals, selectors.EVENT_READ, self._take_signals)
        self._children: list[Child] = []
        self._ended: list[End] = []
        self._streams: list[Stream] = []
        self._stopped_by: int | None = None
        self._kill_s: float | None = None  # when the grace ends
        self._killed = False
        self._some_ended = False  # and are to be reaped, once what is being written is
        output.wait = self._wait_for_reader

    def start(
        self, name: str, command: Sequence[str], environment: dict[str, str], *, alone: bool
    ) -> None:
        """A child that has the launcher's streams if it is alone, else pipes and no stdin."""
        process = self._guard.start(
            list(command),
            environment=environment,
            stdin=None if alone else subprocess.DEVNULL,
            stdout=self._output.out if alone else subprocess.PIPE,
            stderr=None if alone else subprocess.PIPE,
        )
        pipes = ((process.stdout, self._output.out), (process.stderr, _ERR))
        streams = tuple(Stream(pipe, fd) for pipe, fd in pipes if pipe is not None)
        child = Child(name, process, streams)
        self._children.append(child)
        self._streams += streams
        for stream in streams:
            os.set_blocking(stream.pipe.fileno(), False)
            read = partial(self._read, child, stream)
            self._selector.register(stream.pipe, selectors.EVENT_READ, read)
        self._output.event("started", name=name, pid=process.pid)

    def wait(self) -> tuple[list[End], int | None]:
        """Until all have ended: how, in that order, and the signal that made them, if one did."""
        while self._children:
            for key, _ in self._selector.select(0 if self._some_ended else self._left_s()):
                key.data()
            if self._some_ended:
                self._some_ended = False
                self._reap()
            self._end_grace()
            if self._output.lost and self._stopped_by is None:
                self._stop(signal.SIGHUP)  # nobody is there, and nobody can see them work
        return self._ended, self._stopped_by

    def _wait_for_reader(self, fd: int) -> bool:
        """Whether `fd` takes more. One who does not read keeps no signal from the children, and
        nobody waits for it once they are killed.
        """
        left_s = 0 if self._killed else self._left_s()
        _, ready, _ = select.select([self._signals], [fd], [], left_s)
        if not ready and self._killed:
            raise TimeoutError(errno.ETIMEDOUT, "nobody reads it")
        if not ready:
            self._take_signals()
            self._end_grace()
        return bool(ready)

    def _left_s(self) -> float | None:
        return None if self._kill_s is None else max(0.0, self._kill_s - time.monotonic())

    def _end_grace(self) -> None:
        if self._left_s() == 0:
            self._kill(f"not gone after {GRACE_S:g} s")

    def _take_signals(self) -> None:
        for number in self._signals.take():
            if number == signal.SIGCHLD:
                self._some_ended = True
            elif self._stopped_by is None:
                self._stop(signal.Signals(number))
            elif number != signal.SIGHUP:  # a terminal that closes may say so twice
                self._kill(f"a second signal, {signal_name(number)}")

    def _stop(self, number: signal.Signals) -> None:
        """Ask the children to leave; not their own children, whom they may need for it."""
        self._stopped_by = number
        self._kill_s = time.monotonic() + GRACE_S
        passed_on = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        for child in self._children:
            # Not by Popen, which would reap it: until `_reap` does, its id is its own.
            with contextlib.suppress(ProcessLookupError):  # a zombie, on macOS
                os.kill(child.process.pid, passed_on)
        self._output.say(
            f"{number.name}: {len(self._children)} asked to leave; a second signal kills, "
            f"and so do {GRACE_S:g} s"
        )

    def _kill(self, why: str) -> None:
        self._kill_s, self._killed = None, True
        for child in self._children:
            signal_group(child.process.pid, signal.SIGKILL)
        self._output.say(f"{why}: {len(self._children)} killed")

    def _reap(self) -> None:
        for child in list(self._children):
            if (code := child.process.poll()) is None:
                continue
            self._guard.forget(child.process)
            self._children.remove(child)
            for stream in child.streams:  # what it said last comes before the news of its end
                self._read(child, stream)
                self._show_rest(child, stream)
            last = child.streams[-1].tail if child.streams else ()
            self._report(End(child.name, code, tuple(last)))

    def _report(self, end: End) -> None:
        self._ended.append(end)
        name = signal_name(-end.code) if end.code < 0 else None
        code = end.code if end.code >= 0 else None
        self._output.event("ended", name=end.name, code=code, signal=name)
        if end.code:
            left = f"; {len(self._children)} left" if self._children else ""
            self._output.say(f"{end.name} {end}{left}")

    def _read(self, child: Child, stream: Stream) -> None:
        """Show what is there. It ends when the last process has that holds the pipe's other end."""
        if stream.pipe.closed:  # at an end that one select brought together with this
            return None
        try:
            data = os.read(stream.pipe.fileno(), _CHUNK_BYTES)
        except BlockingIOError:
            return None
        if data:
            return self._show(child, stream, stream.lines.feed(data, time.monotonic()))
        self._selector.unregister(stream.pipe)
        stream.pipe.close()
        return self._show_rest(child, stream)

    def _show_rest(self, child: Child, stream: Stream) -> None:
        self._show(child, stream, stream.lines.finish())
        self._pass_on(child, stream, stream.traces.finish())

    def _show(self, child: Child, stream: Stream, lines: Sequence[bytes]) -> None:
        if self._stopped_by == signal.SIGINT:
            lines = stream.traces.feed(lines)
        self._pass_on(child, stream, lines)

    def _pass_on(self, child: Child, stream: Stream, lines: Sequence[bytes]) -> None:
        stream.tail.extend(lines)
        self._output.pass_on(stream.fd, f"[{child.name}] ".encode(), lines)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._output.wait = _wait_for_reader
        self._selector.close()
        for stream in self._streams:
            stream.pipe.close()
