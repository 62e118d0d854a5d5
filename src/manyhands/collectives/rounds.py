"""Rounds: the averaging engine over a link. It carries out what the round machine decides.

    rounds = Rounds(link, tensors, num_samples=lambda r: 512, num_rounds=100)
    rounds.start()
    rounds.offer_state(applied=0, chain=b"")
    while True:
        match rounds.next():
            case Task() as task:               # compute these samples; tensors := weighted sums
                rounds.contribute(task, tensors, weight=len(task.ranges))
            case Committed() as committed:     # the mean over the round's samples
                committed.result.read_into(tensors)
                committed.result.close()
            case Stopped():
                break

Three threads: the link's reader, which asks where to put what arrives; this engine's, which takes
it, adds up and answers cuts; the courier's, which encodes and sends. The machine is driven under
one lock, from whichever thread has an event. docs/rounds.md is the protocol.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
from torch import Tensor

from manyhands.collectives import events as e
from manyhands.collectives import instructions as i
from manyhands.collectives import messages as m
from manyhands.collectives.adder import Adder
from manyhands.collectives.bank import Bank
from manyhands.collectives.courier import Courier, Letter
from manyhands.collectives.flow import Sending
from manyhands.collectives.layout import Layout
from manyhands.collectives.machine import RoundMachine
from manyhands.collectives.mail import Mail
from manyhands.collectives.outcomes import Committed, Outcome, State, Stopped, Task
from manyhands.collectives.pool import Block, Pool
from manyhands.collectives.ranges import Ranges
from manyhands.collectives.results import Result, digest_of
from manyhands.collectives.shelf import PartKey, Shelf
from manyhands.collectives.standing import Course
from manyhands.collectives.threads import start_thread
from manyhands.core.errors import LinkTimeout, ManyhandsError, UsageError, WireError
from manyhands.core.peers import PeerId, View, ViewNumber
from manyhands.links.base import DEFAULT_TIMEOUT_S, Delivery, Gap, Link

log = logging.getLogger(__name__)

AHEAD_BYTES = 64 << 20  # contributions that wait at an owner, of all members together
_SPARE_BLOCKS = 64  # that nobody uses, besides those of one result
_TICK_S = 1.0  # how often the engine's thread looks whether it shall end


class Pass:
    """One pass over a task whose tensors become final one after the other, the last ones first."""

    def __init__(self, rounds: Rounds, task: Task, ranges: Ranges) -> None:
        self._rounds, self.task, self.ranges = rounds, task, ranges

    def ready(self, tensor: int) -> None:
        """This tensor and all after it are final: what they fill is sent while others are not."""
        self._rounds.send_ready(self, tensor)

    def done(self) -> None:
        """All are."""
        self._rounds.finish_pass(self)


class Rounds:
    """See the module. Thread-safe; `close` joins the threads and leaves the link open."""

    def __init__(
        self,
        link: Link,
        tensors: Sequence[Tensor],
        *,
        num_samples: Callable[[int], int],
        num_rounds: int | None = None,
        wire: str = "fp32",
        refuse: bool = True,
        state: State | None = None,
        mail: Mail | None = None,
    ) -> None:
        """For tensors like these. `mail`: the link's `place`, so that what arrives lands where it
        stays. `wire` and `refuse`: see codecs, adder."""
        self._link, self._state = link, state
        self._mail = mail or Mail()
        self._me = link.me.incarnation
        self.layout = Layout.of(tensors, link.terms.part_bytes)
        course = Course(
            num_parts=self.layout.num_parts, num_samples=num_samples, num_rounds=num_rounds
        )
        self._machine = RoundMachine(self._me, course)
        block_bytes = max(part.num_bytes for part in self.layout.parts)
        self._pool = Pool(block_bytes, self.layout.num_parts + _SPARE_BLOCKS)
        self._mail.pool = self._pool
        self._bank = Bank(self.layout, wire, self._pool)
        self._adder = Adder(self.layout, self._bank, self._pool, refuse=refuse)
        self._shelf = Shelf(self._pool, self._allowance, self._tell_taken)
        self.report: Callable[[m.SelfReport], m.SelfReport] = lambda report: report
        """A seam: what this peer says of itself with part 0."""
        self.note: Callable[[Sequence[m.Part]], bytes] = lambda parts: b""
        """A seam: what the lead makes of everybody's reports."""
        self._lock = threading.RLock()  # guards the machine and everything below
        self._news = threading.Condition(self._lock)
        self._outcomes: deque[Outcome] = deque()
        self._names: dict[int, PeerId] = {}
        self._attempt: i.Begin | None = None
        self._sent: set[int] = set()  # parts of this attempt that went before they were asked for
        self._early: Pass | None = None
        self._sending: dict[tuple[ViewNumber, int], Sending] = {}
        self._held: deque[tuple[int, m.Part]] = deque()
        self._stopped = False
        self._errands = ThreadPoolExecutor(1, f"lease {link.me}")
        self._courier = Courier(link, self._fail)
        self._reader: threading.Thread | None = None

    # -- the user's side ------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to serve what arrives."""
        self._reader = start_thread(self._read, f"rounds {self._link.me}")

    def offer_state(self, applied: int, chain: bytes) -> None:
        """This peer has a state: the run may start from it, or confirm it."""
        self._feed(e.StateOffered(applied, chain))

    def next(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> Outcome:
        """What happens next. Raises LinkTimeout; after a Stopped, that again."""
        with self._news:
            if not self._news.wait_for(lambda: self._outcomes, timeout_s):
                raise LinkTimeout(f"news of round {self._machine.applied}", timeout_s)
            if isinstance(self._outcomes[0], Stopped):
                return self._outcomes[0]
            return self._outcomes.popleft()

    def contribute(
        self, task: Task, tensors: Sequence[Tensor], *, weight: float, ranges: Ranges | None = None
    ) -> None:
        """A pass over `ranges` (the whole task) is done; `tensors` hold its weighted sums.

        They are lent until the round is committed.
        """
        self.open_pass(task, tensors, weight=weight, ranges=ranges).done()

    def open_pass(
        self, task: Task, tensors: Sequence[Tensor], *, weight: float, ranges: Ranges | None = None
    ) -> Pass:
        """Like `contribute` for tensors that are not final yet: say so with `Pass.ready`."""
        flats = self.layout.check(tensors)
        if not weight >= 0:
            raise UsageError(f"a weight of {weight} is none", hint="at least 0")
        opened = Pass(self, task, task.ranges if ranges is None else ranges)
        with self._lock:
            if task.generation == self._bank.generation and weight > 0:
                first = self._bank.empty
                self._bank.lend(flats, weight)
                self._early = opened if first else None
        return opened

    def send_ready(self, opened: Pass, tensor: int) -> None:
        """See `Pass.ready`."""
        with self._lock:
            begin = self._attempt
            if opened is not self._early or begin is None or begin.claims != opened.ranges:
                return
            if begin.round != opened.task.round or self._me not in begin.members:
                return
            # Part 0 comes last, with what is known only when the pass is done.
            for k in reversed(range(max(1, self.layout.ready_from(tensor)), self.layout.num_parts)):
                if k not in self._sent:
                    self._sent.add(k)
                    part = m.Part(begin.round, begin.attempt, k, opened.ranges)
                    self._feed_all(self._send_part(begin.members[k % len(begin.members)], part))

    def finish_pass(self, opened: Pass) -> None:
        """See `Pass.done`."""
        with self._lock:
            self._early = None
            if opened.task.generation == self._bank.generation:
                self._feed(e.Computed(opened.task.round, opened.ranges))

    def measure_speed(self, speed: int) -> None:
        """This peer's speed, as an integer; shares follow it."""
        self._feed(e.SpeedMeasured(speed))

    def leave(self) -> None:
        """Leave in good order; `next` says Stopped when that is done."""
        self._feed(e.LeaveAsked())

    def snapshot_arrived(self, sender: PeerId, head: m.Snapshot) -> None:
        """All of the state that this peer asked for is here."""
        self._feed(e.SnapshotArrived(sender.incarnation, head))

    @property
    def applied(self) -> int:
        """Rounds committed."""
        return self._machine.applied

    @property
    def members(self) -> tuple[int, ...]:
        """The incarnations that take part in the round under way."""
        return self._machine.members

    @property
    def view(self) -> View | None:
        """The newest view."""
        return self._machine.view

    def close(self) -> None:
        """Stop at once. The link stays open, and is the caller's."""
        with self._lock:
            self._stop(Stopped(None, "closed"))
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join()
        self._courier.close()
        self._errands.shutdown()

    # -- events and instructions ----------------------------------------------------------------

    def _feed(self, event: e.Event) -> None:
        self._feed_all([event])

    def _feed_all(self, events: Sequence[e.Event]) -> None:
        with self._lock:
            waiting = deque(events)
            while waiting and not self._stopped:
                for instruction in self._machine.handle(waiting.popleft(), lease=self._lease()):
                    waiting.extend(self._do(instruction))

    def _lease(self) -> bool:
        return time.monotonic() < self._link.lease_start_s() + self._link.terms.lease_s

    def _do(self, instruction: i.Instruction) -> Sequence[e.Event]:
        match instruction:
            case i.Begin():
                self._begin(instruction)
            case i.Compute():
                self._tell(Task(instruction.round, instruction.ranges, self._bank.generation))
            case i.Send():
                return self._send(instruction)
            case i.AddUp():
                return [self._add_up(instruction.sum)]
            case i.Commit():
                self._commit(instruction)
            case i.Stable():
                self._shelf.keep(None)
                self._tell(instruction)
            case i.DropBank():
                self._bank.clear()
            case i.DropParts(round_, attempt):
                self._shelf.drop_parts(lambda key: key[:2] == (round_, attempt))
            case i.DropSums(round_, attempt):
                self._shelf.drop_sums(lambda key: key[:2] == (round_, attempt))
            case i.Discard():
                self._shelf.discard(instruction.arrival)
            case i.TakeState():
                if self._state is not None:
                    self._state.take(instruction.snapshot)
            case i.DropState():
                self._shelf.clear()
                self._bank.clear()
                if self._state is not None:
                    self._state.drop(instruction.reason)
            case i.Tell():
                self._link.tell(instruction.word)
            case i.ConfirmLease():
                self._errands.submit(self._confirm, instruction)
            case i.Retry() | i.Settled() | i.Generation():
                self._tell(instruction)
            case i.Stop():
                self._stop(Stopped(instruction.reason, instruction.text))
        return ()

    def _tell(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        self._news.notify_all()

    def _confirm(self, wanted: i.ConfirmLease) -> None:
        try:
            self._link.renew_lease()
        except ManyhandsError as error:
            self._fail(error)
        else:
            self._feed(e.LeaseConfirmed(wanted.round, wanted.attempt))

    def _begin(self, begin: i.Begin) -> None:
        cut = begin.attempt.cut
        if self._attempt is None or cut != self._attempt.attempt.cut:
            self._sending = {key: a for key, a in self._sending.items() if key[0] >= cut}
            self._shelf.forget_accounts(cut)
        self._attempt = begin
        self._sent.clear()
        self._held = deque(held for held in self._held if held[1].attempt >= begin.attempt)

    def _add_up(self, head: m.Sum) -> e.Summed:
        keys = {
            s.peer: PartKey(head.round, head.attempt, head.k, s.peer) for s in head.contributions
        }
        filed = {peer: self._shelf.parts[key] for peer, key in keys.items()}
        head, block = self._adder.add_up(head, filed, self._me)
        if head.k == 0:
            notes = self.note([one.part for one in filed.values()])
            head = msgspec.structs.replace(head, notes=notes)
        for key in keys.values():
            self._shelf.drop_part(key)
        self._shelf.add_sum(head, block)
        return e.Summed(head, digest_of(block))

    def _commit(self, commit: i.Commit) -> None:
        blocks = self._shelf.take_round(commit.round, commit.attempt, self.layout.num_parts)
        result = Result(self.layout, self._bank.codecs, blocks, self._pool)
        self._shelf.keep(result)
        self._bank.committed()
        self._tell(
            Committed(commit.round, result, commit.sums, commit.record, commit.chain, commit.member)
        )

    def _stop(self, last: Stopped) -> None:
        if not self._stopped:
            self._stopped = True
            self._tell(last)

    def _fail(self, error: ManyhandsError) -> None:
        with self._lock:
            self._stop(Stopped(None, f"the link ended: {error}", error))

    # -- sending --------------------------------------------------------------------------------

    def _send(self, send: i.Send) -> Sequence[e.Event]:
        message = send.message
        match message:
            case m.Part():
                if message.k not in self._sent:
                    assert send.to is not None
                    return self._send_part(send.to, message)
            case m.Sum():
                self._post(send.to, message, [self._shelf.result(message).view])
            case m.Fill():
                self._post(send.to, message, [self._shelf.result(message.sum).view])
            case m.Snapshot():
                name = None if send.to is None else self._names.get(send.to)
                if self._state is not None and name is not None:
                    self._state.give(message, name)
            case _:
                self._post(send.to, message, ())
        return ()

    def _send_part(self, to: int, part: m.Part) -> Sequence[e.Event]:
        """Send a contribution; to oneself it goes by way of the events."""
        report = None if part.report is None else self.report(part.report)
        part = msgspec.structs.replace(part, weight=self._bank.weight, report=report)
        if to == self._me:
            self._shelf.add_part(to, part, None, own=True)
            return [e.PartArrived(to, part)]
        if self._account(part.attempt.cut, to).may_send():
            self._post_part(to, part)
        else:
            self._held.append((to, part))
        return ()

    def _send_held(self) -> None:
        held, self._held = self._held, deque()
        for to, part in held:
            if self._account(part.attempt.cut, to).may_send():
                self._post_part(to, part)
            else:
                self._held.append((to, part))

    def _account(self, cut: ViewNumber, to: int) -> Sending:
        return self._sending.setdefault((cut, to), Sending(self._allowance()))

    def _allowance(self) -> int:
        others = 1 if self._attempt is None else max(1, len(self._attempt.members) - 1)
        return max(4 * self._link.terms.part_bytes, AHEAD_BYTES // others)

    def _post_part(self, to: int, part: m.Part) -> None:
        num_bytes = self._bank.num_bytes(part.k)
        self._account(part.attempt.cut, to).sent += num_bytes
        if not num_bytes:
            self._post(to, part, ())
            return
        leave: list[Callable[[], None]] = []

        def buffers() -> Sequence[memoryview]:
            with self._lock:
                if self._bank.empty:  # it was dropped: this attempt is void for everybody
                    return ()
                views, left = self._bank.coded(part.k)
            leave.append(left)
            return views

        def sent() -> None:
            for left in leave:
                left()

        self._post(to, part, buffers, None if self._bank.codecs[part.k].raw else sent)

    def _tell_taken(self, sender: int, cut: ViewNumber, total: int) -> None:
        self._post(sender, m.Taken(cut, total), ())

    def _post(
        self,
        to: int | None,
        message: m.AnyMessage,
        buffers: Sequence[memoryview] | Callable[[], Sequence[memoryview]],
        sent: Callable[[], None] | None = None,
    ) -> None:
        address = None if to is None else self._names.get(to)
        if to is not None and address is None:
            return  # gone from the view: a cut says so to everybody
        urgent = not isinstance(message, m.Part)
        self._courier.post(Letter(address, m.encode(message), buffers, sent), urgent=urgent)

    # -- receiving ------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            while not self._stopped:
                try:
                    event = self._link.receive(_TICK_S)
                except LinkTimeout:
                    continue
                match event:
                    case Delivery():
                        self._deliver(event)
                    case View():
                        self._see(event)
                    case Gap():
                        self._feed(e.GapSeen())
        except ManyhandsError as error:
            self._fail(error)

    def _see(self, view: View) -> None:
        with self._lock:
            self._names.update({line.peer.incarnation: line.peer for line in view.roster})
            self._feed(e.ViewSeen(view))

    def _deliver(self, delivery: Delivery) -> None:
        sender = delivery.sender.incarnation
        try:
            message, block = self._mail.open(delivery)
        except WireError as error:
            log.warning("%s sent what is no message about rounds: %s", delivery.sender, error)
            return
        with self._lock:
            self._arrived(sender, message, block)

    def _arrived(self, sender: int, message: m.AnyMessage, block: Block | None) -> None:
        match message:
            case m.Part():
                if self._shelf.add_part(sender, message, block):
                    whole = self._adder.is_whole(message, block)
                    self._feed(e.PartArrived(sender, message, refused=not whole))
            case m.Sum():
                if self._file_sum(sender, message, block):
                    assert block is not None
                    self._feed(e.SumArrived(sender, message, digest_of(block)))
            case m.Fill():
                if self._file_sum(sender, message.sum, block):
                    assert block is not None
                    self._feed(e.FillArrived(sender, message, digest_of(block)))
            case m.Status():
                self._feed(e.StatusArrived(sender, message))
            case m.Ask():
                self._feed(e.AskArrived(sender, message.number))
            case m.Want():
                self._feed(e.WantArrived(sender, message.round))
            case m.RoundGone():
                self._feed(e.RoundGoneArrived(sender, message.round))
            case m.Taken():
                account = self._account(message.cut, sender)
                account.taken = max(account.taken, message.total)
                self._send_held()
            case m.Snapshot():
                pass  # its bytes are the trainer's; `snapshot_arrived` says when all are here

    def _file_sum(self, sender: int, head: m.Sum, block: Block | None) -> bool:
        if block is not None and block.tensor.numel() == self._adder.wire_bytes(head.k):
            return self._shelf.add_sum(head, block)
        log.warning("part %d of a result came with the wrong size from %s", head.k, sender)
        if block is not None:
            self._pool.give(block)
        return False
