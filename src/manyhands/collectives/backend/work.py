"""Work: how an operation's end reaches whoever waits for it.

torch runs what is chained to a future (`then`) inline, on the thread that sets its result, and some
of that starts another operation and waits for it (PowerSGD's hook does). So results are set on
threads that nobody else needs: an idle one if there is one, a new one otherwise.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import _create_work_from_future  # pyright: ignore
from torch.distributed import Work
from torch.futures import Future


class Completer:
    """Runs acts on threads of its own, each as soon as it is put. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._acts: deque[Callable[[], None]] = deque()
        self._num_idle = 0
        self._ended = False
        self._threads: list[threading.Thread] = []

    def put(self, act: Callable[[], None]) -> None:
        """Run it. Never waits for another act; after `close` it runs on this thread."""
        with self._changed:
            ended = self._ended
            if not ended:
                self._acts.append(act)
                if len(self._acts) > self._num_idle:
                    name = f"complete {self._name} {len(self._threads)}"
                    thread = threading.Thread(target=self._serve, name=name, daemon=True)
                    self._threads.append(thread)
                    thread.start()
                else:
                    self._changed.notify()
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

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._num_idle += 1
                self._changed.wait_for(lambda: self._acts or self._ended)
                self._num_idle -= 1
                if not self._acts:
                    return
                act = self._acts.popleft()
            act()
            del act  # it may hold the tensors of an operation


class Promise:
    """One operation's future, and the Work that torch shows to its user."""

    def __init__(self, device: torch.device | None) -> None:
        self._future: Future[Any] = Future(devices=[device] if device is not None else [])
        # `set_exception` alone stores the exception as a *value*, which C++ then takes for a
        # tensor and crashes. An exception raised by a callback is an error to C++ too.
        self.future = self._future.then(_value)
        self.work: Work = _create_work_from_future(self.future)

    def keep(self, result: object) -> None:
        """It is done."""
        self._future.set_result(result)

    def break_(self, error: BaseException) -> None:
        """It cannot be done."""
        self._future.set_exception(error)  # pyright: ignore[reportArgumentType]


def _value(future: Future[Any]) -> object:
    return future.value()
