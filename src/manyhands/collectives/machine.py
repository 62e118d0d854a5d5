"""The round machine: events in, instructions out; no clock, socket, thread, dice or values.

    machine = RoundMachine(me, Course(num_parts=8, num_samples=lambda r: 512, num_rounds=1000))
    for event in ...:
        for instruction in machine.handle(event, lease=...):
            ...                                # the runtime's: send, add up, commit, compute

Every peer of a run has one. What it does follows from the record of the last committed round and
from the Statuses of the last cut, which all peers have in common, so all of them do the same.
docs/rounds.md is the protocol; `events` and `instructions` are the two halves of the contract.
"""

from __future__ import annotations

import msgspec

from manyhands.collectives import events as e
from manyhands.collectives.cut import Cutting
from manyhands.collectives.instructions import Instruction, StopReason, Tell
from manyhands.collectives.messages import Tag
from manyhands.collectives.ranges import EMPTY
from manyhands.core.errors import UsageError
from manyhands.core.peers import NO_VIEW, PeerState
from manyhands.links.messages import Leaving, Ready, Resign


class RoundMachine(Cutting):
    """One peer's part in the rounds of a run. Not thread-safe; never blocks.

    The attributes show where the peer stands and are for reading only.
    """

    def handle(self, event: e.Event, *, lease: bool) -> list[Instruction]:
        """Take in one event; returns what is to be done, in this order.

        `lease`: whether this peer's lease is valid right now. Without it nothing is committed.
        After a `Stop` every event is ignored and returns nothing.
        """
        if self.stopped:
            return []
        self.lease = lease
        self._out = []
        self._dispatch(event)
        return self._out

    def _dispatch(self, event: e.Event) -> None:
        match event:  # those of every round come first
            case e.PartArrived():
                self._on_part(event)
            case e.SumArrived():
                self._on_sum(event)
            case e.Summed():
                self._on_summed(event)
            case e.Concluded():
                self._on_concluded(event)
            case e.Computed():
                self._on_computed(event)
            case e.SpeedMeasured():
                self._on_speed(event)
            case e.LeaseConfirmed():
                self._on_lease(event)
            case e.ViewSeen():
                self._on_view(event)
            case e.RecordSeen():
                self._on_record(event)
            case e.StatusArrived():
                self._on_status(event)
            case e.FillArrived():
                self._on_fill(event)
            case e.AskArrived():
                self._on_ask(event)
            case e.SnapshotArrived():
                self._on_snapshot(event)
            case e.CaughtUp():
                self._on_caught_up()
            case e.WantArrived():
                self._on_want(event)
            case e.RoundGoneArrived():
                self._on_round_gone(event)
            case e.GapSeen():
                self._on_gap()
            case e.LeaveAsked():
                self._on_leave(event)
            case e.StateOffered():
                self._on_state(event)

    # -- views -------------------------------------------------------------------------------

    def _on_view(self, event: e.ViewSeen) -> None:
        view, old, known = event.view, self.view, self.states
        self.view = view
        self.states = {m.peer.incarnation: m.state for m in view.roster}
        state = self.states.get(self.me)
        if state is None:
            self._on_removed()
            return
        was_active, self.active = self.active, state is not PeerState.WATCHING
        if self.active and not was_active:
            self.since = self.cut
        if old is not None and old.number.era < view.number.era:
            self._repeat_words(state)
        self.asks = {p: n for p, n in self.asks.items() if p in self.states or p not in known}
        self._ask_for_those_left()
        shaken = view.cut > self.cut
        if shaken:
            self._on_cut(view)
        if self.stopped:
            return
        if not self.active:
            # A piece of the state may have gone with its donor, quietly too.
            followed = (p for p, s in known.items() if s is not PeerState.WATCHING)
            self._on_watching(shaken=shaken or any(p not in self.states for p in followed))
        elif not was_active and self.frozen < self.cut:  # not one that just answered its first cut
            self._begin((), EMPTY, Tag(self.cut, 0))
        self._look_around(shaken=shaken)

    def _on_removed(self) -> None:
        assert self.view is not None
        over = self.view.over and not self.active
        reason = StopReason.OVER if over else StopReason.EXCLUDED
        self._stop(reason, f"view {self.view.number} is without this peer")

    def _repeat_words(self, state: PeerState) -> None:
        """The arbiter has lost its memory: it may not know what this peer has told it."""
        if self.ready_told and state is PeerState.WATCHING:
            self._emit(Tell(Ready()))
        if self.leave_asked and state is not PeerState.LEAVING:
            self._emit(Tell(Leaving()))

    def _on_watching(self, *, shaken: bool = False) -> None:
        """This peer only watches; it may be the one to start the run, or have come too late."""
        assert self.view is not None
        if self.view.over:
            text = "the run is over"
            self._stop(StopReason.OVER, text, Resign(False, text))
        elif self.brought and not self.trusted and self._is_first():
            self._found()
        else:
            self._seek(again=shaken)

    def _look_around(self, *, shaken: bool = False) -> None:
        """Whatever may have become possible with a view. `shaken`: words to others may be lost."""
        if shaken or (self.wanting is not None and self.wanting[1] not in self.states):
            self.wanting = None
        self._maybe_go()
        if not self.stopped:
            self._add_up(0)  # a lead may have waited for this view
            self._progress()

    def _on_record(self, event: e.RecordSeen) -> None:
        """A peer that the others could not average with stops before they count on it.

        A trusted one has come this way. Late words of those whom it took over from may differ.
        """
        theirs, mine = event.record.form, self.course.form
        if self.trusted or theirs == mine:
            return
        text = (
            f"this peer cannot average with the others: the run has {theirs}; "
            f"this peer has {mine}. "
            "Give it the run's tensors (order, sizes, dtypes) and the run's wire="
        )
        self._stop(StopReason.MISFIT, text, Resign(False, text))

    # -- the user, the link ------------------------------------------------------------------

    def _on_speed(self, event: e.SpeedMeasured) -> None:
        if event.speed < 1:
            raise UsageError(f"a speed of {event.speed} is not one", hint="at least 1")
        self.speed = event.speed

    def _on_gap(self) -> None:
        if self.brought and not self.trusted:
            self._drop_sums(lambda _: False)  # the state itself may still be the right one
        elif self.member:
            # Lost before it was one, which nobody becomes who lacks a result; or a founder, who
            # cannot have missed anything.
            if not self.active:
                self._emit(Tell(Ready()))
        else:
            # With a Ready under way this resigns: a hub has ignored that Ready, a broker has not.
            self._start_over("the link has lost results")

    def _on_leave(self, event: e.LeaveAsked) -> None:
        if self.leave_asked:
            return
        self.leave_asked, self.finished = True, event.finished
        if self.active or self.ready_told:
            self._emit(Tell(Leaving()))
        else:
            self._stop(StopReason.LEFT, "left before it took part", Resign(False, "left"))

    def _on_state(self, event: e.StateOffered) -> None:
        if self.based or self.active:
            raise UsageError("this peer has a state already", hint="offer one at the start")
        if event.applied > 0 and event.record is None:
            raise UsageError(
                f"a state after {event.applied} rounds came without its record",
                hint="save Committed.record with the state, and offer both",
            )
        self.based = self.brought = True
        self.applied, self.chain, self.donor = event.applied, event.chain, None
        # The view may be one of another run, whose numbers say nothing here. If it was this run,
        # it was before this peer came.
        record = event.record or self._first_record()
        self.record = msgspec.structs.replace(record, view=NO_VIEW)
        self.generation = record.generation
        if self.view is not None:
            self._on_watching()
            self._look_around()
