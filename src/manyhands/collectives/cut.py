"""Cut: what a peer does when messages may be missing.

    freeze ─► Status to all participants ─► all Statuses here: verdict ─► fill in ─► go on

The third layer of the round machine (see standing). Another cut may come at any point of this and
starts it anew; what was filled in by then is simply held.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from manyhands.collectives.attempt import Attempt
from manyhands.collectives.book import Key
from manyhands.collectives.events import FillArrived, StatusArrived
from manyhands.collectives.instructions import (
    Discard,
    Generation,
    Lost,
    Retry,
    Send,
    Settled,
    StopReason,
)
from manyhands.collectives.messages import MOST_DEATHS, NO_TAG, Fill, Status, Tag
from manyhands.collectives.ranges import EMPTY, Ranges
from manyhands.collectives.refusal import Doubts, OnRefusal, blamed
from manyhands.collectives.standing import Course, Mode
from manyhands.collectives.verdict import Settlement, Verdict, decide, settle
from manyhands.core.peers import PeerState, View, ViewNumber
from manyhands.links.messages import Resign


class Cutting(Attempt):
    """How a peer answers a cut."""

    def __init__(self, me: int, course: Course) -> None:
        super().__init__(me, course)
        self.participants: dict[int, PeerState] = {}  # of the newest cut, in roster order
        self._over_at_cut = False
        self._statuses: dict[ViewNumber, dict[int, Status]] = {}
        self._verdict: Verdict | None = None
        self._heard: Mapping[int, Status] = {}  # the complete set that the verdict follows from

    # -- freeze ------------------------------------------------------------------------------

    def _on_cut(self, view: View) -> None:
        self.cut = view.cut
        roster = {m.peer.incarnation: m.state for m in view.cut_roster}
        if not self.based or roster.get(self.me, PeerState.WATCHING) is PeerState.WATCHING:
            return  # nobody waits for this peer's word, so nothing binds it
        self.participants = {p: s for p, s in roster.items() if s is not PeerState.WATCHING}
        self._over_at_cut = view.over
        self._freeze()

    def _freeze(self) -> None:
        """From here on nothing of an earlier cut is taken: the Status says what is held."""
        self.mode, self.frozen = Mode.TALKING, self.cut
        self._verdict = None
        self._drop_parts(lambda key: key.attempt.cut >= self.cut)
        self._statuses = {c: s for c, s in self._statuses.items() if c >= self.cut}
        status = self._status()
        for peer in self.participants:
            if peer != self.me:
                self._emit(Send(peer, status))
        self._hear(self.me, status)

    def _status(self) -> Status:
        # What a generation that was lost has left of this round belongs to another history.
        tags = [t for t in self.book.attempts(self.applied) if t.cut >= self.generation]
        newest = max(tags, default=NO_TAG)
        key = Key(self.applied, newest)
        held = self.book.mask(key)
        return Status(
            cut=self.cut,
            applied=self.applied,
            chain=self.chain,
            previous=self.previous,
            generation=self.generation,
            newest=newest,
            held=held.to_bytes((held.bit_length() + 7) // 8, "little"),
            refused=self.book.refused(key),
            kept=self.kept.key.attempt if self.kept else NO_TAG,
            member=self.member,
            claims=self.claims if self.member else EMPTY,
            quarantine=self.quarantine,
            speed=self.speed,
            begun=max(self.tag, Tag(self.since, 0)),
            losses=self.losses,
            doubted=self.doubts.samples,
        )

    # -- Statuses ----------------------------------------------------------------------------

    def _on_status(self, event: StatusArrived) -> None:
        self._hear(event.sender, event.status)

    def _hear(self, sender: int, status: Status) -> None:
        # One of a later cut came before the view did. It is for later.
        if status.cut > self.cut or (status.cut == self.cut and self.mode is Mode.TALKING):
            self._statuses.setdefault(status.cut, {})[sender] = status
            if status.cut == self.cut and self._all_heard(self._statuses[self.cut]):
                heard = self._statuses.pop(self.cut)
                self._heard = {p: heard[p] for p in self.participants if p in heard}
                self._act(decide(self._heard, self.course.num_parts))

    def _all_heard(self, heard: Mapping[int, Status]) -> bool:
        """All, not a majority: the one not heard may have committed what the others redo."""
        return all(peer in heard for peer in self.participants)

    # -- verdict -----------------------------------------------------------------------------

    def _act(self, verdict: Verdict) -> None:
        if self._over_at_cut and not any(status.member for status in self._heard.values()):
            self._stop_over()  # what followers hold may be what a lost generation has left them
            return
        self._verdict = verdict
        self._emit(
            Settled(
                self.cut,
                verdict.stands,
                verdict.target,
                bool(verdict.fillers),
                verdict.sent_back,
            )
        )
        if self.me not in verdict.stay:
            if self.participants[self.me] is PeerState.LEAVING:
                self._step_out()
            else:
                self._start_over("the others have gone on from a state this peer cannot reach")
            return
        self._fill_in(verdict)
        if self.applied == verdict.target:
            self._go_on()
        else:
            self.mode, self.fill_tag = Mode.FILLING, verdict.attempt
            self._progress()

    def _fill_in(self, verdict: Verdict) -> None:
        """Fan out what this peer holds and somebody lacks."""
        mine = [k for k, peer in verdict.fillers.items() if peer == self.me]
        if not mine:
            return
        if verdict.stands:
            results = self.book.results(Key(self.applied, verdict.attempt))
        else:
            assert self.kept is not None
            results = self.kept.results
        for k in mine:
            self._emit(Send(None, Fill(self.cut, results[k].sum)))

    def _on_fill(self, event: FillArrived) -> None:
        head = event.fill.sum
        if (
            head.k < self.course.num_parts
            and not (self.based and head.round < self.applied)
            and self._may_fill(event.fill.cut)
            and self.book.add_sum(head, event.digest)
        ):
            self._progress()
        else:
            self._emit(Discard(event))

    def _may_fill(self, cut: ViewNumber | None) -> bool:
        """Results of an attempt older than the freeze are taken as the verdict has them only."""
        if cut is None:  # the answer to a Want
            return not self.member
        if not self.active or (cut == self.cut and self.mode is not Mode.RUNNING):
            return True
        return not self.member and cut >= self.frozen

    # -- going on ----------------------------------------------------------------------------

    def _filled(self) -> None:
        self._go_on()

    def _go_on(self) -> None:
        """At the target: take the place that the Statuses give, and begin the next attempt."""
        verdict = self._verdict
        assert verdict is not None
        assert self.applied == verdict.target
        self.known = max(self.known, self.cut)
        self.generation = verdict.generation
        if verdict.refused - self.quarantine - self.doubts.samples:
            self._tell_refused(verdict.refused)
        if verdict.refused and self.course.on_refusal is OnRefusal.STOP:
            self._stop_refused(verdict.refused)
            return
        settlement = self._settle(verdict)
        if settlement.deadly:
            self._stop_deadly(settlement)
            return
        if not settlement.members:
            self._step_out()  # only leavers are left: they stop here, at one and the same state
            return
        if not settlement.inherited:
            if self._over_at_cut:
                self._stop_over()
                return
            self.generation = self.cut
            self._emit(Generation(self.cut, self.applied, self.founded))
        void = settlement.quarantine | (verdict.doubted - self.doubts.samples)
        if self.me not in settlement.members or self.asked & void:
            self._drop_bank()
        self.quarantine, self.losses = settlement.quarantine, settlement.losses
        self.doubts = Doubts(samples=verdict.doubted)
        # Of later rounds, too: whoever had come that far is gone, or the target would be later.
        self._drop_sums(lambda key: key.attempt.cut >= self.cut)
        self._begin(settlement.members, settlement.claims_of(self.me), Tag(self.cut, 0))
        for k in range(self.course.num_parts):
            self._add_up(k)
        self._release()
        self._maybe_go()
        self._progress()

    def _is_alone(self) -> bool:
        if self.mode is Mode.FILLING:
            return self._verdict is not None and self._verdict.stay == (self.me,)
        return super()._is_alone()

    def _settle(self, verdict: Verdict) -> Settlement:
        active = [p for p, s in self.participants.items() if s is PeerState.ACTIVE]
        record = self._governing()
        found = settle(verdict, self._heard, record, active, self._whole())
        if self.course.harmless(verdict.target - record.num_resyncs):
            return replace(found, losses=(), deadly=EMPTY)
        return found

    def _tell_refused(self, refused: Ranges) -> None:
        """Others have seen it; whose it was, this peer knows if it holds a result that says so."""
        tag = max(self.book.attempts(self.applied), default=NO_TAG)
        heads = [result.sum for result in self.book.results(Key(self.applied, tag)).values()]
        self._emit(Retry(self.applied, tag, refused, *blamed(heads, refused)))

    def _stop_deadly(self, settlement: Settlement) -> None:
        """Whoever goes on with the round is the next to die."""
        self.members = settlement.members
        text = (
            f"samples {settlement.deadly} of round {self.applied}: {MOST_DEATHS} peers that were "
            "to compute them have died, one after the other"
        )
        self._emit(Lost(self.applied, settlement.deadly))
        self._stop(StopReason.DEADLY, text, Resign(False, text))

    def _stop_over(self) -> None:
        text = "others have finished the run"
        self._stop(StopReason.OVER, text, Resign(False, text))

    def _step_out(self) -> None:
        """A leaver that the verdict leaves nothing to do for."""
        self.known = max(self.known, self.cut)
        self.mode, self.kept = Mode.RUNNING, None
        self.members, self.member = (), False
        self._maybe_go()
