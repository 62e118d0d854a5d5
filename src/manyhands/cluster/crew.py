"""The crew: the agents that `up` started, each minded by a thread until it is told to leave.

An agent that ends is started again, after a while that doubles with every failure. Where it may be
that ssh has died, and not the agent, or that an agent of an earlier `up` works for the host, that
is not done while the coordinator hears the host.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from manyhands.cluster.starters import HELD, Errand, Minded, Starter, why
from manyhands.core.errors import ManyhandsError

FIRST_DELAY_S = 0.5
LAST_DELAY_S = 60.0
STEADY_S = 60.0
"""One that lived this long has not failed to start: the delays begin anew."""
LEAVE_S = 10.0
"""For processes of agents that have said goodbye, to be gone."""
ASK_S = 10.0
"""For those that have not, once they are asked by a signal."""
HURRY_S = 5.0
"""For those that are to end without any grace."""
KILL_S = 10.0
"""For a process that was killed, to be gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """Why an agent is not there."""

    host: str
    what: str
    remedy: str
    words: tuple[str, ...] = ()
    """The last that it said."""

    def __str__(self) -> str:
        said = "".join(f"\n    {line}" for line in self.words)
        return f"{self.host}: {self.what}{said}\n  remedy: {self.remedy}"


def delays() -> Iterator[float]:
    """How long to wait before each start after the first."""
    delay_s = FIRST_DELAY_S
    while True:
        yield delay_s
        delay_s = min(delay_s * 2, LAST_DELAY_S)


class Crew:
    """Starts every errand when it is entered. Leaving the block ends what it started.

    `is_heard` says whether the coordinator hears a host, from any thread and at once: it may take
    no lock under which `look` is called. `look` is to be called when the answer may have changed.
    `say` gets some lines about every agent that ended by itself.
    """

    def __init__(
        self,
        errands: Sequence[tuple[Starter, Errand]],
        *,
        is_heard: Callable[[str], bool],
        say: Callable[[str], None],
    ) -> None:
        self._is_heard, self._say = is_heard, say
        self._changed = threading.Condition()
        self._leaving = False
        self._running: dict[str, Minded] = {}
        self._troubles: dict[str, Trouble] = {}
        self._threads = [
            threading.Thread(target=self._mind, args=pair, name=f"agent {pair[1].name}")
            for pair in errands
        ]

    @property
    def troubles(self) -> tuple[Trouble, ...]:
        """Of the agents that have ended and not been started again yet."""
        with self._changed:
            return tuple(self._troubles.values())

    def pid(self, host: str) -> int | None:
        """The process here that is the agent of a host, or leads to it, while there is one."""
        with self._changed:
            started = self._running.get(host)
            return None if started is None else started.pid

    def look(self) -> None:
        """Hosts have come or gone."""
        with self._changed:
            self._changed.notify_all()

    def stop_starting(self) -> None:
        """From now on, one that ends has ended."""
        with self._changed:
            self._leaving = True
            self._changed.notify_all()

    def end(
        self,
        *,
        hurry: threading.Event,
        leave_s: float = LEAVE_S,
        ask_s: float = ASK_S,
        hurry_s: float = HURRY_S,
    ) -> list[str]:
        """Waits until the processes are gone, once the coordinator has told them to leave.

        Those that are not after `leave_s` are asked, after `ask_s` told to hurry, and then
        killed; `hurry`, with a `look`, goes on to that at once. Returns the hosts whose process
        had to be killed.
        """
        self.stop_starting()
        if self._gone(leave_s, hurry):
            return []
        for started in self._left().values():
            started.ask()
        if self._gone(ask_s, hurry):
            return []
        self.hurry()
        if self._gone(hurry_s):
            return []
        killed = self._left()
        for started in killed.values():
            started.kill()
        self._gone(KILL_S)
        return list(killed)

    def ask_unheard(self) -> None:
        """Those that the coordinator does not hear it cannot tell to leave: they are asked here."""
        for host, started in self._left().items():
            if not self._is_heard(host):
                started.ask()

    def hurry(self) -> None:
        """Have those of this machine end their jobs without a grace, and go."""
        for started in self._left().values():
            started.hurry()

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        now = threading.Event()
        now.set()
        self.end(hurry=now)
        for thread in self._threads:
            thread.join()

    def _left(self) -> dict[str, Minded]:
        with self._changed:
            return dict(self._running)

    def _gone(self, limit_s: float, hurry: threading.Event | None = None) -> bool:
        deadline_s = time.monotonic() + limit_s
        with self._changed:
            while self._running and not (hurry is not None and hurry.is_set()):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return False
                self._changed.wait(left_s)
            return not self._running

    # -- one agent, in a thread of its own ------------------------------------------------------

    def _mind(self, starter: Starter, errand: Errand) -> None:
        waits = delays()
        while True:
            began_s = time.monotonic()
            is_in_doubt = self._run(starter, errand)
            if is_in_doubt is None:
                return
            if time.monotonic() - began_s >= STEADY_S:
                waits = delays()
            if not self._pause(errand.name, next(waits), is_in_doubt=is_in_doubt):
                return

    def _run(self, starter: Starter, errand: Errand) -> bool | None:
        """One life of it. Whether one may be at work all the same; None: there is to be no more."""
        with self._changed:
            if self._leaving:
                return None
            try:
                started = starter.start(errand)
            except ManyhandsError as error:
                remedy = error.hint or f"its log: {errand.log}"
                self._note(Trouble(host=errand.name, what=error.message, remedy=remedy))
                return False
            self._running[errand.name] = started
            self._troubles.pop(errand.name, None)
        code = started.wait()
        assert code is not None
        is_over = code == HELD and self._mind_another(starter, errand)
        with self._changed:
            del self._running[errand.name]
            self._changed.notify_all()
            if self._leaving:
                return None
            is_in_doubt = not is_over and started.leaves_doubt(code)
            if code != HELD and not (is_in_doubt and self._is_heard(errand.name)):
                words = started.last_words()
                what, remedy = why(errand, code, words)
                self._note(Trouble(host=errand.name, what=what, remedy=remedy, words=words))
            return is_in_doubt

    def _mind_another(self, starter: Starter, errand: Errand) -> bool:
        """One of an `up` before this one is at work: it is minded as if it were ours. Whether
        there was one that can be; it has ended then.
        """
        adopted = starter.adopt(errand)
        if adopted is None:
            return False
        with self._changed:
            self._running[errand.name] = adopted
        adopted.wait()
        return True

    def _note(self, trouble: Trouble) -> None:
        self._troubles[trouble.host] = trouble
        self._say(f"agent of {trouble}")
        self._changed.notify_all()

    def _pause(self, host: str, delay_s: float, *, is_in_doubt: bool) -> bool:
        """Until it is to be started again; whether it is."""
        deadline_s = time.monotonic() + delay_s
        with self._changed:
            while not self._leaving:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 and not (is_in_doubt and self._is_heard(host)):
                    return True
                self._changed.wait(left_s if left_s > 0 else None)
            return False
