"""Child: a process that reads batches for a thread of its parent, by a pipe between the two.

It is spawned, not forked: locks, sockets and file systems of the parent are not in it, so what is
remote is opened anew there. It ends with its parent, however that ends: nobody else holds the
other end of its pipe, and a thread of its own watches the parent's process.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import select
import signal
import socket
import threading
import traceback
from collections import deque
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from manyhands.core.errors import ManyhandsError, UsageError
from manyhands.data.fetch import Marks, Rows
from manyhands.data.parcel import Lost, Parcel, borrowed, receive
from manyhands.data.reader import Reader
from manyhands.data.table import BadSample

_END_S = 5.0  # for a child that has been told to end; then it is killed
_SHOWN = 8  # samples that an error lists
_SCARCE = "this process or machine may be out of files or memory: ulimit -n, or fewer workers"


class WorkerError(ManyhandsError):
    """Something was raised in a worker process; its notes have the traceback from there."""


class WorkerDied(ManyhandsError):
    """A worker process has ended while it was reading."""


class Child:
    """A hand of a crew, that may be asked for `depth` batches at a time: the process need not wait
    for its parent between two of them. Used by the crew's thread, but for `end`.
    """

    def __init__(self, reader: Reader, number: int, depth: int) -> None:
        self._reader, self._number, self.depth = reader, number, depth
        self._asked: deque[Marks] = deque()
        self._lock = threading.Lock()  # of what follows
        self._process: Any = None
        self._line: Connection | None = None
        self._ended = False
        self._answered = False  # this process, once at least

    def begin(self) -> None:
        """Start the process, which takes a while. That it cannot be, `read` says."""
        self._ended = False
        with suppress(ManyhandsError):
            self._start()

    def ask(self, marks: Marks) -> None:
        """For a batch. If that cannot be, `answer` says why."""
        self._asked.append(marks)
        if self._line is not None:
            with suppress(OSError):
                self._line.send(marks)

    def answer(self) -> Rows:
        """The first batch that was asked for and not answered. If the process has died of it, the
        others are asked for anew.
        """
        marks = self._asked[0]
        try:
            line = self._line or self._start()
            answer = receive(line)
        except (EOFError, OSError) as error:
            raise self._died(marks, error) from error
        finally:
            self._asked.popleft()
        self._answered = True
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def end(self) -> None:
        """The process ends after the sample that it is at. From any thread. Does not block."""
        with self._lock:
            self._ended = True
            if self._line is None:
                return
            # Not closed: the crew's thread may be waiting for an answer, and sees the end.
            with suppress(OSError), borrowed(self._line) as both:  # it has ended already
                both.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Wait until the process has ended; one that takes too long is killed."""
        self.end()
        self._let_go()

    def _start(self) -> Connection:
        context = multiprocessing.get_context("spawn")
        with self._lock:
            if self._ended:
                raise WorkerDied("the loader was closed")
            try:
                ends: Any = context.Pipe()  # of a kind that depends on the system
            except OSError as error:
                raise self._not_started(error) from error
            mine, theirs = ends
            process = context.Process(
                target=serve,
                args=(theirs, self._reader, os.getpid()),
                name=f"reader {self._number}",
                daemon=True,
            )
            try:
                process.start()
            except OSError as error:
                mine.close()
                raise self._not_started(error) from error
            except Exception as error:
                mine.close()
                raise UsageError(
                    "a worker process cannot be started, most often since the table, transform or "
                    f"collate cannot be sent to it: {error}",
                    hint="define functions and classes at the top of a module, not in a function "
                    'or as a lambda; or read in threads: Loader(..., kind="thread")',
                ) from error
            finally:
                theirs.close()
            self._process, self._line, self._answered = process, mine, False
        for marks in self._asked:
            mine.send(marks)
        return mine

    def _let_go(self) -> int | None:
        """Returns its exit code."""
        with self._lock:
            process, self._process = self._process, None
            line, self._line = self._line, None
        if line is not None:
            line.close()
        if process is None:
            return None
        process.join(_END_S)
        if process.exitcode is None:
            process.kill()
            process.join()
        code = process.exitcode
        process.close()
        return code

    def _not_started(self, error: OSError) -> WorkerDied:
        return WorkerDied(f"worker process {self._number} cannot be started: {error}", hint=_SCARCE)

    def _died(self, marks: Marks, error: Exception) -> WorkerDied:
        """Whatever is still on the line is let go with it."""
        ended, code = self._ended, self._let_go()
        if ended:
            return WorkerDied("the loader was closed while a batch was read")
        if isinstance(error, Lost):
            return WorkerDied(
                f"worker process {self._number} has read a batch that could not be taken, and was "
                f"ended: {error}",
                hint=_SCARCE,
            )
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        if not self._answered and code is not None and code >= 0:
            return WorkerDied(
                f"worker process {self._number} could not begin ({how}); what it said is above",
                hint="it imports the script anew: put what the script does under "
                'if __name__ == "__main__":, or read in threads: Loader(..., kind="thread")',
            )
        numbers = ", ".join(map(str, marks.numbers[:_SHOWN]))
        return WorkerDied(
            f"worker process {self._number} has died ({how}) while it read samples {numbers}"
            + (", ..." if len(marks.numbers) > _SHOWN else ""),
            hint="memory that was not enough, or a library that crashes on one of these samples: "
            "read them one by one in a process of their own",
        )


# -- in the child ---------------------------------------------------------------------------------


def serve(line: Connection, reader: Reader, parent: int) -> None:
    """Read what is asked for until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal it is the parent's affair
    threading.Thread(target=_end_with, args=(parent,), name="parent's end", daemon=True).start()
    torch.set_num_threads(1)
    wanted: queue.SimpleQueue[Marks | None] = queue.SimpleQueue()
    # What is asked for is taken in at once: a parent that asks must not wait for one that answers.
    threading.Thread(target=_listen, args=(line, wanted), name="wanted", daemon=True).start()
    while (marks := wanted.get()) is not None:
        with closing(_packed(_answer(reader, marks))) as parcel:
            try:
                parcel.send(line)
            except OSError:
                return  # nobody is at the other end any more


def _packed(answer: Rows | BaseException) -> Parcel:
    try:
        return Parcel(answer)
    except OSError as error:
        told = _told(error)
        told.add_note(_SCARCE)
    except Exception as error:  # noqa: BLE001  (what pickling raises)
        told = _told(error)
        told.add_note("a batch is to be made of tensors, numbers, texts and the like")
    return Parcel(told)


def _listen(line: Connection, wanted: queue.SimpleQueue[Marks | None]) -> None:
    with suppress(EOFError, OSError):
        while True:
            wanted.put(line.recv())
    wanted.put(None)


def _answer(reader: Reader, marks: Marks) -> Rows | BaseException:
    try:
        return reader.read(marks)
    except BadSample as error:
        return BadSample(error.where, error.reason)
    except Exception as error:  # noqa: BLE001  (raised where the batch would have come)
        return _told(error)


def _told(error: Exception) -> WorkerError:
    told = WorkerError(f"{type(error).__name__} in a worker process: {error}")
    told.add_note("".join(traceback.format_exception(error)))
    return told


def _end_with(parent: int) -> None:
    """Whatever this process is at, and whoever else has a copy of the parent's files."""
    try:
        watched = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(1)
    except (AttributeError, OSError):  # of a system that has no such thing
        above = multiprocessing.parent_process()
        assert above is not None
        above.join()
    else:
        if os.getppid() == parent:  # else the number is another process's by now
            select.select([watched], [], [])
    os._exit(1)
