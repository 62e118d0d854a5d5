"""Crew: the workers as their boss sees them, at a hub in the boss's own process.

with Crew(hub, 2) as crew:
    crew.gather(timeout_s=60)
    crew.call(crew, lambda number, worker: words.Clear(number))
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, Self, TypeVar, overload

from manyhands._version import __version__
from manyhands.compat.bossman.errors import NoWorkers
from manyhands.core.address import HubAddress, is_loopback
from manyhands.core.errors import (
    LinkError,
    LinkTimeout,
    ManyhandsError,
    PeerGone,
    UsageError,
    WireError,
)
from manyhands.core.peers import PEER_NAME_HINT, PeerId, View, is_peer_name
from manyhands.links.base import Delivery, dial, new_peer
from manyhands.links.hub import Hub
from manyhands.links.messages import Ready
from manyhands.stages import commands as words
from manyhands.stages.errors import PlanBroken, StepFailed

log = logging.getLogger(__name__)
T = TypeVar("T")
ANSWER_S = 1800.0  # for a worker that lives
_PARTING_S = 2.0
_SHOWN = 8  # of those who were turned away
_MOST_WARNED = 1000
_SAME = f"the boss is of {__version__}, and both have to be of one"
_ODD = f"what it says is not understood; {_SAME}"


class Worker(NamedTuple):
    """One of them, as it has introduced itself."""

    name: str
    device: str
    free_bytes: int | None  # None: its system does not say
    peer: PeerId


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What came of a command: of the boss's own part, and from each worker."""

    result: T | None
    error: ManyhandsError | None
    answers: Mapping[Worker, words.Answer]
    lost: tuple[Worker, ...]


class Crew(Sequence[Worker]):
    """Those who are here, in order of coming. Thread-safe; `close` sends them home."""

    def __init__(self, hub: Hub, num_wanted: int) -> None:
        self._hub, self._num_wanted = hub, num_wanted
        self._changed = threading.Condition()
        self._workers: dict[int, Worker] = {}  # by incarnation
        self._answers: dict[tuple[int, int], words.Answer] = {}  # by command, worker
        self._turned_away: deque[str] = deque(maxlen=_SHOWN)
        self._warned: set[int] = set()  # incarnations that were told off, once
        self._asked = 0  # the command whose answers count
        self._error: ManyhandsError | None = None
        self._closed = False
        self._turn = threading.Lock()  # one command at a time
        self._numbers = itertools.count(1)
        self._link = dial(replace(hub.near, run=words.RUN), new_peer(words.BOSS), words.SETTINGS)
        self._link.tell(Ready())
        self._reader = threading.Thread(target=self._read, name="bossman workers", daemon=True)
        self._reader.start()
        # A program that follows BossMan's README ends without a word: its workers go home then.
        atexit.register(self.close)

    @property
    def address(self) -> HubAddress:
        """Where workers come to."""
        return self._hub.address

    @property
    def near(self) -> HubAddress:
        """The same for this process."""
        return self._hub.near

    def _here(self) -> list[Worker]:
        with self._changed:
            return list(self._workers.values())

    def __len__(self) -> int:
        return len(self._here())

    @overload
    def __getitem__(self, index: int) -> Worker: ...

    @overload
    def __getitem__(self, index: slice) -> list[Worker]: ...

    def __getitem__(self, index: int | slice) -> Worker | list[Worker]:
        return self._here()[index]

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._here())

    def gather(self, timeout_s: float) -> None:
        """Return when all are here. Raises NoWorkers, which says how many came."""
        with self._changed:
            self._changed.wait_for(
                lambda: len(self._workers) >= self._num_wanted or self._error or self._closed,
                timeout_s,
            )
            if self._error is not None:
                raise self._error
            came = tuple(worker.name for worker in self._workers.values())
            if len(came) < self._num_wanted:
                raise NoWorkers(came, self._num_wanted, timeout_s, hint=self._hint())

    def _hint(self) -> str:
        address = self.address
        hint = f"`manyhands worker` with MODEL_HOST={address.host} MODEL_PORT={address.port}"
        if not address.insecure:
            hint += " and the MODEL_TOKEN that was printed"
        if is_loopback(address.host):
            hint += "; workers on other machines cannot reach that: set MODEL_HOST here, too, to "
            hint += "the address they know this machine by"
        if self._turned_away:
            hint += f". Turned away: {'; '.join(self._turned_away)}"
        return hint

    # -- commands ---------------------------------------------------------------------------------

    def call(
        self,
        workers: Sequence[Worker],
        make: Callable[[int, Worker], words.Command],
        own: Callable[[], T] | None = None,
    ) -> Outcome[T]:
        """A command to each, meanwhile the boss's own part, then all answers.

        Returns as soon as it is clear that the plan is broken, and who is gone.
        """
        with self._turn:
            number = next(self._numbers)
            with self._changed:
                self._asked = number
            for worker in workers:
                with contextlib.suppress(PeerGone):  # the answers will tell
                    words.say(self._link, worker.peer, make(number, worker))
            result, error = None, None
            try:
                result = None if own is None else own()
            except (PlanBroken, StepFailed, UsageError) as raised:
                error = raised
            broken = isinstance(error, PlanBroken)
            answers = self._collect(number, workers, broken=broken)
            with self._changed:
                lost = [
                    worker for worker in workers if worker.peer.incarnation not in self._workers
                ]
        return Outcome(result, error, answers, tuple(lost))

    def trouble(self, workers: Sequence[Worker]) -> str | None:
        """While a command is carried out: who of these cannot any more, and why; None: nobody."""
        with self._changed:
            for worker in workers:
                if worker.peer.incarnation not in self._workers:
                    return f"worker {worker.name} is gone"
                answer = self._answers.get((self._asked, worker.peer.incarnation))
                if isinstance(answer, words.Failed):
                    return f"worker {worker.name}: {answer.message}"
            return None

    def _collect(
        self, number: int, workers: Sequence[Worker], *, broken: bool
    ) -> Mapping[Worker, words.Answer]:
        # When a plan is broken, its peers may be far away in a layer: whoever is gone is known
        # after a lease.
        limit_s = self._link.terms.lease_s if broken else ANSWER_S
        keys = {worker: (number, worker.peer.incarnation) for worker in workers}

        def missing() -> list[str]:
            return [
                worker.name
                for worker, key in keys.items()
                if key not in self._answers and key[1] in self._workers
            ]

        def lost() -> bool:
            return any(key[1] not in self._workers for key in keys.values())

        with self._changed:
            deadline_s = time.monotonic() + limit_s
            self._changed.wait_for(
                lambda: self._error or not missing() or (broken and lost()),
                max(0.0, deadline_s - time.monotonic()),
            )
            if self._error is not None:
                raise PlanBroken(f"the boss has lost its own hub: {self._error.message}")
            if missing() and not broken:
                raise LinkTimeout(f"answer from {', '.join(missing())}", limit_s)
            found = {
                worker: self._answers[key] for worker, key in keys.items() if key in self._answers
            }
            self._answers.clear()
            return found

    # -- what the workers say ---------------------------------------------------------------------

    def _read(self) -> None:
        try:
            while True:
                try:
                    event = self._link.receive()
                except LinkTimeout:
                    continue
                match event:
                    case View():
                        self._see(event)
                    case Delivery():
                        self._hear(event)
                    case _:
                        pass
        except ManyhandsError as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _see(self, view: View) -> None:
        with self._changed:
            gone = [number for number in self._workers if view.member(number) is None]
            for number in gone:
                name = self._workers.pop(number).name
                if not self._closed:
                    log.warning("worker %s is gone", name)
            self._changed.notify_all()

    def _hear(self, delivery: Delivery) -> None:
        sender = delivery.sender
        try:
            word = words.heard_by_boss(delivery)
        except WireError as error:
            if self._is_first(sender):
                log.warning("not understood: %s", error)
                if sender.incarnation not in self._workers:  # it would wait for commands
                    self._turned_away.append(f"{sender} ({_ODD})")
                    self._refuse(sender, _ODD)
            return
        if isinstance(word, words.Offer):
            reason = self._admit(word, sender)
            if reason is not None and self._is_first(sender):
                log.warning("worker %r (%s) is turned away: %s", word.name, sender, reason)
                self._refuse(sender, reason)
            return
        with self._changed:
            # What nobody waits for is not kept: it may come without end.
            if sender.incarnation in self._workers and word.id == self._asked:
                self._answers[word.id, sender.incarnation] = word
                self._changed.notify_all()

    def _refuse(self, sender: PeerId, reason: str) -> None:
        with contextlib.suppress(PeerGone):
            words.say(self._link, sender, words.Refuse(reason))

    def _is_first(self, sender: PeerId) -> bool:
        """Whether this is the first wrong word of a sender: one that goes on fills no log."""
        if len(self._warned) >= _MOST_WARNED:
            self._warned.clear()
        first = sender.incarnation not in self._warned
        self._warned.add(sender.incarnation)
        return first

    def _admit(self, offer: words.Offer, peer: PeerId) -> str | None:
        """Why not, if not."""
        with self._changed:
            if peer.incarnation in self._workers:
                return "it is here already, and says so once more"
            reason = None
            shown = offer.name if is_peer_name(offer.name) else repr(offer.name)
            if not (is_peer_name(offer.name) and is_peer_name(offer.device)):
                reason = f"its name or its device cannot be: {PEER_NAME_HINT}"
            elif offer.release != __version__:
                # Its words may be others, and of one that it cannot read nobody hears.
                reason = f"it is of release {offer.release[:40]!r}; {_SAME}"
            elif offer.name in {words.BOSS, *(w.name for w in self._workers.values())}:
                reason = f"there is a peer named {offer.name} already: a name of its own for each"
            elif len(self._workers) >= self._num_wanted:
                reason = f"all {self._num_wanted} workers are here"
            if reason is not None:
                self._turned_away.append(f"{shown} ({reason})")
                return reason
            self._workers[peer.incarnation] = Worker(
                offer.name, offer.device, offer.free_bytes, peer
            )
            log.info("worker %s: %s, %s bytes free", offer.name, offer.device, offer.free_bytes)
            self._changed.notify_all()
            return None

    # -- life -------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def dismiss(self) -> None:
        """Send the workers home, and wait a little until they have gone. Idempotent."""
        with self._changed:
            first, self._closed = not self._closed, True
            workers = list(self._workers.values())
            self._changed.notify_all()
        if not first:
            return
        for worker in workers:
            with contextlib.suppress(LinkError):
                words.say(self._link, worker.peer, words.Dismiss())
        with self._changed:  # so that none of them sees the hub vanish
            self._changed.wait_for(lambda: not self._workers or self._error, _PARTING_S)

    def close(self) -> None:
        """Send the workers home and end the hub. Idempotent."""
        atexit.unregister(self.close)
        self.dismiss()
        self._link.close()
        self._reader.join()
        self._hub.close()
