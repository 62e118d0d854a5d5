"""Desk: loggers behind threads of their own, so that none of them stops or slows a training.

Rows wait in a queue for each logger. One that is slow fills its queue, and rows that find it full
are dropped and counted; one that raises is warned about once and counted. At the end there is time
for what still waits: in a normal end nothing is lost.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self, cast

from manyhands.observe.adapt import adapt
from manyhands.observe.base import FAILED, SUCCESS, Logger
from manyhands.observe.events import Happening, Hears

log = logging.getLogger(__name__)

MOST = 10_000
"""Rows that wait for a logger."""
END_S = 30.0
"""How long the end of a training waits for its loggers, all together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Count:
    """What has become of the rows for one logger."""

    logger: str
    failed: int
    """Calls that have raised."""
    dropped: int
    """Rows and events that found its queue full, or came or were left after its end."""


class Desk:
    """In front of any number of loggers, or of what `adapt` makes into one; it is one itself.

    Used by one thread. No method but `finalize` waits, and that one not longer than `end_s`. A
    logger that hangs then is left to its thread, which ends with the process.
    """

    def __init__(
        self, loggers: Iterable[object], *, most: int = MOST, end_s: float = END_S
    ) -> None:
        self._clerks = [_Clerk(adapt(logger), _name_of(logger), most) for logger in loggers]
        self._end_s = end_s
        self.ended = False
        """Whether it was finalized: what comes now is dropped."""
        self._last = -1

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        row = dict(metrics)
        for clerk in self._clerks:
            clerk.put(_Item(row, step))
        self._last = step

    def log_hyperparams(self, params: Mapping[str, object]) -> None:
        for clerk in self._clerks:
            clerk.put(_Item(dict(params), None))

    def log_event(self, event: Happening) -> None:
        """For those of the loggers that take events: see `Hears`."""
        for clerk in self._clerks:
            if isinstance(clerk.logger, Hears):
                clerk.put(_Item(event, event.step))

    def finalize(self, status: str) -> None:
        if self.ended:
            return
        self.ended = True
        for clerk in self._clerks:
            clerk.end(status)
        deadline = time.monotonic() + self._end_s
        for clerk in self._clerks:
            clerk.join(deadline, self._end_s)
        for count in self.counts:
            if count.failed or count.dropped:
                log.warning(
                    "%s: %d calls failed, %d rows were dropped",
                    *(count.logger, count.failed, count.dropped),
                )

    @property
    def counts(self) -> list[Count]:
        """In the order of the loggers."""
        return [clerk.count() for clerk in self._clerks]

    @property
    def settled(self) -> int:
        """The last step of which no row waits or is under way at any logger; -1: none."""
        return min((clerk.settled() for clerk in self._clerks), default=self._last)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.finalize(SUCCESS if kind is None else FAILED)


@dataclass(frozen=True, slots=True)
class _Item:
    what: Mapping[str, object] | Happening
    step: int | None  # None: hyperparameters


def _name_of(logger: object) -> str:
    """As its user knows it: a function or a module by its name, others by their class's."""
    name = getattr(logger, "__name__", None)
    return name if isinstance(name, str) else type(logger).__name__


class _Clerk:
    """The thread of one logger. It begins with the first thing there is to do."""

    def __init__(self, logger: Logger, name: str, most: int) -> None:
        self.logger, self._name, self._most = logger, name, most
        self._changed = threading.Condition()
        self._waiting: deque[_Item] = deque()
        self._under_way: _Item | None = None
        self._last = -1  # step that it was given
        self._status: str | None = None  # of the end
        self._failed = self._dropped = 0
        self._thread: threading.Thread | None = None

    # -- the training's thread ------------------------------------------------------------------

    def put(self, item: _Item) -> None:
        with self._changed:
            if item.step is not None:
                self._last = item.step
            if self._status is not None or len(self._waiting) >= self._most:
                self._dropped += 1
                return
            self._waiting.append(item)
            self._changed.notify()
            self._start()

    def end(self, status: str) -> None:
        with self._changed:
            self._status = status
            self._changed.notify()
            self._start()

    def join(self, deadline: float, end_s: float) -> None:
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))
            if not self._thread.is_alive():
                return
        with self._changed:
            self._dropped += len(self._waiting)
            self._waiting.clear()
        log.warning("%s has not come to its end within end_s=%g s", self._name, end_s)

    def count(self) -> Count:
        with self._changed:
            return Count(logger=self._name, failed=self._failed, dropped=self._dropped)

    def settled(self) -> int:
        with self._changed:
            items = ([] if self._under_way is None else [self._under_way], self._waiting)
            steps = (item.step for some in items for item in some if item.step is not None)
            oldest = next(steps, None)
            return self._last if oldest is None else oldest - 1

    def _start(self) -> None:
        if self._thread is None:
            # A daemon: a logger that hangs must not keep the process from its end.
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            # The system may have none to give: rows wait, and the next one asks again.
            with suppress(RuntimeError):
                thread.start()
                self._thread = thread

    # -- its own --------------------------------------------------------------------------------

    def _work(self) -> None:
        while (item := self._next()) is not None:
            self._try(item)
            with self._changed:
                self._under_way = None
        self._try(None)

    def _next(self) -> _Item | None:
        """What is to be done next; None once all is and the end has come."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._status is not None)
            self._under_way = self._waiting.popleft() if self._waiting else None
            return self._under_way

    def _try(self, item: _Item | None) -> None:
        try:
            self._do(item)
        # A logger is anybody's code. What would end a program ends no thread of ours either.
        except BaseException as error:  # noqa: BLE001
            with self._changed:
                self._failed += 1
                first = self._failed == 1
            if first:
                log.warning(
                    "%s failed, and training goes on; this is said once: %s: %s",
                    *(self._name, type(error).__name__, error),
                )

    def _do(self, item: _Item | None) -> None:
        if item is None:
            assert self._status is not None
            self.logger.finalize(self._status)
        elif isinstance(item.what, Happening):
            cast("Hears", self.logger).log_event(item.what)
        elif item.step is None:
            try:
                self.logger.log_hyperparams(item.what)
            except NotImplementedError:  # as Lightning's CSVLogger says
                log.info("%s keeps no hyperparameters", self._name)
        else:
            self.logger.log_metrics(cast("Mapping[str, float]", item.what), item.step)
