"""MeetingStore: torch's key-value store, kept by rank 0 and reached over the team's link.

torch gives every process group a store and uses it for small things: barriers, names, addresses.
This one needs no port to be open. Values are bytes and stay bytes.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from manyhands.collectives.backend import messages as words
from manyhands.core.errors import LinkTimeout, ManyhandsError, UsageError
from manyhands.links.messages import MESSAGE_BYTES

_MAX_KEYS = 1024  # of one call
_REQUEST_BYTES = MESSAGE_BYTES - 8  # its buffer takes a few of the message's
FORGET = "forget"  # says an asker that does not wait any longer
_MAX_NUMBER = (1 << 63) - 1  # torch's stores count in int64
Reply = Callable[[int, bytes, str], None]  # number, value, error


class StoreTimeout(LinkTimeout, dist.DistStoreError):
    """No answer in time. torch tries again where it catches its own error, a RuntimeError."""


class StoreGone(ManyhandsError, dist.DistStoreError):
    """There will be no answer any more."""


@dataclass
class Keeper:
    """The store itself. Answers now, or when the keys that are waited for have come."""

    value_bytes: int  # of the longest value: it has to fit a message
    _values: dict[str, bytes] = field(default_factory=dict[str, bytes])
    _waiting: dict[tuple[int, int], tuple[words.Ask, Reply]] = field(
        default_factory=dict[tuple[int, int], tuple[words.Ask, Reply]]
    )  # by asker, and its number of the request
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, asker: int, ask: words.Ask, value: bytes, reply: Reply) -> None:
        """Carry out one request of that rank's."""
        answers: list[tuple[Reply, tuple[int, bytes, str]]] = []
        with self._lock:
            if ask.verb == FORGET:
                self._waiting.pop((asker, ask.id), None)
                return
            if ask.verb in ("get", "wait") and not self._has(ask.keys):
                self._waiting[asker, ask.id] = ask, reply
                return
            answers.append((reply, self._do(ask, value)))
            for at, (other, other_reply) in list(self._waiting.items()):
                if self._has(other.keys):
                    answers.append((other_reply, self._do(other, b"")))
                    del self._waiting[at]
        for answer, result in answers:
            answer(*result)

    def forget(self, asker: int) -> None:
        """That rank waits for nothing any more."""
        with self._lock:
            for at in [at for at in self._waiting if at[0] == asker]:
                del self._waiting[at]

    def _has(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def _do(self, ask: words.Ask, value: bytes) -> tuple[int, bytes, str]:
        values, key = self._values, ask.keys[0] if ask.keys else ""
        match ask.verb:
            case "set":
                values[key] = value
            case "get":
                return 0, values[key], ""
            case "add":
                try:
                    number = int(values.get(key, b"0")) + ask.amount
                except ValueError:
                    return 0, b"", f"key {key[:100]!r} does not hold a number"
                if abs(number) > _MAX_NUMBER:
                    return 0, b"", f"key {key[:100]!r} would hold {number}: more than 64 bits"
                values[key] = str(number).encode()
                return number, b"", ""
            case "append":
                whole = values.get(key, b"") + value
                if len(whole) > self.value_bytes:
                    limit = f"{len(whole)} bytes, of at most {self.value_bytes}"
                    return 0, b"", f"key {key[:100]!r} would hold {limit}"
                values[key] = whole
            case "compare_set":
                # As torch's own stores do: a key that is not there is set if "" was expected.
                old = values.get(key)
                if old == ask.expected or (old is None and not ask.expected):
                    values[key] = value
                return 0, values.get(key, ask.expected), ""
            case "check":
                return self._has(ask.keys), b"", ""
            case "delete":
                return values.pop(key, None) is not None, b"", ""
            case "count":
                return len(values), b"", ""
            case "wait":
                return 0, b"", ""
            case _:
                return 0, b"", f"a store has no {ask.verb!r}"
        return 0, b"", ""


Post = Callable[[words.Word, Sequence[memoryview]], None]


class Clerk:
    """Asks the keeper and waits for the answer; one for each member. Thread-safe."""

    def __init__(self, post: Post, value_bytes: int) -> None:
        self._post, self._value_bytes = post, value_bytes
        self._ids = itertools.count(1)
        self._changed = threading.Condition()
        self._answers: dict[int, tuple[int, bytes, str]] = {}
        self._open: set[int] = set()
        self._error = ""

    def ask(
        self,
        verb: str,
        keys: Sequence[str],
        timeout_s: float,
        *,
        value: bytes = b"",
        amount: int = 0,
        expected: bytes = b"",
    ) -> tuple[int, bytes]:
        """Raises StoreTimeout (with the keys), StoreGone (and why), UsageError."""
        if len(value) > self._value_bytes or len(keys) > _MAX_KEYS:
            raise UsageError(
                f"{len(value)} bytes for {len(keys)} keys; a store takes {self._value_bytes} "
                f"bytes for at most {_MAX_KEYS} at a time"
            )
        longest = max(map(len, keys), default=0)
        if longest > words.MAX_KEY:
            raise UsageError(
                f"a key of {longest} characters; a store takes at most {words.MAX_KEY}"
            )
        if abs(amount) > _MAX_NUMBER:
            raise UsageError(f"{amount} is added; a store counts in 64 bits")
        call = next(self._ids)
        request = words.Ask(call, verb, tuple(keys), amount, expected)
        num_bytes = len(words.encode(request))
        if num_bytes > _REQUEST_BYTES:
            raise UsageError(
                f"`{verb}` of {len(keys)} keys takes {num_bytes} bytes to say it; a store takes "
                f"requests of {_REQUEST_BYTES}, the value not counted",
                hint="ask for fewer keys at a time, and expect shorter values",
            )
        with self._changed:
            self._open.add(call)
        self._post(request, [memoryview(value)])
        try:
            with self._changed:
                self._changed.wait_for(lambda: call in self._answers or self._error, timeout_s)
        finally:  # a Ctrl-C, too
            with self._changed:
                self._open.discard(call)
                came, gone = self._answers.pop(call, None), self._error
            if came is None and not gone:
                self._post(words.Ask(call, FORGET, ()), [])
        if came is None and gone:
            raise StoreGone(f"`{verb} {', '.join(keys)}`: the store is gone: {gone}")
        if came is None:
            raise StoreTimeout(f"key {', '.join(keys)} in the store", timeout_s)
        number, answer, error = came
        if error:
            raise UsageError(error)
        return number, answer

    def answered(self, answer: words.Answer, value: bytes) -> None:
        """The keeper has answered."""
        with self._changed:
            if answer.id in self._open:
                self._answers[answer.id] = (answer.number, value, answer.error)
                self._changed.notify_all()

    def failed(self, reason: str) -> None:
        """There is no keeper any more."""
        with self._changed:
            self._error = reason or "the team has ended"
            self._changed.notify_all()


class MeetingStore(Store):
    """The store of a group, as torch wants it."""

    def __init__(self, clerk: Clerk, timeout_s: float, owner: object) -> None:
        super().__init__()
        self._clerk, self._seconds = clerk, timeout_s
        self.owner = owner  # what this store lives with: the way back from a store to its team

    def set(self, key: str, value: str | bytes) -> None:
        self._clerk.ask("set", [key], self._seconds, value=_bytes(value))

    def get(self, key: str) -> bytes:
        return self._clerk.ask("get", [key], self._seconds)[1]

    def add(self, key: str, value: int) -> int:
        return self._clerk.ask("add", [key], self._seconds, amount=value)[0]

    def append(self, key: str, value: str | bytes) -> None:
        self._clerk.ask("append", [key], self._seconds, value=_bytes(value))

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        return self._clerk.ask(
            "compare_set",
            [key],
            self._seconds,
            value=_bytes(desired_value),
            expected=_bytes(expected_value),
        )[1]

    def check(self, keys: list[str]) -> bool:
        return bool(self._clerk.ask("check", keys, self._seconds)[0])

    def delete_key(self, key: str) -> bool:
        return bool(self._clerk.ask("delete", [key], self._seconds)[0])

    def num_keys(self) -> int:
        return self._clerk.ask("count", [], self._seconds)[0]

    def clone(self) -> Store:
        return self

    # Through a PrefixStore torch looks these two up by their C++ names.
    deleteKey = delete_key
    getNumKeys = num_keys

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        self._clerk.ask("wait", keys, seconds)

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._seconds)


def _bytes(value: str | bytes | Sequence[int]) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
