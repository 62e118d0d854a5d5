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

Threads: the link's reader, which asks where to put what arrives; this engine's, which takes it,
adds up and answers cuts; the courier's, which encode and send; one for errands that wait for the
meeting point. The machine is driven under one lock, from whichever thread has an event.
docs/rounds.md is the protocol.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
from torch import Tensor

from manyhands.collectives import events as e
from manyhands.collectives import instructions as i
from manyhands.collectives import messages as m
from manyhands.collectives.adder import Adder
from manyhands.collectives.alone import Alone
from manyhands.collectives.bank import Bank, pool_for
from manyhands.collectives.courier import Courier
from manyhands.collectives.errands import Errands
from manyhands.collectives.layout import Layout
from manyhands.collectives.machine import RoundMachine
from manyhands.collectives.mail import Mail
from manyhands.collectives.outcomes import Committed, Outcome, State, Stopped, Task
from manyhands.collectives.outlook import Outlook
from manyhands.collectives.passes import Pass, check_weight
from manyhands.collectives.pool import Block
from manyhands.collectives.post import AHEAD_BYTES, Post
from manyhands.collectives.pursuit import Pursuit
from manyhands.collectives.ranges import Ranges
from manyhands.collectives.refusal import OnRefusal
from manyhands.collectives.results import Result, digest_of, form_of
from manyhands.collectives.shares import NO_RESYNCS, Resyncs
from manyhands.collectives.shelf import Shelf
from manyhands.collectives.standing import Course
from manyhands.collectives.threads import start_thread
from manyhands.collectives.words import Words
from manyhands.core.errors import Excluded, LinkTimeout, ManyhandsError, UsageError, WireError
from manyhands.core.peers import PeerId, View
from manyhands.links.base import DEFAULT_TIMEOUT_S, Delivery, Gap, Link

log = logging.getLogger(__name__)

BEHIND_BYTES = 256 << 20  # results that a newcomer keeps until the state is here; at least four
_TICK_S = 0.2  # how often a thread that waits looks whether it shall end


class Rounds:
    """See the module. Thread-safe; `close` joins the threads and leaves the link open."""

    def __init__(
        self,
        link: Link,
        tensors: Sequence[Tensor],
        *,
        num_samples: Callable[[int], int],
        num_rounds: int | Callable[[], int] | None = None,
        harmless: Callable[[int], bool] = lambda round_: False,
        wire: str = "fp32",
        refuse: bool = True,
        on_refusal: OnRefusal = OnRefusal.SKIP,
        resyncs: Resyncs = NO_RESYNCS,
        num_measured: int | None = None,
        form: str | None = None,
        state: State | None = None,
        mail: Mail | None = None,
        vouched: bool = False,
    ) -> None:
        """For tensors like these. `mail`: the link's `place`, so that what arrives lands where it
        stays. `wire`, `refuse`, `num_measured`: see codecs, adder, layout; `harmless`, `resyncs`:
        `Course`. `form`: what peers must have in common, in words; else the tensors and how they
        travel. `vouched`: the meeting point is this process's own, and need not be asked."""
        self._link, self._state, self._vouched = link, state, vouched
        self._mail = mail or Mail()
        self._me = link.me.incarnation
        self.layout = Layout.of(tensors, link.terms.part_bytes, num_measured=num_measured)
        course = Course(
            num_parts=self.layout.num_parts,
            num_samples=num_samples,
            num_rounds=num_rounds,
            harmless=harmless,
            form=form_of(self.layout, wire) if form is None else form,
            on_refusal=on_refusal,
            resyncs=resyncs,
        )
        self._machine = RoundMachine(self._me, course)
        self._pool = pool_for(self.layout, wire, AHEAD_BYTES)
        self._mail.pool = self._pool
        self._bank = Bank(self.layout, wire, self._pool)
        self._adder = Adder(self.layout, self._bank, self._pool, refuse=refuse)
        self._alone = Alone(self._bank, refuse=refuse)
        self._most_sums = max(4 * self.layout.num_parts, BEHIND_BYTES // self._pool.block_bytes)
        self.report: Callable[[int, m.SelfReport], m.SelfReport] = lambda round_, report: report
        """A seam: what this peer says of itself with part 0 of a round."""
        self.note: Callable[[Sequence[m.Part]], bytes] = lambda parts: b""
        """A seam: what the lead makes of everybody's reports."""
        self._lock = threading.RLock()  # guards the machine and everything below
        self._news = threading.Condition(self._lock)
        self._outcomes: deque[Outcome] = deque()
        self._pursuit = Pursuit(self._outcomes, link.terms.lease_s, self.abort)
        self._attempt: i.Begin | None = None
        self._sent: set[int] = set()  # parts of this attempt that went before they were asked for
        self._early: Pass | None = None
        self._stopped = False
        self._errands = Errands(f"errands {link.me}", self._fail)
        self._courier = Courier(link, self._fail)
        ended = lambda: self._stopped or self._machine.stopped  # noqa: E731
        self._words = Words(link, self._errands, self._courier, ended, self._feed, self._fail)
        self._aside = Courier(link, self._fail, skip_s=link.terms.lease_s)
        most = link.terms.part_bytes
        self._post = Post(self._courier, self._aside, self._bank, self._pool, most, self._lock)
        self._shelf = Shelf(self._pool, self._post.tell_taken)
        self.outlook = Outlook(self._news, self._machine, self._shelf, self._outcomes)
        self._reader: threading.Thread | None = None

    # -- the user's side ------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to serve what arrives."""
        self._reader = start_thread(self._read, f"rounds {self._link.me}")

    def offer_state(self, applied: int, chain: bytes, record: m.Record | None = None) -> None:
        """The run may start from this state, or confirm it. After round 0: see `Committed`."""
        self._feed(e.StateOffered(applied, chain, record))

    def next(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> Outcome:
        """What happens next. Raises LinkTimeout; after a Stopped, that again."""
        with self._news:
            if self._machine.behind and self._pursuit.look(self._machine.applied):
                self._feed(e.CaughtUp())
            if not self._news.wait_for(lambda: self._outcomes, timeout_s):
                raise LinkTimeout(f"news of round {self._machine.applied}", timeout_s)
            return self._pursuit.take()

    def contribute(
        self, task: Task, tensors: Sequence[Tensor], *, weight: float, ranges: Ranges | None = None
    ) -> None:
        """A pass over `ranges` (the whole task) is done; `tensors` hold its weighted sums.

        They are lent until the round is committed, or the engine stopped. A pass that does not
        count any more (see `Task.generation`) is dropped in silence.
        """
        self.open_pass(task, tensors, weight=weight, ranges=ranges).done()

    def open_pass(
        self, task: Task, tensors: Sequence[Tensor], *, weight: float, ranges: Ranges | None = None
    ) -> Pass:
        """Like `contribute` for tensors that are not final yet: say so with `Pass.ready`."""
        flats = self.layout.check(tensors, on_gpu=True)
        weight = check_weight(weight)
        opened = Pass(self, task, task.ranges if ranges is None else ranges, flats, weight)
        with self._lock:
            if self._early is not None and self._sent:
                raise UsageError(
                    "parts of the pass before are on their way", hint="finish it: call done()"
                )
            current = task.generation == self._bank.generation
            shown = current and weight > 0 and self._bank.show(flats, weight)
            self._early = opened if shown else None
        return opened

    def send_ready(self, opened: Pass, tensor: int) -> None:
        """See `Pass.ready`."""
        with self._lock:
            begin = self._attempt
            if opened is not self._early or begin is None or self._me not in begin.members:
                return
            same = (begin.round, begin.claims) == (opened.task.round, opened.ranges)
            if not same or len(begin.members) == 1:
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
            if opened is self._early:
                self._early = None
            if opened.task.generation == self._bank.generation:
                if opened.weight > 0:
                    self._bank.lend(opened.flats, opened.weight)
                last = not self._machine.claims - self._machine.bank - opened.ranges
                fit = last and self._machine.members == (self._me,) and self._alone.fits()
                self._feed(e.Computed(opened.task.round, opened.ranges, fit))

    def abort(self, error: ManyhandsError) -> None:
        """This peer cannot go on: `next` says Stopped with this error."""
        self._stop(Stopped(None, error.message, error))

    def measure_speed(self, speed: int) -> None:
        """This peer's speed, as an integer; shares follow it."""
        self._feed(e.SpeedMeasured(speed))

    def leave(self, *, finished: bool = True) -> None:
        """Leave in good order; `next` says Stopped when that is done.

        `finished`: if all leave, the run is over, and nobody shall go on with it.
        """
        self._feed(e.LeaveAsked(finished))

    def send_snapshot(self, head: m.Snapshot, to: PeerId, buffers: Sequence[memoryview]) -> None:
        """A piece of the state for a newcomer; does not block. It must not change until it left.

        A newcomer that takes nothing for a whole lease does not get it.
        """
        with self._lock:
            self._post.send(to.incarnation, head, buffers)

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

    def name_of(self, incarnation: int) -> PeerId | None:
        """What the views call it, or have called it."""
        return self._post.name_of(incarnation)

    def close(self) -> None:
        """Stop. The link stays open, and is the caller's: closed before, it holds up nothing here.

        To the others this peer is still there: `leave` first, or close the link next.
        """
        self._stop(Stopped(None, "closed"))
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join()
        for helper in (self._errands, self._courier, self._aside):
            helper.close()

    # -- events and instructions ----------------------------------------------------------------

    def _feed(self, event: e.Event) -> None:
        self._feed_all([event])

    def _feed_all(self, events: Sequence[e.Event]) -> None:
        with self._lock:
            waiting = deque(events)
            while waiting and not self._stopped:
                caused: list[e.Event] = []
                lease = time.monotonic() < self._link.lease_start_s() + self._link.terms.lease_s
                for instruction in self._machine.handle(waiting.popleft(), lease=lease):
                    caused += self._do(instruction)
                # First what follows from it: a part that is added up leaves before the next one.
                waiting.extendleft(reversed(caused))

    def _do(self, instruction: i.Instruction) -> Sequence[e.Event]:
        match instruction:
            case i.Begin():
                self._begin(instruction)
            case i.Compute():
                task = Task(instruction.round, instruction.ranges, self._bank.generation)
                if instruction.risky:
                    self._words.when_heard(lambda: self._tell(task))
                else:
                    self._tell(task)
            case i.Send():
                return self._send(instruction)
            case i.AddUp():
                return [self._add_up(instruction.sum)]
            case i.Conclude():
                part = self._reported(instruction.part)
                return [self._alone.conclude(instruction.sum, self.note([part]))]
            case i.Commit():
                self._commit(instruction)
            case i.Stable():
                self._shelf.keep(None)
                self._tell(instruction)
            case i.ConfirmLease(round_, attempt):
                if self._vouched:
                    return [e.LeaseConfirmed(round_, attempt)]
                self._words.confirm(instruction)
            case i.DropBank():
                self._clear_bank()
            case i.DropParts(round_, attempt):
                self._shelf.drop_parts(lambda key: key[:2] == (round_, attempt))
            case i.DropSums(round_, attempt):
                self._shelf.drop_sums(lambda key: key[:2] == (round_, attempt))
            case i.Discard():
                self._shelf.discard(instruction.arrival)
            case i.DropState():
                self._pursuit.start_over()
                self._shelf.clear()
                self._clear_bank()
                self._tell(instruction)
            case i.Tell():
                self._words.say(instruction.word)
            case i.TakeState() | i.Retry() | i.Lost() | i.Settled() | i.Generation():
                self._tell(instruction)
            case i.Stop():  # once its last word is said
                self._errands.run(self._stop, Stopped(instruction.reason, instruction.text))
        return ()

    def _tell(self, outcome: Outcome) -> None:
        with self._news:
            self._outcomes.append(outcome)
            self._news.notify_all()

    def _begin(self, begin: i.Begin) -> None:
        cut = begin.attempt.cut
        if self._attempt is None or cut != self._attempt.attempt.cut:
            self._mail.forget(cut)
        self._attempt = begin
        self._bank.begin(exact=begin.exact)
        self._sent.clear()
        self._shelf.begin(cut, self._post.begin(begin))

    def _clear_bank(self) -> None:
        self._bank.clear()
        self._early = None

    def _add_up(self, head: m.Sum) -> e.Summed:
        filed = self._shelf.contributions(head)
        head, block = self._adder.add_up(head, filed, self._me)
        if head.k == 0:
            notes = self.note([one.part for one in filed.values()])
            head = msgspec.structs.replace(head, notes=notes)
        self._shelf.drop_contributions(head)
        digest = digest_of(block)
        self._shelf.add_sum(head, block)
        return e.Summed(head, digest)

    def _commit(self, commit: i.Commit) -> None:
        own = self._alone.take(commit)
        num_parts = self.layout.num_parts if own is None else 0
        blocks = self._shelf.take_round(commit.round, commit.attempt, num_parts)
        codecs = self._bank.codecs_of(exact=commit.sums[0].exact)
        result = Result(self.layout, codecs, blocks, self._pool, own)
        self._shelf.keep(result)
        self._bank.committed()
        self._early = None
        facts = (commit.sums, commit.record, commit.chain, commit.member, commit.closing)
        self._tell(Committed(commit.round, result, *facts))

    def _stop(self, last: Stopped) -> None:
        with self._lock:
            if not self._stopped:
                self._stopped = True
                self._tell(last)

    def _fail(self, error: ManyhandsError) -> None:
        if self._machine.stopped:
            return  # its own last word, which is under way, says why
        reason = i.StopReason.EXCLUDED if isinstance(error, Excluded) else None
        self._stop(Stopped(reason, f"the link ended: {error}", error))

    # -- sending --------------------------------------------------------------------------------

    def _send(self, send: i.Send) -> Sequence[e.Event]:
        message = send.message
        match message:
            case m.Part():
                self._bank.fetch()
                if message.k not in self._sent and send.to is not None:
                    return self._send_part(send.to, message)
            case m.Sum() | m.Fill():
                head = message if isinstance(message, m.Sum) else message.sum
                self._post.send_result(send.to, message, self._shelf.result(head))
            case m.Snapshot():
                name = None if send.to is None else self._post.name_of(send.to)
                if self._state is not None and name is not None:
                    self._state.give(message, name)
            case _:
                self._post.send(send.to, message)
        return ()

    def _send_part(self, to: int, part: m.Part) -> Sequence[e.Event]:
        """Send a contribution; to oneself it goes by way of the events."""
        part = self._reported(part)
        if to == self._me:
            self._shelf.add_part(to, part, None, own=True)
            return [e.PartArrived(to, part, refused=not self._adder.is_own_whole(part))]
        self._post.send_part(to, part)
        return ()

    def _reported(self, part: m.Part) -> m.Part:
        report = None if part.report is None else self.report(part.round, part.report)
        bank = self._bank
        return msgspec.structs.replace(part, weight=bank.weight, report=report, exact=bank.exact)

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
        finally:  # whatever it was: the user waits for news
            self._fail(ManyhandsError("the thread that reads has failed; the log says why"))

    def _see(self, view: View) -> None:
        with self._lock:
            self._post.see(view)
            self.outlook.first = self.outlook.first or view
            self._feed(e.ViewSeen(view))
            self._news.notify_all()

    def _deliver(self, delivery: Delivery) -> None:
        try:
            message, block = self._mail.open(delivery)
        except WireError as error:
            log.warning("%s sent what is no message about rounds: %s", delivery.sender, error)
            return
        with self._lock:
            if (record := m.record_of(message)) is not None:
                self._feed(e.RecordSeen(record))
            if isinstance(message, m.Snapshot):
                if self._state is not None:
                    self._state.arrived(delivery.sender, message, delivery.buffers)
            else:
                self._arrived(delivery.sender.incarnation, message, block)

    def _arrived(self, sender: int, message: m.AnyMessage, block: Block | None) -> None:
        match message:
            case m.Part():
                if self._shelf.add_part(sender, message, block):
                    whole = self._adder.is_whole(message, block)
                    self._feed(e.PartArrived(sender, message, refused=not whole))
                    self.outlook.heard()
            case m.Sum():
                if (filed := self._file_sum(sender, message, block)) is not None:
                    self._feed(e.SumArrived(sender, message, digest_of(filed)))
            case m.Fill():
                if (filed := self._file_sum(sender, message.sum, block)) is not None:
                    self._feed(e.FillArrived(sender, message, digest_of(filed)))
            case m.Status():
                self._feed(e.StatusArrived(sender, message))
            case m.Ask():
                self._feed(e.AskArrived(sender, message.number))
                self.outlook.heard()
            case m.Want():
                self._feed(e.WantArrived(sender, message.round))
            case m.RoundGone():
                self._feed(e.RoundGoneArrived(sender, message.round))
            case m.Taken():
                self._post.taken(sender, message.cut, message.total)
            case m.Snapshot():
                pass  # not about a round under way: see `_deliver`

    def _file_sum(self, sender: int, head: m.Sum, block: Block | None) -> Block | None:
        """The block that it lies in from now on; None if it is of no use."""
        self._pursuit.heard = max(self._pursuit.heard, head.round + 1)
        block = self._pool.take(0) if block is None else block
        if block.tensor.numel() == self._adder.result_bytes(head):
            followed = self._pursuit.num_followed * self.layout.num_parts
            if len(self._shelf.sums) + followed >= self._most_sums and not self._machine.active:
                self._shelf.drop_sums(lambda key: True)  # the state takes too long to come, or user
                self._pursuit.lose(self._machine.applied)
                self._feed(e.GapSeen())
            return block if self._shelf.add_sum(head, block) else None
        log.warning("part %d of a result came with the wrong size from %s", head.k, sender)
        self._pool.give(block)
        return None
