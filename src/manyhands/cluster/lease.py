"""The lease: until when an agent may have processes, without a word from its coordinator."""

from __future__ import annotations

import threading
from collections.abc import Callable

from manyhands.cluster.keeper import clock_s


class Lease:
    """Counted from when a request was sent, since that is the latest moment at which the
    coordinator can know it was heard. Thread-safe.

    A lease that has lapsed stays lapsed, whatever is answered then: the coordinator may have given
    the slots away. `begin_again` allows the next answer to start another, and is called when no
    process is left.
    """

    def __init__(self, now_s: Callable[[], float] = clock_s) -> None:
        self.now_s = now_s
        self._lock = threading.Lock()
        self._lease_s: float | None = None
        self._until_s: float | None = None

    @property
    def until_s(self) -> float | None:
        """None before the first answer, and between two leases."""
        with self._lock:
            return self._until_s

    @property
    def length_s(self) -> float | None:
        """As the last Welcome said."""
        with self._lock:
            return self._lease_s

    @property
    def holds(self) -> bool:
        """Whether processes may run now."""
        with self._lock:
            return self._until_s is not None and self.now_s() < self._until_s

    @property
    def lapsed(self) -> bool:
        """Whether there was one, and its time is over."""
        with self._lock:
            return self._until_s is not None and self.now_s() >= self._until_s

    def welcomed(self, lease_s: float, asked_s: float) -> bool:
        """A Hello that was sent at `asked_s` was answered; whether the lease is another now.

        It may be shorter: a coordinator that was started anew counts by what it grants now.
        """
        with self._lock:
            shorter = self._lease_s is not None and lease_s < self._lease_s
            self._lease_s = lease_s
            if shorter and self._until_s is not None and self.now_s() < self._until_s:
                self._until_s = asked_s + lease_s
                return True
        return self.answered(asked_s)

    def answered(self, asked_s: float) -> bool:
        """A request that was sent at `asked_s` was answered; whether the lease is longer now."""
        with self._lock:
            if self._lease_s is None:
                return False
            now_s, until_s = self.now_s(), asked_s + self._lease_s
            if now_s >= until_s or (self._until_s is not None and now_s >= self._until_s):
                return False
            longer = self._until_s is None or until_s > self._until_s
            self._until_s = until_s if longer else self._until_s
            return longer

    def begin_again(self) -> None:
        """Nothing runs any more."""
        with self._lock:
            self._until_s = None
