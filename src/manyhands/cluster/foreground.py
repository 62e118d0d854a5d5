"""The foreground: a cluster in a terminal, until a signal, `manyhands down`, or a failure."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType, TracebackType
from typing import Self, TextIO

from manyhands.cluster.limits import raise_descriptors
from manyhands.cluster.up import Ready, Up
from manyhands.core.errors import ManyhandsError

READY_LINE = "Now, cluster is ready to accept training jobs."
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NOBODY = (errno.EPIPE, errno.EIO, errno.EBADF)  # no reader, no terminal, no stream any more
_DONE = 0  # no signal has this number


def tell(stream: TextIO | None, text: str) -> None:
    """A line for people, at once. They may have gone: their terminal was closed, or Ctrl-C has
    ended the `tee` too; or have closed the stream before (None). That keeps no cluster from going
    down, and takes none down.
    """
    if stream is None:
        return
    try:
        stream.write(f"{text}\n")
        stream.flush()
    except OSError as error:
        if error.errno not in _NOBODY:  # a disk that is full may have room for the next one
            return
        # What is left in its buffer, and all that is to come, goes nowhere.
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())


class Signals:
    """Signals that stop, and the end of the work, as things to wait for in the main thread.

    Python writes their numbers into a socket as they come. Waiting for a handler of ours to run
    would not do: one that comes just before the main thread begins to wait is not run until the
    wait is over. A stop that was ignored before (nohup, a shell's background job) stays ignored.
    """

    def __enter__(self) -> Self:
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._is_done = False
        self._fd_before = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        heard = [number for number in _STOPS if signal.getsignal(number) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, _nothing_more) for number in heard}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._fd_before)
        self._read.close()
        self._write.close()

    def done(self) -> None:
        """The work is over; from any thread."""
        self._is_done = True
        with contextlib.suppress(BlockingIOError):  # full of signals, so somebody is woken
            self._write.send(bytes([_DONE]))

    def next(self) -> signal.Signals | None:
        """Blocks: the next signal, or None when the work is over."""
        while not self._is_done:
            (number,) = self._read.recv(1)
            if number in _STOPS:
                return signal.Signals(number)
        return None


def _nothing_more(number: int, frame: FrameType | None) -> None:
    """It is in the socket."""


def nothing(up: Up) -> AbstractContextManager[None]:
    """Beside the cluster."""
    return contextlib.nullcontext()


def serve(
    up: Up,
    announce: Callable[[Up, Ready], None],
    say: Callable[[str], None],
    *,
    beside: Callable[[Up], AbstractContextManager[object]] = nothing,
) -> None:
    """Run the cluster in a thread, and listen to signals in this one, the main thread, until it is
    down. Raises what fails.

    `announce` is called when it is ready, `say` with lines for people, from any thread: it has to
    return whether anybody reads them or not (`tell`), or no signal would be heeded. `beside` is
    entered while it is open, and left when all agents have gone.
    """
    raise_descriptors()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            _live(up, announce, say, beside)
        except BaseException as error:  # noqa: BLE001 - raised below, in the main thread
            failures.append(error)
        finally:
            signals.done()

    usual = threading.excepthook
    with Signals() as signals:
        threading.excepthook = lambda args: _stop_for(args, up, usual, failures)
        thread = threading.Thread(target=work, name="up")
        thread.start()
        try:
            while (number := signals.next()) is not None:
                _heed(number, up, say)
        finally:
            thread.join()
            threading.excepthook = usual
    if failures:
        raise failures[0]


def _heed(number: signal.Signals, up: Up, say: Callable[[str], None]) -> None:
    if not up.is_stopping:
        say(f"{number.name}: going down; a second one does not wait for jobs")
        up.stop(number.name)
    elif number != signal.SIGHUP:  # a terminal that closes may say so twice
        say("a second signal: nobody waits for jobs any more")
        up.hurry()


def _live(
    up: Up,
    announce: Callable[[Up, Ready], None],
    say: Callable[[str], None],
    beside: Callable[[Up], AbstractContextManager[object]],
) -> None:
    with up, beside(up):
        try:
            ready = up.until_ready()
            if ready is not None:
                for trouble in ready.missing:
                    say(f"warning: no agent of {trouble}\n  it is tried again")
                announce(up, ready)
            up.until_stopped()  # raises what has failed, though it were before it was ready
        finally:
            for trouble in up.end():
                say(f"warning: {trouble}")


def _stop_for(
    what: threading.ExceptHookArgs,
    up: Up,
    usual: Callable[[threading.ExceptHookArgs], object],
    failures: list[BaseException],
) -> None:
    """A thread of the hub, the server or the coordinator has failed: so has the cluster."""
    name = what.exc_type.__name__
    try:
        usual(what)
    finally:  # there may be nowhere to write it to
        text = f"a part of the cluster failed ({name}); its error is above"
        failures.append(ManyhandsError(text))
        up.stop(f"{name} in a part of the cluster")
