"""Standing: where one peer stands in its run, and how it comes and goes.

The lowest of four layers that make up the round machine; each is one class on top of the last:

    standing   what a peer stores; joining as a newcomer, leaving, resigning
    attempt    one attempt at a round: contribute, add up, commit, follow
    cut        freeze, exchange Statuses, act on the verdict
    machine    events in, instructions out

Nothing in here waits, sends or calculates with values: instructions are collected in a list.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from manyhands.collectives.book import Book, Kept, Key
from manyhands.collectives.events import AskArrived, SnapshotArrived
from manyhands.collectives.instructions import (
    DropParts,
    DropState,
    DropSums,
    Instruction,
    Send,
    Stop,
    StopReason,
    TakeState,
    Tell,
)
from manyhands.collectives.messages import NO_TAG, Ask, Record, Share, Tag
from manyhands.collectives.ranges import EMPTY, Ranges
from manyhands.collectives.refusal import Doubts, OnRefusal
from manyhands.collectives.shares import NO_RESYNCS, RESYNC, Resyncs
from manyhands.core.errors import UsageError
from manyhands.core.peers import NO_VIEW, PeerState, View, ViewNumber
from manyhands.links.messages import Gone, Ready, Resign


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What every peer of a run knows before it starts; must be the same at all of them."""

    num_parts: int
    """Parts that the tensor is cut into."""
    num_samples: Callable[[int], int]
    """How many samples a round has; a pure function of its number, re-syncs not counted."""
    num_rounds: int | Callable[[], int] | None = None
    """After how many rounds the run is finished; without it, when everybody leaves.

    A function, if a peer without a state cannot know."""
    harmless: Callable[[int], bool] = lambda round_: False
    """Whether nothing is computed in that round: its samples cannot have killed anybody."""
    form: str = ""
    """The tensors and how they travel, in words; peers whose words differ cannot average."""
    on_refusal: OnRefusal = OnRefusal.SKIP
    resyncs: Resyncs = NO_RESYNCS

    def __post_init__(self) -> None:
        """Reject what no run can have."""
        if self.num_parts < 1:
            raise UsageError(f"a tensor of {self.num_parts} parts cannot be averaged")
        if isinstance(self.num_rounds, int) and self.num_rounds < 1:
            raise UsageError(f"a run of {self.num_rounds} rounds has nothing to do")

    def is_over(self, applied: int) -> bool:
        """Whether no samples are left after so many rounds."""
        if self.num_rounds is None:
            return False
        most = self.num_rounds if isinstance(self.num_rounds, int) else self.num_rounds()
        return applied >= most


class Served(NamedTuple):
    """A state that was sent to a newcomer: the number of its Ask, and who has sent pieces."""

    number: int
    donors: tuple[int, ...]


class Mode(enum.Enum):
    """What a peer is doing about its round."""

    RUNNING = "running"
    TALKING = "talking"  # a cut: waiting for the Statuses of all participants
    FILLING = "filling"  # the verdict is known: waiting for results that this peer lacks


class Standing(ABC):
    """What a peer stores, and how it joins, leaves and gives up."""

    def __init__(self, me: int, course: Course) -> None:
        self.me = me
        self.course = course
        self.speed = 0  # not measured yet
        self.lease = False  # as of the event in hand
        self.stopped = False
        self._out: list[Instruction] = []
        # The run as the arbiter shows it.
        self.view: View | None = None
        self.states: dict[int, PeerState] = {}  # of the newest view, in roster order
        self.active = False  # or leaving: follows every round, answers cuts
        self.cut: ViewNumber = NO_VIEW
        self.frozen: ViewNumber = NO_VIEW  # the newest cut this peer has answered
        self.since: ViewNumber = NO_VIEW  # the newest cut before it was active, with no claims
        self.mode = Mode.RUNNING
        # The history so far.
        self.based = False  # has a state
        self.trusted = False  # and knows that it is one of the run's
        self.brought = False  # the state is its own, not a snapshot
        self.founded = False  # and the run starts from it
        self.applied: int = 0  # rounds committed
        self.chain: bytes = b""
        self.previous: bytes = b""  # the chain one round earlier
        self.generation: ViewNumber = NO_VIEW  # the cut at which followers last took over
        self.record: Record | None = None  # governs round `applied`
        self.kept: Kept | None = None  # the last round's result, until that is stable
        # The round under way.
        self.tag: Tag = NO_TAG
        self.members: tuple[int, ...] = ()
        self.member = False
        self.claims: Ranges = EMPTY
        self.asked: Ranges = EMPTY  # what the runtime was told to compute
        self.bank: Ranges = EMPTY  # what it has computed
        self.quarantine: Ranges = EMPTY
        self.doubts = Doubts()
        self.losses: tuple[Ranges, ...] = ()  # samples whose claimants have died once, twice
        self.sent = False  # this peer's contribution to this attempt
        self.book = Book(course.num_parts)
        # Coming and going.
        self.behind = False  # a state came, and the user has not caught up with the run since
        self.donor: int | None = None  # whom this newcomer has asked for the state
        self.ask_number = 0
        self.asks: dict[int, int] = {}  # newcomers that have asked this peer, with their number
        self.served: dict[int, Served] = {}  # newcomers that this peer sent its piece of a state
        self.wanting: tuple[int, int] | None = None  # (round, whom this follower asked for it)
        self.ready_told = False
        self.leave_asked = False
        self.finished = True  # the run, if it closes: others may want to go on with it
        self.known: ViewNumber = NO_VIEW  # newest view that this peer's place was decided from

    def _emit(self, *instructions: Instruction) -> None:
        self._out.extend(instructions)

    @abstractmethod
    def _progress(self) -> None:
        """Commit whatever can be committed."""

    # -- the round that is under way ---------------------------------------------------------

    @property
    def _key(self) -> Key:
        return Key(self.applied, self.tag)

    def _governing(self) -> Record:
        assert self.record is not None, "a peer with a state has the record that goes with it"
        return self.record

    def _whole(self) -> Ranges:
        """All samples of the round; a closing one has none."""
        record = self._governing()
        if record.closing:
            return EMPTY
        if record.resync:
            return RESYNC
        return Ranges.whole(self.course.num_samples(self.applied - record.num_resyncs))

    def _drop_parts(self, wanted: Callable[[Key], bool]) -> None:
        self._emit(*(DropParts(*key) for key in self.book.drop_parts(wanted)))

    def _drop_sums(self, wanted: Callable[[Key], bool]) -> None:
        self._emit(*(DropSums(*key) for key in self.book.drop_sums(wanted)))

    # -- joining -----------------------------------------------------------------------------

    def _following(self) -> list[int]:
        """The others that have a state: active or leaving, in roster order."""
        watching = PeerState.WATCHING
        return [p for p, s in self.states.items() if s is not watching and p != self.me]

    def _is_first(self) -> bool:
        """Nobody has a state that the run goes on with, and this peer is the first of the roster:
        there is only one.
        """
        return next(iter(self.states), None) == self.me and not self._following()

    def _seek(self, *, again: bool = False) -> None:
        """A newcomer asks somebody for the state; `again`: an earlier Ask may have been lost."""
        if self.view is None or self.based:
            return
        if self.donor not in self.states:
            active = [p for p in self._following() if self.states[p] is PeerState.ACTIVE]
            # Any spread will do that needs no dice: newcomers should not all ask the same peer.
            place = self.me + self.view.number.n
            self.donor = active[place % len(active)] if active else None
            again = True
        if again and self.donor is not None:
            self._emit(Send(self.donor, Ask(self.ask_number)))

    def _on_ask(self, event: AskArrived) -> None:
        # Kept until a record names the newcomer: only the state after that record has no hole.
        self.asks[event.sender] = max(event.number, self.asks.get(event.sender, 0))

    def _ask_for_those_left(self) -> None:
        """A donor has gone, perhaps with its piece: who has not come further needs another state.

        The newcomer asks again too, but that may reach this peer before it has served.
        """
        for peer, (number, donors) in list(self.served.items()):
            if self.states.get(peer) is not PeerState.WATCHING:
                del self.served[peer]
            elif any(donor not in self.states for donor in donors):
                del self.served[peer]
                self.asks[peer] = max(number, self.asks.get(peer, 0))

    def _on_snapshot(self, event: SnapshotArrived) -> None:
        head = event.snapshot
        if self.based or head.number != self.ask_number:
            return  # one that was made before the last hole in what this peer follows
        self.donor = None
        self.based, self.brought = True, False
        self.applied, self.chain, self.record = head.applied, head.chain, head.record
        self.behind = True
        self.generation = head.record.generation
        self._emit(TakeState(head))
        self._drop_sums(lambda key: key.round >= head.applied)
        self._progress()

    def _found(self) -> None:
        """Start the run from this peer's own state: nobody else has one.

        In a run that is new it is a member from the start. In one that had state and lost it, it
        takes over like any follower, which is reported.
        """
        self.trusted = self.founded = True
        self._drop_sums(lambda _: False)  # of those who had one, and are gone
        # The state may be the last one of an earlier run: its numbers mean nothing here, and what
        # its members had planned, say to leave, they do not any more.
        self.record = self._first_record(self._governing())
        self.generation = NO_VIEW
        if self.view is not None and self.view.founder is not None:
            self.members, self.member = (self.me,), True
            self.claims = self._whole()

    def _first_record(self, before: Record | None = None) -> Record:
        """What governs the first round of a run: its founder does everything.

        `before`: what came with the state; how far that is in the course, and how rounds
        synchronise, stays as it was.
        """
        before = before or Record(b"", NO_VIEW, NO_VIEW, ())
        number = self.applied - before.num_resyncs
        closing = self.course.is_over(number)
        samples = EMPTY if closing else Ranges.whole(self.course.num_samples(number))
        return Record(
            b"",
            NO_VIEW,
            NO_VIEW,
            (Share(self.me, RESYNC if before.resync else samples),),
            closing=closing,
            sync=before.sync,
            resync=before.resync,
            num_resyncs=before.num_resyncs,
        )

    def _start_over(self, reason: str) -> None:
        """What this peer holds is of no use. One that the others count on resigns instead."""
        if self.active or self.ready_told:
            self._stop(
                StopReason.LEFT if self.leave_asked else StopReason.SENT_BACK,
                reason,
                Resign(False, reason),
            )
            return
        self.based = self.trusted = self.brought = self.member = False
        self.members, self.claims = (), EMPTY
        self.applied, self.chain, self.previous, self.record = 0, b"", b"", None
        self.generation, self.losses, self.doubts = NO_VIEW, (), Doubts()
        self.kept = self.wanting = self.donor = None
        self.behind = False
        self.book = Book(self.course.num_parts)
        self.ask_number += 1
        self._emit(DropState(reason))
        self._seek()

    def _on_caught_up(self) -> None:
        self.behind = False
        self._say_ready()

    def _say_ready(self) -> None:
        """A newcomer is ready when its base is trusted and nothing newer has been seen.

        And its user must have come as far, since the others, if there are any, would have to wait.
        """
        if not self.based or self.active or self.ready_told or self.stopped:
            return
        alone = not self._following()
        if alone and (self.trusted or (self._is_first() and not self.brought)):
            # Its state is one of the run's. What has come of later rounds nobody can complete,
            # unless successors of the dead have sent it, of whom a view is on its way.
            self.trusted = True
            self._drop_sums(lambda key: key.round <= self.applied or key.attempt.cut >= self.cut)
        if not self.trusted:
            return
        if self.behind and not alone:
            return
        if self.book.newest_round() <= self.applied:
            self.ready_told, self.behind = True, False
            self._emit(Tell(Ready()))

    # -- leaving -----------------------------------------------------------------------------

    def _maybe_go(self) -> None:
        """A leaver goes once it is outside the round and its last round is safe with the others.

        Its place must follow from a view that shows it leaving: a record that was made before
        the lead knew may still take it in.
        """
        if self.stopped or self.mode is not Mode.RUNNING or self.member or self.kept is not None:
            return
        if self.states.get(self.me) is not PeerState.LEAVING or self.known < self._since():
            return
        self._stop(StopReason.LEFT, "left in good order", Gone(self.cut))

    def _since(self) -> ViewNumber:
        """The view that gave this peer its present state."""
        assert self.view is not None
        line = self.view.member(self.me)
        return line.since if line else NO_VIEW

    def _stop(self, reason: StopReason, text: str, word: Gone | Resign | None = None) -> None:
        self.stopped = True
        if word is not None:
            self._emit(Tell(word))
        self._emit(Stop(reason, text))

    def _place(self, members: tuple[int, ...], claims: Ranges, tag: Tag) -> None:
        """Take this place in the round."""
        self.members, self.member = members, self.me in members
        self.claims, self.tag = claims, tag
        self.bank &= claims
        self.asked &= claims
        self.sent = False

    def _stop_refused(self, refused: Ranges) -> None:
        text = f"samples {refused} of round {self.applied} gave what cannot be averaged"
        self._stop(StopReason.REFUSED, text, Resign(False, text))
