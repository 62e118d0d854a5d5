"""Team: a fixed roster over a link, and the operations that its members carry out together.

    any thread ── start ──► exchanges ──► courier ──► link
    link's reader ── place ──► memory of the tensors, or a block
    team's reader ◄── receive ── link;  adds up, passes results on, calls `done`

A death is an error on every member: the exchanges that are under way end with an error that names
the peer and the operation, and so does every later one. The link is closed before anybody is told,
so that nothing is written any more into memory that its owner has back.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from manyhands.collectives.backend import messages as words
from manyhands.collectives.backend.dispatch import Dispatch
from manyhands.collectives.backend.early import Arrival, Early, Placed
from manyhands.collectives.backend.exchange import GIVEN, Exchange, Key, Wanted
from manyhands.collectives.backend.failure import (
    GaveUp,
    TeamFailed,
    awaited,
    blaming,
    broken_here,
    disagreement,
    judge_parted,
    judge_time,
    judge_view,
    put_out,
    surplus,
    told,
    twice,
)
from manyhands.collectives.courier import Courier, Letter
from manyhands.collectives.flow import Accounts
from manyhands.collectives.pool import Block, Pool
from manyhands.collectives.threads import start_thread
from manyhands.core.errors import Excluded, LinkError, LinkTimeout, ManyhandsError, WireError
from manyhands.core.peers import PeerId, View
from manyhands.links.base import Delivery, Gap, Link
from manyhands.links.messages import Gone, Leaving

log = logging.getLogger(__name__)

AHEAD_BYTES = 64 << 20  # what all others together may make a slow member hold
_STALL_S = 60.0  # an operation that waits this long is reported, once
_TICK_S = 1.0  # how often deadlines are looked at
_PARTING_S = 10.0  # for what is still on its way when a member leaves
_LAST_S = 1.0  # for the others to leave first


class Team:
    """Thread-safe. `close` says goodbye and joins all threads."""

    def __init__(
        self,
        link: Link,
        roster: Sequence[PeerId],
        view: View,
        *,
        other_words: Callable[[int, words.Any, Sequence[memoryview]], None],
    ) -> None:
        self.link, self.roster = link, tuple(roster)
        self.rank = self.roster.index(link.me)
        self.pool = Pool(link.terms.part_bytes, keep_blocks=32)
        self._other_words = other_words
        self._ranks = {peer.incarnation: rank for rank, peer in enumerate(self.roster)}
        # Held while contributions are added up and results put in place, and taken before `_lock`:
        # whoever needs only the books must not wait for arithmetic.
        self._adding = threading.Lock()
        # Guards everything below, and what an exchange expects: that changes under both.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # the view
        self._running: dict[Key, Exchange] = {}
        self._early = Early()
        self._placed: dict[tuple[int, bytes], Placed] = {}
        self._accounts = Accounts(len(self.roster), AHEAD_BYTES, link.terms.part_bytes)
        self._parted: set[int] = set()
        self._view = view
        self._error: ManyhandsError | None = None
        self._closing = False
        self._any: list[Wanted] = []
        self._courier = Courier(link, self.fail)
        self._dispatch = Dispatch(self.roster, self._courier, self._accounts.sending, self._settled)
        self._reader: threading.Thread | None = None
        self._looked_s = 0.0  # at the deadlines

    def start_reading(self) -> None:
        """Begin to serve what arrives; once, when whoever needs it knows this team."""
        self._reader = start_thread(self._read, f"team {self.link.me}")

    # -- operations -----------------------------------------------------------------------------

    def start(
        self,
        exchange: Exchange,
        key: Key,
        timeout_s: float,
        done: Callable[[BaseException | None], None],
    ) -> None:
        """Carry it out. `done` is called once, on a thread of the team's or on this one."""
        exchange.key, exchange.done = key, done
        exchange.started_s = time.monotonic()
        exchange.deadline_s = exchange.started_s + timeout_s
        came_early: Sequence[Arrival] = ()
        try:
            with self._lock:
                failed = self._error
                if failed is None:
                    self._running[key] = exchange
                    # While nothing has left: later, it may be the last that they needed.
                    self._check_parted(exchange, exchange.readers())
                    came_early, exchange.shown = self._early.take(key)
                    self._dispatch.add(exchange, exchange.outgoing)
            if failed is not None:
                return done(told(failed, exchange))
            self._use_early(exchange, came_early)
            with self._lock:
                exchange.starting = False
                if self._running.get(key) is exchange:
                    self._check_parted(exchange, exchange.waits_for())
                    self._say_here(exchange)
                    self._check_done(exchange)
        except ManyhandsError as error:
            return self.fail(error)
        except Exception as error:  # noqa: BLE001  (whatever it is, others wait for this member)
            return self.fail(broken_here(exchange.form, error))

    def send(self, rank: int, word: words.Word, buffers: Sequence[memoryview] = ()) -> None:
        """A word to one member, for whoever shares this team's link."""
        self._courier.post(Letter(self.roster[rank], words.encode(word), buffers), urgent=True)

    def awaits(self, exchange: Exchange) -> str:
        """What an operation that is under way waits for, in words."""
        with self._lock:
            return awaited(exchange, self._dispatch.late(exchange))

    def on_any(self, wanted: Wanted) -> None:
        """Have it take the first data that comes, or has come already."""
        try:
            with self._lock:
                failed = self._error
                if failed is None:
                    if any(wanted.take(key) for key in self._early.waiting()):
                        return
                    self._any.append(wanted)
                    for key, rank in wanted.keys().items():
                        if self._accounts.receiving[rank].full:
                            self.send(rank, words.Here(*key))
                    self._check_waiting()
            if failed is not None:
                wanted.fail(failed)
        except ManyhandsError as error:
            self.fail(error)  # or somebody else has: whoever is first, fails `wanted` too

    # -- sending --------------------------------------------------------------------------------

    def _push_held(self) -> None:
        for exchange in self._dispatch.push_held():
            self._check_done(exchange)  # nothing else may be left to tell it

    def _settled(self, exchange: Exchange) -> None:
        try:
            with self._lock:
                exchange.unsettled -= 1
                self._check_done(exchange)
        except ManyhandsError as error:
            self.fail(error)

    def _say_here(self, exchange: Exchange) -> None:
        for rank in exchange.waits_for():
            if self._accounts.receiving[rank].full:
                self.send(rank, words.Here(*exchange.key))

    # -- receiving ------------------------------------------------------------------------------

    def place(
        self, sender: PeerId, message: bytes, sizes: tuple[int, ...]
    ) -> Sequence[memoryview] | None:
        """Where the buffer of a message goes; asked on the link's thread."""
        if len(sizes) != 1:
            return None
        try:
            word = words.decode(message)
        except WireError:
            return None  # the reader will say what is wrong with it
        rank = self._ranks.get(sender.incarnation)
        if not isinstance(word, words.Piece) or rank is None:
            return None
        with self._lock:
            if self._error is not None:
                return None
            exchange = self._running.get(Key(word.stream, word.seq))
            target = None
            if exchange is not None and exchange.form == word.form and rank in exchange.members:
                spot = (exchange.members.index(rank), word.step, word.k)
                target = exchange.targets.get(spot)
            if target is not None and target.into is not None and target.num_bytes == sizes[0]:
                self._placed[rank, message] = Placed(word, None)
                return [target.into]
            block = self.pool.take(sizes[0])
            self._placed[rank, message] = Placed(word, block)
            return [block.view]

    def _read(self) -> None:
        try:
            while True:
                self._check_deadlines()
                try:
                    event = self.link.receive(_TICK_S)
                except LinkTimeout:
                    continue
                match event:
                    case Delivery():
                        self._deliver(event)
                    case View():
                        self._see(event)
                    case Gap():
                        raise TeamFailed("messages for this member were lost on their way")
        except ManyhandsError as error:
            self.fail(error)
        except Exception as error:  # whatever it is, nobody may wait for this thread any more
            log.exception("the reader of %s failed", self.link.me)
            self.fail(TeamFailed(f"this member failed: {error!r}"))

    def _deliver(self, delivery: Delivery) -> None:
        rank = self._ranks.get(delivery.sender.incarnation)
        if rank is None:
            self._turn_away(delivery)
            return
        placed = self._placed.pop((rank, delivery.message), None)
        if placed is not None:
            self._take_piece(rank, placed, len(delivery.buffers[0]))
            return
        word = words.decode(delivery.message)
        match word:
            case words.Piece():
                # It came before there was a team to say where it goes.
                if len(delivery.buffers) != 1:
                    raise TeamFailed(
                        f"rank {rank} sent piece {word.k} of `{word.form}` without data"
                    )
                block = self.pool.take(len(delivery.buffers[0]))
                block.view[:] = delivery.buffers[0]
                self._take_piece(rank, Placed(word, block), len(block.view))
            case words.Here():
                with self._lock:
                    key = Key(word.stream, word.seq)
                    exchange = self._running.get(key)
                    if exchange is None:
                        self._early.show(key, rank)
                    else:
                        exchange.shown.add(rank)
                        self._push_held()
            case words.Taken():
                with self._lock:
                    account = self._accounts.sending[rank]
                    account.taken = max(account.taken, word.total)
                    self._push_held()
            case words.Goodbye():
                with self._lock:
                    self._parted.add(rank)
                    self._check_waiting()
                self._other_words(rank, word, ())
            case words.Failed():
                raise GaveUp(f"rank {rank} ({self.roster[rank]}) gave up: {word.reason}")
            case _:
                self._other_words(rank, word, delivery.buffers)

    def _turn_away(self, delivery: Delivery) -> None:
        """A stranger asks for a seat: all are taken, unless this team is about to end."""
        try:
            word = words.decode(delivery.message)
        except WireError:
            return  # another kind of run
        if isinstance(word, words.Hello) and not self._parted:
            reason = f"all {len(self.roster)} ranks of this run are taken"
            refusal = words.encode(words.Refusal(reason))
            self._courier.post(Letter(delivery.sender, refusal), urgent=True)

    def _take_piece(self, rank: int, placed: Placed, num_bytes: int) -> None:
        piece, block = placed
        key = Key(piece.stream, piece.seq)
        with self._adding:
            with self._lock:
                if self._error is not None:
                    return
                self._accounts.receiving[rank].came += num_bytes
                exchange = self._running.get(key)
                if exchange is None:
                    self._keep_early(rank, key, placed)
                    return
                if rank not in exchange.shown:
                    exchange.shown.add(rank)
                    self._push_held()
            self._use(exchange, rank, piece, block)

    def _keep_early(self, rank: int, key: Key, placed: Placed) -> None:
        """Its operation has not started here, or has ended."""
        if placed.block is None:
            raise twice(rank, self.roster[rank], placed.piece)
        self._early.keep(key, Arrival(rank, placed.piece, placed.block))
        self._match_any(key)
        if self._accounts.receiving[rank].full:
            for waiting in self._running.values():
                if rank in waiting.waits_for():
                    self.send(rank, words.Here(*waiting.key))
            for wanted in self._any:
                for other, sender in wanted.keys().items():
                    if sender == rank:
                        self.send(rank, words.Here(*other))

    def _match_any(self, key: Key) -> None:
        for wanted in self._any:
            if wanted.take(key):
                self._any.remove(wanted)
                return

    def _use_early(self, exchange: Exchange, came: Sequence[Arrival]) -> None:
        for arrival in came:
            with self._adding:
                with self._lock:
                    if self._running.get(exchange.key) is not exchange:
                        return  # the team has failed, and the memory is its owner's again
                self._use(exchange, *arrival)

    def _use(self, exchange: Exchange, rank: int, piece: words.Piece, block: Block | None) -> None:
        """Put a piece to use: a block, or (None) what has been received in its place.

        Under `_adding`, of an exchange that runs.
        """
        if piece.form != exchange.form:
            raise disagreement(exchange, rank, self.roster[rank], piece.form)
        place = exchange.members.index(rank)
        spot = (place, piece.step, piece.k)
        owned = exchange.owned.get(piece.k) if piece.step == GIVEN else None
        complete, results = False, ()
        if owned is not None and block is not None and len(block.view) == owned.num_bytes:
            if owned.adding.has(place):
                raise twice(rank, self.roster[rank], piece)
            num_bytes = owned.num_bytes
            with blaming(exchange, (rank, self.roster[rank])):
                complete = owned.offer(place, block, self.pool)
                results = owned.finish() if complete else ()
        else:
            target = exchange.targets.get(spot)
            if target is None or (block and len(block.view) != target.num_bytes):
                raise surplus(exchange, rank, self.roster[rank], piece.k, target)
            num_bytes = target.num_bytes
            with blaming(exchange, (rank, self.roster[rank])):
                target.fill(block)
            if block is not None:
                self.pool.give(block)
        with self._lock:
            # Together with its results' leaving: without it the exchange may count as done.
            if complete:
                del exchange.owned[piece.k]
            else:
                exchange.targets.pop(spot, None)
            told = self._accounts.receiving[rank].use(num_bytes)
            if told is not None:
                self.send(rank, words.Taken(told))
            self._dispatch.add(exchange, results)
            self._check_done(exchange)

    def _check_done(self, exchange: Exchange) -> None:
        if exchange.arrived and not exchange.unsettled and self._running.get(exchange.key):
            if self._dispatch.holds(exchange):
                return
            with blaming(exchange):  # while it is among those that are told of a failure
                for act in exchange.last:
                    act()
            del self._running[exchange.key]
            self._early.finish(exchange.key)
            exchange.done(None)

    # -- life -----------------------------------------------------------------------------------

    def _see(self, view: View) -> None:
        with self._lock:
            before, self._view = self._view, view
            self._changed.notify_all()
            error = judge_view(self.roster, self._parted, before, view)
        if error is not None:
            raise error

    def _check_waiting(self) -> None:
        """Whoever said goodbye sends and takes nothing more: does anybody here wait for it?

        Data that has left for it is not waited for: it may have been the last that it needed.
        """
        for exchange in self._running.values():
            if not exchange.starting:
                self._check_parted(exchange, exchange.waits_for())
        for exchange, readers in self._dispatch.waiting():
            self._check_parted(exchange, readers)
        for wanted in self._any:
            senders = set(wanted.keys().values())
            if senders <= self._parted:
                names = ", ".join(f"rank {rank}" for rank in sorted(senders))
                raise TeamFailed(f"`recv` from any rank: all others ({names}) left the group")

    def _check_parted(self, exchange: Exchange, needed: Iterable[int]) -> None:
        error = judge_parted(exchange, needed, self.roster, self._parted)
        if error is not None:
            raise error

    def _check_deadlines(self) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_s < _TICK_S / 2:
            return
        self._looked_s = now_s
        # While the meeting point is away, nobody else is to blame.
        connected = now_s < self.link.lease_start_s() + self.link.terms.lease_s
        with self._lock:
            if any(now_s > wanted.deadline_s for wanted in self._any):
                raise TeamFailed("`recv` from any rank: nobody sent anything within the timeout")
            for exchange in self._running.values():
                # Only then: it looks through all that is held back.
                overdue = now_s > exchange.deadline_s
                late = self._dispatch.late(exchange) if overdue else ()
                error = judge_time(exchange, late, self.roster, now_s)
                if error is not None:
                    raise error
                waited_s = now_s - exchange.started_s
                if connected and not exchange.reported and waited_s > _STALL_S:
                    exchange.reported = True
                    who = self.awaits(exchange)
                    log.warning("`%s` has waited %.0f s for %s", exchange.form, waited_s, who)

    def fail(self, error: ManyhandsError) -> None:
        """Nothing works from here on. Tells the others why, closes the link, then tells us.

        An operation that fails before its `start` is none of the team's: whoever wants it is told
        by whoever calls this.
        """
        # What the link says, the others hear from theirs.
        told_by_link = isinstance(error, LinkError) and not isinstance(error, TeamFailed)
        if isinstance(error, Excluded):
            error = put_out(error)
        with self._lock:
            if self._error is not None:
                return
            self._error = error
        if not (told_by_link or isinstance(error, GaveUp)):
            with contextlib.suppress(ManyhandsError):
                reason = str(error).replace("this rank", f"rank {self.rank}")[:1000]
                self.link.send(None, words.encode(words.Failed(reason)), timeout_s=1.0)
                self.link.flush(1.0)
        self.link.close()
        with self._adding, self._lock:  # what is being written into is not given back before
            running, self._running = list(self._running.values()), {}
            self._early.clear()
            self._dispatch.clear()
            wanted, self._any = self._any, []
        self._other_words(self.rank, words.Failed(str(error)[:1000]), ())
        for exchange in running:
            exchange.done(told(error, exchange))
        for receive in wanted:
            receive.fail(TeamFailed(f"`recv` from any rank failed: {error}"))

    def close(self) -> None:
        """Leave in peace: finish what is on its way, say goodbye, join all threads. Idempotent."""
        with self._lock:
            first, self._closing = not self._closing, True
            failed = self._error is not None
        if first and not failed:
            self._courier.post(Letter(None, words.encode(words.Goodbye())))
            if self._courier.drain(_PARTING_S, self._is_answered):
                self._see_others_off()
                with contextlib.suppress(ManyhandsError):
                    self.link.tell(Leaving())
                    self.link.tell(Gone(self._view.cut))
                    self.link.flush(1.0)
        self.link.close()
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join()
        self._courier.close()

    def _is_answered(self) -> bool:
        """Whether the meeting point has shown lately that it is there."""
        silence_s = time.monotonic() - self.link.lease_start_s()
        return silence_s < self.link.terms.lease_s / 2

    def _see_others_off(self) -> None:
        """The first member leaves last, unless the others stay: a broker's last peer cleans up.

        Whoever came next would find a run there, and wait a lease for its members to come back.
        """
        with self._lock:
            self._changed.wait_for(self._others_are_off, _LAST_S)

    def _others_are_off(self) -> bool:
        here = [m.peer for m in self._view.roster if m.peer.incarnation in self._ranks]
        return self._error is not None or here[:1] != [self.link.me] or len(here) == 1
