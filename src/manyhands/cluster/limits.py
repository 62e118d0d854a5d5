"""Limits of the HTTP side: how much of everything one caller can take."""

from __future__ import annotations

import resource
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from manyhands.core.errors import SettingsError


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpLimits:
    """Seconds, bytes and counts. Each is a bound, none a promise."""

    headers_s: float = 10.0
    """From the first byte of a request (or the connection) to the end of its headers."""
    body_s: float = 120.0
    """For the whole body of a request."""
    pause_s: float = 15.0
    """Between two pieces of a body."""
    write_s: float = 30.0
    """How long a caller may leave an answer unread."""
    idle_s: float = 75.0
    """Between two requests on one connection."""
    headers_bytes: int = 16 << 10
    json_bytes: int = 4 << 20
    log_bytes: int = 1 << 20
    """A piece of a log."""
    connections: int = 4096
    """In all; no more than half of the descriptors that the process may have."""
    strangers: int = 128
    """Connections that have not shown a token yet."""
    threads: int = 16
    """That talk to the coordinator and the disk. None of them waits for an event: long polls
    wait in the event loop, so their number is not the number of callers."""
    failures_per_min: float = 20.0
    """Wrong tokens from one address; then they are answered by 429."""
    requests_per_s: float = 2000.0
    """With one role from one address, with bursts of twice that."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise SettingsError(f"limit {name} must be positive, not {getattr(self, name)}")

    def most_connections(self) -> int:
        """What the process can have: logs, the job store and agents need descriptors too."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return self.connections if soft < 0 else max(16, min(self.connections, soft // 2))


def raise_descriptors(wanted: int = 9216) -> None:
    """Let this process have so many files and connections, if it may say so itself. The default is
    enough for as many connections as there may be, with what is needed beside them.

    No more than that: what it starts inherits it, and some programs look at every one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard < 0 else min(wanted, hard)
    if 0 <= soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class Rates:
    """Token buckets by key: `take` says how long to wait, 0 for now. Not thread-safe.

    The oldest keys are forgotten, so a caller with many addresses gets no memory out of it.
    """

    def __init__(
        self, per_s: float, burst: float, *, clock: Callable[[], float], num_keys: int = 4096
    ) -> None:
        self._per_s = per_s
        self._burst = burst
        self._clock = clock
        self._num_keys = num_keys
        self._buckets: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def take(self, key: Hashable) -> float:
        """Takes one from the bucket, if there is one; else seconds until there will be."""
        now = self._clock()
        level, at = self._buckets.pop(key, (self._burst, now))
        level = min(self._burst, level + (now - at) * self._per_s)
        wait = 0.0 if level >= 1 else (1 - level) / self._per_s
        self._buckets[key] = (level - 1 if level >= 1 else level, now)
        if len(self._buckets) > self._num_keys:
            self._buckets.popitem(last=False)
        return wait
