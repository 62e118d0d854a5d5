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
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from manyhands.collectives.instructions import (
    DropState,
    Generation,
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
from manyhands.core.errors import Excluded, LinkError, LinkTimeout, ManyhandsError

log = logging.getLogger(__name__)

_TICK_S = 1.0  # how often a wait looks around; what is waited for wakes it

AGAIN = (StopReason.EXCLUDED, StopReason.SENT_BACK)
Event = Retry | Settled | Generation | Stable | DropState | Stopped


@dataclass(slots=True)
class Turn:
    """One run of the loop body."""

    round: int
    ranges: Ranges  # what it computes, in units of the round; empty: its gradient does not count
    task: Task | None = None  # that it belongs to; None: the round is committed already
    last: bool = True  # completes what is asked of this peer so far
    committed: Committed | None = None
    ended: bool = False  # its backward was done


@dataclass(frozen=True, slots=True)
class Base:
    """Where the user's thread stands: rounds it has applied, and what proves it."""

    applied: int
    chain: bytes
    record: Record | None = None


@dataclass
class Conductor:
    """Used by the user's thread alone. Whoever is excluded comes back by itself.

    `connect` joins the run anew and returns an engine that serves. `take` loads a state that came.
    `most` is how many units a turn has at most.
    """

    connect: Callable[[], Rounds]
    take: Callable[[Snapshot], None]
    tell: Callable[[Event], None]
    base: Base
    most: int
    over: bool = False
    stopped: Stopped | None = None
    _rounds: Rounds | None = None
    _todo: deque[Turn] = field(default_factory=deque[Turn])
    _pending: Outcome | None = None
    _leaving: bool = False

    @property
    def rounds(self) -> Rounds:
        """The engine; another one after an exclusion."""
        assert self._rounds is not None, "begin first"
        return self._rounds

    def begin(self, enough: Callable[[Rounds], None]) -> None:
        """Join, and offer the state once `enough` has returned."""
        self._rounds = self.connect()
        enough(self._rounds)
        self._offer()

    def leave(self) -> None:
        """Leave in good order: `next_turn` goes on until the others can do without this peer."""
        if not self._leaving:
            self._leaving = True
            self.rounds.leave()

    # -- turns ----------------------------------------------------------------------------------

    def next_turn(self) -> Turn | None:
        """What to compute next; None when the run is over, or this peer has left it."""
        while not self.over:
            if self._todo:
                return self._todo.popleft()
            outcome = self._next()
            match outcome:
                case Task():
                    self._plan(outcome)
                case Committed():
                    if not self._is_closing():
                        return Turn(outcome.round, EMPTY, committed=outcome)
                    outcome.result.close()  # without samples: nothing is to be learnt from it
                case TakeState():
                    self.take(outcome.snapshot)
                    head = outcome.snapshot
                    self.base = Base(head.applied, head.chain, head.record)
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
                case Committed() if outcome.round == turn.round:
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
        self.base = Base(committed.round + 1, committed.chain, committed.record)

    def finish(self) -> None:
        """Until this peer may exit: the others can do without it, or the run is over."""
        while not self.over:
            turn = self.next_turn()
            if turn is None:
                return
            if turn.committed is not None:
                self.advance(turn.committed)
                turn.committed.result.close()
                continue
            # Nobody computes here any more: what this peer has claimed is for others to redo.
            self.rounds.abort(ManyhandsError("the loop has ended"))
            self.over = True

    def close(self) -> None:
        """Let go of the run. Idempotent."""
        self.over = True
        if self._rounds is not None:
            self._rounds.close()

    # -- outcomes -------------------------------------------------------------------------------

    def _next(self) -> Outcome:
        if self._pending is not None:
            outcome, self._pending = self._pending, None
            return outcome
        while True:
            try:
                return self.rounds.next(_TICK_S)
            except LinkTimeout:
                continue  # the link itself says when somebody, or the meeting point, is gone

    def _plan(self, task: Task) -> None:
        pieces = task.ranges.pieces([self.most] * -(-len(task.ranges) // self.most))
        self._todo = deque(Turn(task.round, piece, task, last=False) for piece in pieces)
        self._todo[-1].last = True

    def _is_closing(self) -> bool:
        return self.base.record is not None and self.base.record.closing

    def _on_stopped(self, last: Stopped) -> None:
        self.stopped = last
        self.tell(last)
        if last.reason in AGAIN and not self._leaving:
            self._rejoin()
            return
        self.over = True
        if last.reason in (StopReason.FINISHED, StopReason.LEFT, StopReason.OVER, *AGAIN):
            return
        raise last.error or ManyhandsError(last.text)

    def _rejoin(self) -> None:
        """As a new incarnation, with the state of the last round that was applied here."""
        self._todo.clear()
        self.rounds.close()
        while True:
            try:
                self._rounds = self.connect()
                break
            except Excluded as error:  # again, before it had come in
                log.warning("could not come back yet: %s", error)
        self._offer()

    def _offer(self) -> None:
        base = self.base
        try:
            self.rounds.offer_state(base.applied, base.chain, base.record)
        except LinkError as error:
            self.rounds.abort(error)
