"""Leases: how long silence may last, counted on both sides. Pure: the time is a parameter.

The peer counts from the *sending* of the last beat that was answered, the arbiter from the last
arrival, so the peer's lease always ends first: when the arbiter lets others go on without it,
it has already stopped committing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass
class HeldLease:
    """A peer's own lease. Times are of one monotonic clock."""

    lease_s: float
    start_s: float = float("-inf")  # the lease counts from here
    _sent: deque[tuple[int, float]] = field(default_factory=deque[tuple[int, float]])

    def sent(self, n: int, now_s: float) -> None:
        """Beat `n` goes out now."""
        self._sent.append((n, now_s))

    def answered(self, n: int) -> None:
        """The meeting point has heard beat `n`."""
        while self._sent and self._sent[0][0] <= n:
            self.renew(self._sent.popleft()[1])

    def renew(self, sent_s: float) -> None:
        """The meeting point has heard something that was sent at `sent_s`."""
        self.start_s = max(self.start_s, sent_s)

    def end(self) -> None:
        """The lease is over, whatever has been answered."""
        self.start_s = float("-inf")
        self._sent.clear()

    def left_s(self, now_s: float) -> float:
        """Seconds of validity left; 0 without a valid lease."""
        return max(0.0, self.start_s + self.lease_s - now_s)


@dataclass
class LeaseBook:
    """The arbiter's account of everybody's leases."""

    lease_s: float
    grace_s: float
    _heard: dict[int, float] = field(default_factory=dict[int, float])
    _closed: dict[int, float] = field(default_factory=dict[int, float])
    _last_tick_s: float | None = None

    def heard(self, incarnation: int, now_s: float) -> None:
        """Something arrived from this peer at that time; older news than known changes nothing."""
        if now_s > self._heard.get(incarnation, float("-inf")):
            self._heard[incarnation] = now_s
        # What came before the end of a connection does not undo that end.
        if now_s > self._closed.get(incarnation, float("inf")):
            del self._closed[incarnation]

    def closed(self, incarnation: int, now_s: float) -> None:
        """The peer's connection has closed: only the grace is left, unless it is heard again."""
        if incarnation in self._heard:
            self._closed.setdefault(incarnation, now_s)

    def forget(self, incarnation: int) -> None:
        """The peer is no longer judged."""
        self._heard.pop(incarnation, None)
        self._closed.pop(incarnation, None)

    def expired(self, now_s: float) -> dict[int, str]:
        """Who is out, and why. Call it every `tick_s`.

        After a pause in these very calls (a suspended machine, a stopped process) nobody is
        judged and all timers start again: what the arbiter missed is not its peers' silence.
        """
        last, self._last_tick_s = self._last_tick_s, now_s
        if last is not None and now_s - last > max(self.lease_s / 2, 4 * self.tick_s):
            self.restart(now_s)
            return {}
        out = {
            i: f"its connection closed and did not come back within {self.grace_s:g} s"
            for i, at in self._closed.items()
            if now_s - at > self.grace_s
        }
        for i, at in self._heard.items():
            if now_s - at > self.lease_s:
                out.setdefault(i, f"nothing was heard of it for {self.lease_s:g} s")
        return out

    def restart(self, now_s: float) -> None:
        """All timers start again: the arbiter could not have heard anybody."""
        self._heard = dict.fromkeys(self._heard, now_s)
        self._closed = dict.fromkeys(self._closed, now_s)

    def silent(self, since_s: float) -> list[int]:
        """Who has not been heard since then."""
        return [i for i, at in self._heard.items() if at < since_s]

    @property
    def tick_s(self) -> float:
        """How often `expired` should be asked."""
        return min(self.grace_s, self.lease_s) / 5
