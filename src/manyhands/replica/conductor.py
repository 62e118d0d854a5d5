"""Conductor: how the user's loop meets the rounds. It deals out turns: single runs of its body.

    turn = conductor.next_turn()            a piece of this peer's share, or of weight 0
    ...                                     the body: forward, backward
    committed = conductor.close_turn(...)   the round's mean; None: the round goes on

Most often a turn is the peer's whole share and closes the round. A share may take several, and so
may a make-up share after somebody's death. A peer without samples, and one that follows to catch
up, have their turn after the round was committed: their gradient counts nothing, and the mean
takes its place.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
from torch import Tensor

from manyhands.collectives.instructions import (
    DropState,
    Generation,
    Lost,
    Retry,
    Settled,
    Stable,
    StopReason,
    TakeState,
)
from manyhands.collectives.messages import Record, Snapshot
from manyhands.collectives.outcomes import Committed, Outcome, Stopped, Task
from manyhands.collectives.ranges import EMPTY, Ranges
from manyhands.collectives.rounds import Rounds
from manyhands.core.errors import (
    Excluded,
    LinkError,
    LinkTimeout,
    ManyhandsError,
    UsageError,
)
from manyhands.core.peers import PeerState
from manyhands.links.passing import passes
from manyhands.replica.agenda import Agenda
from manyhands.replica.cap import Cap
from manyhands.replica.openings import Openings, opened_chain

log = logging.getLogger(__name__)

_TICK_S = 1.0  # how often a wait looks around; what is waited for wakes it
_AGAIN_S = 0.5  # between two attempts to come back, if the first one failed

AGAIN = (StopReason.EXCLUDED, StopReason.SENT_BACK)
Event = Retry | Lost | Settled | Generation | Stable | DropState | Stopped


@dataclass(slots=True)
class Turn:
    """One run of the loop body."""

    round: int  # as the user counts them
    number: int  # as the engine does
    ranges: Ranges  # what it computes, in units of the round; empty: its gradient does not count
    task: Task | None = None  # that it belongs to; None: the round is committed already
    last: bool = True  # completes what is asked of this peer so far
    committed: Committed | None = None
    ended: bool = False  # its backward was done
    evaluates: bool = False  # nothing is learnt from it; `round` is how many came before
    resyncs: bool = False  # no body: all adopt what one peer gives; `round` is the next one


@dataclass(frozen=True, slots=True)
class Base:
    """Where the user's thread stands: rounds it has applied, and what proves it."""

    applied: int  # those of openings and re-syncs too
    chain: bytes
    record: Record | None = None
    openings: Openings = field(default_factory=Openings)

    @property
    def round(self) -> int:
        """How many rounds with samples were applied, evaluations among them: see `Agenda`."""
        return self.count(self.applied)

    @property
    def resyncs(self) -> bool:
        """Whether the next round is a re-sync."""
        return self.record is not None and self.record.resync

    def count(self, number: int) -> int:
        """Of so many of the engine's rounds, those with samples: of the next, or the last ones."""
        return self.openings.count(self._bare(number))

    def _bare(self, number: int) -> int:
        """Without the re-syncs so far. A later one is not known, nor where earlier ones were."""
        return number if self.record is None else number - self.record.num_resyncs + self.resyncs

    def is_opening(self, number: int) -> bool:
        """Whether that round, the next one, is of an opening."""
        return not self.resyncs and self.openings.is_opening(self._bare(number))

    def is_gathering(self, number: int) -> bool:
        """Whether it is the one that waits for others."""
        return self.openings.is_gathering(self._bare(number))

    def open(self, about: bytes) -> Base:
        """A run may start from here, of what `about` is a digest of. Nobody has another state yet
        that would need a re-sync.
        """
        record = self.record
        if record is not None and record.resync:
            before = record.num_resyncs - 1
            record = msgspec.structs.replace(record, resync=False, num_resyncs=before)
        openings = self.openings.opened(self._bare(self.applied))
        return Base(self.applied, opened_chain(self.chain, about), record, openings)


@dataclass
class Conductor:
    """Used by the user's thread alone. Whoever is excluded comes back by itself.

    `connect` joins the run anew and returns an engine that serves. `take` loads a state that came.
    `look` is called whenever there is time, `between` when the state is the one after so many
    rounds: between two bodies. `enough`: so many follow that the first round with samples may
    begin, for which this peer waits `gather_s` at most. `nothing` is a contribution that counts
    nothing. `cap`: of passes that train. `offers`: this peer has a state that a run may start from.
    `outage_s`: so long a meeting point is looked for that cannot be reached when it comes back.
    """

    connect: Callable[[], Rounds]
    take: Callable[[Snapshot], Base]
    tell: Callable[[Event], None]
    look: Callable[[], None]
    between: Callable[[int], None]
    enough: Callable[[Rounds], bool]
    nothing: Sequence[Tensor]
    base: Base
    agenda: Agenda
    cap: Cap
    gather_s: float
    offers: bool = True
    outage_s: float = 60.0
    over: bool = False
    _rounds: Rounds | None = None
    _todo: deque[Turn] = field(default_factory=deque[Turn])
    _pending: Outcome | None = None
    _leaving: bool = False
    _speed: int = 0
    healing: bool = False
    """The state of this peer is not the run's, and others shall not have it."""
    left_outside: bool = False
    """It was put out, and asked to leave before it was back: others may have gone on."""

    @property
    def rounds(self) -> Rounds:
        """The engine; another one after an exclusion."""
        assert self._rounds is not None, "begin first"
        return self._rounds

    def begin(self, wait: Callable[[Rounds], bool]) -> None:
        """Join, and offer the state once `wait` has returned; if it says so. Else it was asked to
        leave, and nobody knows it.
        """
        self._rounds = self.connect()
        if wait(self._rounds):
            self._offer()
        else:
            self.over = True

    def measure_speed(self, speed: int) -> None:
        """Shares follow it, also after an exclusion."""
        self._speed = speed
        self.rounds.measure_speed(speed)

    def leave(self, *, finished: bool) -> None:
        """Leave in good order: `next_turn` goes on until the others can do without this peer.

        `finished`: if nobody is left, the run is over.
        """
        if not self._leaving:
            self._leaving = True
            self.rounds.leave(finished=finished)

    def heal(self) -> None:
        """Leave in good order, which disturbs nobody, and come back for the others' state."""
        if not self.healing:
            self.healing = True
            self.rounds.leave(finished=False)

    # -- turns ----------------------------------------------------------------------------------

    def next_turn(self) -> Turn | None:
        """What to compute next; None when the run is over, or this peer has left it."""
        while not self.over:
            self.look()
            if self._todo:
                return self._todo.popleft()
            outcome = self._next()
            match outcome:
                case Task() if outcome.round < self.base.applied:
                    pass  # it was told late, and the round was committed without it
                case Task() if self.base.is_opening(outcome.round):
                    self._open(outcome)
                case Task():
                    self._plan(outcome)
                case Committed(closing=True):
                    outcome.result.close()
                case Committed() if self.base.is_opening(outcome.round):
                    outcome.result.close()
                    self.advance(outcome)
                    self.between(self.base.applied)  # before the next round has another state
                case Committed():
                    turn = self._turn(outcome.round, EMPTY)
                    turn.committed = outcome
                    return turn
                case TakeState():
                    self.base, self.offers = self.take(outcome.snapshot), True
                    self.healing = False
                    self._todo.clear()
                case Stopped():
                    self._on_stopped(outcome)
                case _:
                    self.tell(outcome)
        return None

    def close_turn(self, turn: Turn, tensors: Sequence[Tensor], weight: float) -> Committed | None:
        """Its backward is done. Returns what is committed, once it is; None if more is to do."""
        turn.ended = True
        if turn.committed is not None:
            return turn.committed
        assert turn.task is not None
        self.rounds.contribute(turn.task, tensors, weight=weight, ranges=turn.ranges)
        if not turn.last:
            return None
        while True:
            outcome = self._next()
            match outcome:
                case Committed() if outcome.round == turn.number:
                    return outcome
                case Retry() | Settled() | Generation() | Stable():
                    self.tell(outcome)
                case _:
                    self._pending = outcome
                    return None

    def put_back(self, committed: Committed) -> None:
        """Nobody has applied it: the next turn is to."""
        self._pending = committed

    def advance(self, committed: Committed) -> None:
        """The user's thread has applied it, or will before its next turn."""
        openings = self.base.openings
        self.base = Base(committed.round + 1, committed.chain, committed.record, openings)

    def finish(self, turn: Turn | None, *, ended: bool) -> None:
        """The loop has ended: until this peer may exit. `turn`: that it was in the middle of.

        `ended`: the run has, too; else it is left.
        """
        if self._rounds is None or self.over:
            return
        self.healing = False  # too late: there is no turn left to take up
        if turn is not None:
            self._todo.appendleft(turn)
        if not ended:
            self.leave(finished=True)
        while (turn := self.next_turn()) is not None:
            if turn.committed is not None:
                turn.committed.result.close()
            else:
                self._decline(turn)

    def _decline(self, turn: Turn) -> None:
        """Nobody computes here any more. If all leave, the round is empty; else others redo it.

        Whoever goes on gives to the round, and waits for this peer. One that adds up nothing would
        not see that, and is not needed to end the run. If only followers go on, nobody gives: they
        wait for a round that takes them in.
        """
        assert turn.task is not None
        outlook = self.rounds.outlook
        while active := self._active():
            if outlook.given or not outlook.owns or active.isdisjoint(self.rounds.members):
                self.rounds.abort(Excluded("its loop has ended, and others go on"))
                self.over = True
                return
            if self._pause():
                continue
            if not isinstance(self._pending, Task):
                return
            more, self._pending = self._pending, None
            self._plan(more)  # of somebody who has died; this turn is still owed
        self.rounds.contribute(turn.task, self.nothing, weight=0.0, ranges=turn.ranges)

    def _active(self) -> set[int]:
        """Who does not leave."""
        view = self.rounds.view
        assert view is not None, "a turn comes after the first view"
        return {peer.incarnation for peer in view.peers(PeerState.ACTIVE)}

    def close(self) -> None:
        """Let go of the run. Idempotent."""
        self.over = True
        if self._rounds is not None:
            self._rounds.close()

    # -- outcomes -------------------------------------------------------------------------------

    def _next(self) -> Outcome:
        while self._pending is None:
            try:
                return self.rounds.next(_TICK_S)
            except LinkTimeout:
                self.look()  # the link itself says when somebody, or the meeting point, is gone
                if self.rounds.outlook.is_stranded:
                    self.healing = False  # nobody is left to have another state
                    with suppress(UsageError):  # one has just come
                        self._offer()
                if not self.offers and self.rounds.outlook.must_start:
                    self._rejoin()  # behind those who can
        outcome, self._pending = self._pending, None
        return outcome

    def _plan(self, task: Task) -> None:
        count = self.base.count(task.round)
        most = self.agenda.most_of(count)
        if not self.agenda.evaluates(count):
            most = min(most, self.cap.most(len(task.ranges)))
        pieces = task.ranges.pieces([most] * -(-len(task.ranges) // most))
        self._todo.extend(self._turn(task.round, piece, task) for piece in pieces)
        self._todo[-1].last = True

    def _turn(self, number: int, ranges: Ranges, task: Task | None = None) -> Turn:
        count, resyncs = self.base.count(number), self.base.resyncs
        return Turn(
            self.agenda.round(count),
            number,
            ranges,
            task,
            last=task is None,
            evaluates=not resyncs and self.agenda.evaluates(count),
            resyncs=resyncs,
        )

    def _open(self, task: Task) -> None:
        """A round without samples: as its only member, hold it until enough others follow.

        Not for ever: while nothing is committed, nobody who has missed the round before can come.
        """
        if self.base.is_gathering(task.round):
            end_s = time.monotonic() + self.gather_s
            while not (self._leaving or self.enough(self.rounds) or time.monotonic() > end_s):
                if not self._pause():
                    break
            if time.monotonic() > end_s and not self.enough(self.rounds):
                log.warning(
                    "after %g s the run begins without some of its peers, which may still come in",
                    self.gather_s,
                )
        self.rounds.contribute(task, self.nothing, weight=0.0)

    def _pause(self) -> bool:
        """Wait for news of the others; False if an outcome has come that must be dealt with."""
        self.look()
        if not self.rounds.outlook.wait_for_news(min(_TICK_S, self.gather_s / 2)):
            return True
        outcome = self._next()
        match outcome:
            case Retry() | Settled() | Generation() | Stable():
                self.tell(outcome)
                return True
            case _:
                self._pending = outcome
                return False

    def _on_stopped(self, last: Stopped) -> None:
        self.tell(last)
        healed = self.healing and last.reason is StopReason.LEFT
        if (healed or last.reason in AGAIN) and not self._leaving:
            self._rejoin()
            return
        self.over = True
        if last.reason in (StopReason.FINISHED, StopReason.LEFT, StopReason.OVER, *AGAIN):
            return
        raise last.error or ManyhandsError(last.text)

    def _rejoin(self) -> None:
        """As a new incarnation, with the state of the last round that was applied here, if any.

        A meeting point that has gone away is looked for as long as by a link that breaks. Who is
        asked to leave meanwhile is outside already.
        """
        self._todo.clear()
        self.rounds.close()
        give_up_s = time.monotonic() + self.outage_s
        while True:
            try:
                self._rounds = self.connect()
                break
            except ManyhandsError as error:
                # Excluded: again, before it had come in. One that is put out whenever it comes
                # must not dial without a pause, nor for ever.
                may_pass = passes(error) or isinstance(error, Excluded)
                if not may_pass or time.monotonic() > give_up_s:
                    raise
                log.warning("could not come back yet: %s", error)
                time.sleep(_AGAIN_S)
            self.look()
            if self._leaving:
                self.left_outside = True
                self._pending = Stopped(StopReason.LEFT, "asked to leave while it was outside")
                return
        if self._speed:
            self.rounds.measure_speed(self._speed)
        self._offer()

    def _offer(self) -> None:
        base = self.base
        if not self.offers or self.healing:
            return
        try:
            self.rounds.offer_state(base.applied, base.chain, base.record)
        except LinkError as error:
            self.rounds.abort(error)
