"""The line to the office: two threads that say what is held and ask what is wanted.

    reporter:  Hello until welcomed, then Status on every change and a few times a lease
    listener:  Wants, over and over, while the reporter has a connection

Whatever fails leads back to Hello, and from there on everything is said anew: both sides carry
the whole truth. What the threads learn goes to the agent's own thread as events.

They speak for that thread. When it hangs (a disk that does not answer) they must not go on saying
that all is well: the coordinator would wait for ever for an agent that does nothing. So they say
nothing more once it has not turned for half a lease, and the lease ends.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import msgspec

from manyhands.cluster.lease import Lease
from manyhands.cluster.messages import Hello, Origin, Status, Wants, Welcome
from manyhands.cluster.office import (
    ANY_VERSION,
    HOST_TAKEN,
    Office,
    OfficeRefused,
    OfficeUnreachable,
)

log = logging.getLogger(__name__)

WAIT_S = 20.0
"""How long the office may hold back its answer when nothing new is wanted."""
TAKEN_PATIENCE_S = 60.0
"""For an agent before this one to be given up, when it was killed a moment ago. That takes its
lease, which this one does not know: so a user's agent, which nobody starts again, goes on.
"""
_PER_LEASE = 4  # status messages, when nothing changes
_MAX_REFUSALS = 3  # in a row, with a new Hello before each
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 2.0
_JOIN_S = 0.2  # for a thread whose call may still wait; it is a daemon


@dataclass(frozen=True, slots=True)
class Welcomed:
    """A connection, the `session`th. A Status of the same session is awaited."""

    session: int
    welcome: Welcome


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the coordinator of that session wants."""

    session: int
    wants: Wants


@dataclass(frozen=True, slots=True)
class Reported:
    """The Status of this number, or a later one, has arrived."""

    number: int


@dataclass(frozen=True, slots=True)
class Renewed:
    """The lease is another now; longer, as a rule."""


@dataclass(frozen=True, slots=True)
class Nudged:
    """Nothing new: the agent's own thread is to turn once, to show that it can."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A thread has died of something that nobody foresaw."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Rejected:
    """The coordinator does not want this agent; the line is closed."""

    error: OfficeRefused


Event = Welcomed | Wanted | Reported | Renewed | Nudged | Rejected | Broken


class Line:
    """A context manager. `tell` is called by its threads."""

    def __init__(
        self,
        office: Callable[[], Office],
        hello: Hello,
        lease: Lease,
        tell: Callable[[Event], None],
    ) -> None:
        self._office, self._hello, self._lease, self._tell = office, hello, lease, tell
        self._changed = threading.Condition()
        self._closing = self._connected = False
        self._broken = False  # since the last Hello was said
        self._turned_s = lease.now_s()
        self._session = 0
        self._status: tuple[int, int, Status] = (0, 0, Status(agent=hello.agent))
        self._sent = 0  # the number of the last Status that has arrived
        self._refusals = 0
        self._threads = [
            threading.Thread(target=guarded(work, tell), name=f"agent {name}", daemon=True)
            for name, work in (("reporter", self._report), ("listener", self._listen))
        ]

    def report(self, session: int, status: Status) -> int:
        """The truth as of now, for the connection of that session; its number. Does not block."""
        with self._changed:
            number = self._status[1] + 1
            self._status = (session, number, status)
            self._changed.notify_all()
        return number

    def turned(self) -> None:
        """The agent's own thread has done all that it knew of."""
        with self._changed:
            self._turned_s = self._lease.now_s()
            self._changed.notify_all()

    def renew_session(self) -> int:
        """Say Hello again; the last session that is not to be heeded any more."""
        with self._changed:
            session = self._session
        self._break(session)
        return session

    def wait_connected(self, timeout_s: float | None = None) -> int | None:
        """The session of a connection, once there is one; None when the line is closed, or there
        is none in time.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._connected, timeout_s)
            return self._session if self._connected and not self._closing else None

    def prove(self) -> bool:
        """Block until a Status that is sent from now on has been taken: then the coordinator knows
        this agent, if it did not before. False when the line is closed.
        """
        with self._changed:
            session, number, status = self._status
            self._status = (session, number + 1, status)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closing or self._sent > number)
            return not self._closing

    def _break(self, session: int) -> None:
        """That connection is no good: begin anew with a Hello."""
        with self._changed:
            if self._session == session:
                self._connected, self._broken = False, True
                self._changed.notify_all()

    def _await_turn(self) -> None:
        """Until the agent's own thread is seen to work, or the line is closed."""
        length_s = self._lease.length_s
        if length_s is None or self._lease.now_s() <= self._turned_s + length_s / 2:
            return
        before_s = self._turned_s
        self._tell(Nudged())
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._turned_s > before_s)

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
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(_JOIN_S)

    def _report(self) -> None:
        office = self._office()
        pause_s, taken_until_s, complained = _FIRST_PAUSE_S, None, False
        while not self._closing:
            self._await_turn()
            try:
                if not self._connected:
                    self._say_hello(office)
                self._say_status(office)
                pause_s, taken_until_s, complained = _FIRST_PAUSE_S, None, False
            except OfficeUnreachable as error:
                self._break(self._session)
                if not complained:
                    log.warning("the coordinator cannot be reached, trying again: %s", error)
                complained = True
                self._pause(pause_s)
                pause_s = min(2 * pause_s, _LAST_PAUSE_S)
            except OfficeRefused as error:
                self._break(self._session)
                if error.code == HOST_TAKEN:
                    now_s = self._lease.now_s()
                    taken_until_s = taken_until_s or now_s + TAKEN_PATIENCE_S
                    if now_s < taken_until_s or self._hello.origin is Origin.USER:
                        if not complained:
                            log.warning("%s; waiting for that", error)
                        complained = True
                        self._pause(_LAST_PAUSE_S / 2)
                        continue
                if not self._bear(error):
                    return
                self._pause(_LAST_PAUSE_S if self._refusals > 1 else pause_s)

    def _say_hello(self, office: Office) -> None:
        with self._changed:
            self._broken = False
        asked_s = self._lease.now_s()
        welcome = office.hello(self._hello)
        with self._changed:
            self._session += 1
            session = self._session
        if self._lease.welcomed(welcome.lease_s, asked_s):
            self._tell(Renewed())
        self._tell(Welcomed(session, welcome))
        # What the agent holds of this cluster: it has to hear first which one that is.
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or self._broken or self._status[0] == session
            )

    def _say_status(self, office: Office) -> None:
        """Once, and then wait until there is a reason to say it again."""
        _, number, status = self._status
        if self._closing or self._broken:
            return
        asked_s = self._lease.now_s()
        office.status(self._hello.host, msgspec.structs.replace(status, number=number))
        self._renew(asked_s)
        with self._changed:
            self._connected = not self._broken
            self._sent = number
            self._changed.notify_all()
        self._tell(Reported(number))
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or not self._connected or self._status[1] > number,
                (self._lease.length_s or WAIT_S) / _PER_LEASE,
            )

    def _listen(self) -> None:
        office, pause_s = self._office(), _FIRST_PAUSE_S
        seen = ANY_VERSION, 0  # version, of which session
        while not self._closing:
            session = self.wait_connected()
            self._await_turn()
            if session is None or self._closing:
                return
            version = seen[0] if seen[1] == session else ANY_VERSION
            asked_s = self._lease.now_s()
            try:
                wants = office.wants(self._hello.host, self._hello.agent, version, WAIT_S)
            except OfficeUnreachable:
                self._break(session)
                self._pause(pause_s)
                pause_s = min(2 * pause_s, _LAST_PAUSE_S)
                continue
            except OfficeRefused as error:
                self._break(session)
                if not self._bear(error):
                    return
                self._pause(pause_s)
                continue
            pause_s, self._refusals = _FIRST_PAUSE_S, 0
            self._renew(asked_s)
            if seen != (wants.version, session):
                seen = wants.version, session
                self._tell(Wanted(session, wants))

    def _bear(self, error: OfficeRefused) -> bool:
        """Whether to try again: a coordinator that was restarted knows nobody, at first.

        A Hello that is refused is so for good.
        """
        self._refusals += 1
        known = self._session > 0 and self._refusals < _MAX_REFUSALS
        if not known:
            self._tell(Rejected(error))
        return known

    def _renew(self, asked_s: float) -> None:
        if self._lease.answered(asked_s):
            self._tell(Renewed())

    def _pause(self, pause_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing, pause_s)


def guarded(work: Callable[[], None], tell: Callable[[Broken], None]) -> Callable[[], None]:
    """The work of a thread, whose death is told: an agent without it would be dumb, and stay."""

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised by the agent's own thread
            tell(Broken(error))

    return run
