"""Work: how an operation's end reaches whoever waits for it.

torch runs what is chained to a future (`then`) inline, on the thread that sets its result, and some
of that starts another operation and waits for it (PowerSGD's hook does). So results are set on
threads that nobody else needs: an idle one if there is one, a new one otherwise.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import Work
from torch.futures import Future

from manyhands.collectives.backend.exchange import Key


class Completer:
    """Runs acts on threads of its own. No act waits for another one to end. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._acts: deque[Callable[[], None]] = deque()
        self._num_idle = 0  # threads that will look for an act before they run one
        self._ended = False
        self._threads: list[threading.Thread] = []

    def put(self, act: Callable[[], None]) -> None:
        """Run it soon; after `close`, now and on this thread."""
        with self._changed:
            ended = self._ended
            if not ended:
                self._acts.append(act)
                self._see_to_it()
        if ended:
            act()

    def close(self) -> None:
        """Run what was put, and join all threads. Idempotent."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _see_to_it(self) -> None:
        """Somebody must be free while an act waits; one is enough, it calls the next."""
        if self._num_idle:
            self._changed.notify()
            return
        self._num_idle = 1
        name = f"complete {self._name} {len(self._threads)}"
        thread = threading.Thread(target=self._serve, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._acts or self._ended)
                self._num_idle -= 1
                if not self._acts:
                    return
                act = self._acts.popleft()
                if self._acts:
                    self._see_to_it()
            act()
            del act  # it may hold the tensors of an operation
            with self._changed:
                self._num_idle += 1


class Sequel:
    """The operations that callbacks of one operation start: numbered apart from all others.

    Callbacks of two operations run side by side, beside the user's own threads, and in another
    order on every rank. What each of them starts has an order of its own, the same on all ranks.
    """

    def __init__(self, group: object, key: Key) -> None:
        self.group, self.key = group, key
        self._next = itertools.count()

    def number(self) -> int:
        """Of the next one."""
        return next(self._next)


class _Now(threading.local):
    sequel: Sequel | None = None


_now = _Now()


def current_sequel() -> Sequel | None:
    """Of the operation whose callback this thread runs."""
    return _now.sequel


class Chain(Future[Any]):
    """A future whose callbacks, and theirs, know the operation that they belong to.

    torch runs a callback on the thread that sets the result, or at once on the thread that adds it
    if the result is there already: so it is the callback that has to know.
    """

    def __init__(self, device: torch.device | None, sequel: Sequel | None) -> None:
        self._devices = [device] if device is not None else []
        self._sequel = sequel
        super().__init__(devices=self._devices)  # pyright: ignore[reportArgumentType]

    def then(self, callback: Callable[[Future[Any]], Any]) -> Chain:
        child = Chain(self._devices[0] if self._devices else None, self._sequel)

        def run(_: Future[Any]) -> None:
            try:
                with self._within():
                    value = callback(self)
            except Exception as error:  # noqa: BLE001  (it is handed on, not swallowed)
                child.set_exception(error)
            else:
                child.set_result(value)

        super().then(run)
        return child

    def add_done_callback(self, callback: Callable[[Future[Any]], None]) -> None:
        def run(_: Future[Any]) -> None:
            with self._within():
                callback(self)

        super().add_done_callback(run)

    def set_exception(self, result: BaseException) -> None:
        def unwrap(_: object) -> object:
            raise result

        self._set_unwrap_func(unwrap)  # for Python  # pyright: ignore[reportUnknownMemberType]
        self.set_result(_Failure(result))  # for C++

    @contextmanager
    def _within(self) -> Generator[None]:
        before, _now.sequel = _now.sequel, self._sequel
        try:
            yield
        finally:
            _now.sequel = before


class _Failure:
    """An error as a future's value, since Python can set nothing else.

    torch's C++ looks for tensors in a value by pickling it, and takes the first. Finding none it
    crashes; so looking itself must fail, and its error is ours.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __str__(self) -> str:
        return str(self._error)

    __repr__ = __str__

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise RuntimeError(str(self._error))


class Promise(Work):
    """One operation, as torch shows it to its user. It is kept or broken once.

    `about` says, while it is neither, what it is and what it waits for.
    """

    def __init__(
        self,
        device: torch.device | None,
        sequel: Sequel | None = None,
        about: Callable[[], str] = lambda: "the operation",
    ) -> None:
        super().__init__()
        self.sequel, self.about = sequel, about
        self._future = Chain(device, sequel)
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self.source = -1  # whose data came, where that was open

    def keep(self, result: object) -> None:
        """It is done."""
        self._ended.set()
        self._future.set_result(result)

    def break_(self, error: BaseException) -> None:
        """It cannot be done."""
        self._error = error
        self._ended.set()
        self._future.set_exception(error)

    # -- what torch and its users ask of a Work ---------------------------------------------------

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Returns when the result has come; on a GPU, the current stream then waits for its copy.

        A `timeout` of 0 is no limit. Raises DistBackendError, the RuntimeError that torch's own
        backends raise too. A wait that has timed out may be taken up again: the operation goes on.
        """
        limit_s = timeout.total_seconds() if timeout > timedelta(0) else None
        # The future waits in C++, where neither a time-out nor a Ctrl-C reaches it.
        if not self._ended.wait(limit_s):
            raise dist.DistBackendError(f"{self.about()} was not finished within {limit_s:g} s")
        try:
            self._future.wait()
        except Exception as error:  # noqa: BLE001  (it is raised again, as torch's own)
            cause = self._error or error
            raise dist.DistBackendError(str(cause)) from cause
        return True

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Chain:
        return self._future

    def is_completed(self) -> bool:
        return self._future.done()

    def is_success(self) -> bool:
        return self._future.done() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> Any:  # noqa: ANN401  (the operation's tensors)
        return self._future.value()

    def source_rank(self) -> int:
        return self.source

    _source_rank = source_rank
