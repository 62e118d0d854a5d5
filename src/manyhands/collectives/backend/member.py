"""Member: this rank's place in a process group, and how the group's operations run.

a method of the group ── build ──► Buffers, Exchange ──► team
whoever waits ◄── Promise ◄── a thread of the completer ◄── done
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import Future as _Future
from torch.futures import Future, collect_all  # pyright: ignore[reportUnknownVariableType]

from manyhands.collectives.backend.arguments import place_of, timeout_of
from manyhands.collectives.backend.buffers import Buffers
from manyhands.collectives.backend.exchange import Exchange, Key
from manyhands.collectives.backend.failure import TeamFailed, broken_here
from manyhands.collectives.backend.operations import Maker
from manyhands.collectives.backend.session import Session
from manyhands.collectives.backend.work import Promise, Sequel, current_sequel
from manyhands.core.errors import UsageError

Make = Callable[[], Exchange]
Build = Callable[[Maker, Buffers], Make]
"""Says which tensors are read and written, and returns what makes the exchange of them.

It raises a UsageError for what is wrong with them: only an operation that was built has a number in
its stream. Whatever else it raises is a failure of this rank.
"""


class Member(dist.ProcessGroup):
    """Some ranks of a session, in order."""

    def __init__(
        self, session: Session, name: str, ranks: Sequence[int], timeout: timedelta
    ) -> None:
        self._session, self._ranks = session, tuple(ranks)
        self._place = self._ranks.index(session.rank)
        super().__init__(self._place, len(self._ranks))  # pyright: ignore[reportCallIssue]
        self._name, self._desc = name, "undefined"
        self._timeout_s = timeout.total_seconds()
        team = session.team
        self._maker = Maker(self._ranks, self._place, team.pool, team.link.terms.part_bytes)
        self._lock = threading.Lock()
        self._next: dict[int, int] = {}  # the number of the next operation of a stream
        # Not by torch's name for it: a process whose first `init_process_group` failed counts its
        # groups differently from then on, and names of destroyed groups are given again.
        self._life = f"{self._ranks} {session.count(self._ranks)}"
        self._stream = _stream_of(self._life)

    # -- what torch asks of a group -------------------------------------------------------------

    def getBackendName(self) -> str:
        return "manyhands"

    def name(self) -> str:
        return "manyhands"

    def rank(self) -> int:
        return self._place

    def size(self) -> int:
        return len(self._ranks)

    def getRank(self) -> int:
        return self._place

    def getSize(self) -> int:
        return len(self._ranks)

    @property
    def group_name(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    @property
    def _device_types(self) -> list[torch.device]:
        cuda = [torch.device("cuda")] if torch.cuda.is_available() else []
        return [torch.device("cpu"), *cuda]

    def _set_sequence_number_for_group(self) -> None:
        pass  # operations are numbered from the start

    def shutdown(self) -> None:
        """torch calls this from destroy_process_group: the world's group takes the link along."""
        if self is self._session.world_group:
            self._session.close()

    def abort(self) -> None:
        self.shutdown()

    def give_up(self, reason: str) -> None:
        """Nothing works from here on, for anybody: all others hear at once who it was, and why."""
        self._session.team.fail(TeamFailed(f"this rank gave up: {reason}"))

    # torch looks for a backend inside the group, and asks it what it can do.
    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def _get_backend(self, device: torch.device) -> Member:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    # -- running --------------------------------------------------------------------------------

    def _run(
        self,
        what: str,
        build: Build,
        result: object,
        opts: object = None,
        *,
        stream: int | None = None,
        key: Key | None = None,
    ) -> Promise:
        # What is made here is used on other threads, and some of it again and again.
        with torch.inference_mode(mode=False):
            try:
                return self._start(what, build, result, opts, stream, key)
            except UsageError as error:
                if key is not None:  # somebody's message was taken for it
                    self._break(what, error)
                raise  # without a number nobody waits for it: an error of this call alone
            except Exception as error:
                self._break(what, error)
                raise

    def _break(self, what: str, error: Exception) -> TeamFailed:
        """The others would wait for what has failed here: tell them."""
        failed = broken_here(what, error)
        self._session.team.fail(failed)
        return failed

    def _start(
        self,
        what: str,
        build: Build,
        result: object,
        opts: object,
        stream: int | None,
        key: Key | None,
    ) -> Promise:
        session = self._session
        buffers = Buffers(session.stream_for)
        make = build(self._maker, buffers)
        arrival = buffers.arrival()
        sequel: Sequel | None = None  # what follows from a message has no place in a group's order
        if key is None and stream is not None:
            key = self._next_key(stream)
        elif key is None:
            key = self._next_collective()
            sequel = Sequel(self, key)
        waiting: list[Exchange] = []  # it, while it does

        def about() -> str:
            for exchange in tuple(waiting):
                return f"`{exchange.form}`, which waits for {session.team.awaits(exchange)},"
            return f"`{what}`"

        promise = Promise(buffers.device, sequel, about)
        timeout_s = timeout_of(opts, self._timeout_s)

        def done(error: BaseException | None) -> None:
            waiting.clear()
            session.completer.put(lambda: finish(error))

        def finish(error: BaseException | None) -> None:
            if error is not None:
                return promise.break_(error)
            try:
                context = buffers.put_back()
            except Exception as failed:  # noqa: BLE001  (it is handed on, not swallowed)
                return promise.break_(self._break(what, failed))
            with context:  # so that whoever waits, waits for the copy too
                return promise.keep(result)

        def go() -> None:
            try:
                if arrival is not None:
                    arrival()
                exchange = make()
            except Exception as failed:  # noqa: BLE001  (it is handed on, not swallowed)
                promise.break_(self._break(what, failed))
            else:
                waiting.append(exchange)
                session.team.start(exchange, key, timeout_s, done)

        if arrival is None:
            go()
        else:
            session.completer.put(go)
        return promise

    def _all(self, works: Sequence[Promise], result: Sequence[Any]) -> Promise:
        def about() -> str:
            return next((w.about() for w in works if not w.is_completed()), "the operation")

        promise = Promise(_device_of(result), works[0].sequel if works else None, about)
        if not works:
            promise.keep(result)
            return promise
        futures: list[Future[Any]] = [work.get_future() for work in works]
        whole = cast("Future[Any]", collect_all(futures))  # pyright: ignore[reportUnknownVariableType]
        self._hand_on(whole, promise, result)
        return promise

    def _hand_on(self, future: Future[Any], promise: Promise, result: object) -> None:
        def finish(done: Future[Any]) -> None:
            try:
                value = done.value()
                for one in cast("list[Any]", value) if isinstance(value, list) else ():
                    if isinstance(one, _Future):
                        one.value()
            except Exception as error:  # noqa: BLE001  (it is handed on, not swallowed)
                promise.break_(error)
            else:
                promise.keep(result)

        future.then(finish)

    def _next_collective(self) -> Key:
        sequel = current_sequel()
        if sequel is None or sequel.group is not self:
            return self._next_key(self._stream)
        stream = _stream_of(f"{self._life} after {sequel.key.stream} {sequel.key.seq}")
        return Key(stream, sequel.number())

    def _next_key(self, stream: int) -> Key:
        with self._lock:
            seq = self._next.get(stream, 0)
            self._next[stream] = seq + 1
            return Key(stream, seq)

    def _claim(self, key: Key) -> bool:
        """Take that very number, if it is the next one."""
        with self._lock:
            if self._next.get(key.stream, 0) != key.seq:
                return False
            self._next[key.stream] = key.seq + 1
            return True

    def _pair(self, sender: int, receiver: int, tag: int) -> int:
        """Messages of one pair and tag are numbered apart: their order is theirs alone."""
        sender, receiver = place_of(sender, self.size()), place_of(receiver, self.size())
        if sender == receiver:  # both ends would take numbers of one stream, and never meet
            raise UsageError("a message of a rank to itself", hint="copy the tensor: a.copy_(b)")
        return _stream_of(f"{self._life} {sender}>{receiver} {tag}")


def _device_of(tensors: Sequence[Any]) -> torch.device | None:
    for item in tensors:
        found = item.device if isinstance(item, Tensor) else _device_of(item)
        if found is not None and found.type != "cpu":
            return found
    return None


def _stream_of(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
