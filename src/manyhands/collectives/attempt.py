"""Attempt: one attempt at a round, as member, owner, lead and follower.

    Begin ─► Compute ─► Send Part k to its owner ─► AddUp ─► Send Sum to all ─► Commit ─► Begin
                 ▲                                                │
                 └── again, without what was refused ◄────────────┘

The second layer of the round machine (see standing).
"""

from __future__ import annotations

from abc import abstractmethod

import msgspec

from manyhands.collectives.book import Kept, Key
from manyhands.collectives.events import (
    Arrival,
    Computed,
    Concluded,
    LeaseConfirmed,
    PartArrived,
    SumArrived,
    Summed,
)
from manyhands.collectives.follower import Follower
from manyhands.collectives.instructions import (
    AddUp,
    Begin,
    Commit,
    Compute,
    Conclude,
    ConfirmLease,
    Discard,
    DropBank,
    Retry,
    Send,
    Stable,
    StopReason,
)
from manyhands.collectives.messages import (
    Newcomer,
    Part,
    Record,
    SelfReport,
    Share,
    Snapshot,
    Sum,
    Tag,
)
from manyhands.collectives.ranges import EMPTY, Ranges
from manyhands.collectives.refusal import Doubts, OnRefusal, ask_others, blamed
from manyhands.collectives.shares import Closure, next_record
from manyhands.collectives.standing import Course, Mode, Served
from manyhands.links.messages import Resign


class Attempt(Follower):
    """What a peer does while no cut is being answered."""

    def __init__(self, me: int, course: Course) -> None:
        super().__init__(me, course)
        self._adding: set[int] = set()  # parts of this attempt that the runtime adds up
        self._confirming: Key | None = None  # attempt whose commit waits for the lease
        self._confirmed: Key | None = None
        self._fit = False  # what is in the bank would do as the result of a round
        self.fill_tag: Tag | None = None  # while filling: the attempt that is filled in

    @abstractmethod
    def _filled(self) -> None:
        """This peer lacked a round at a cut and has committed it now."""

    # -- member ------------------------------------------------------------------------------

    def _begin(self, members: tuple[int, ...], claims: Ranges, tag: Tag) -> None:
        self.mode = Mode.RUNNING
        self._place(members, claims, tag)
        self._adding.clear()
        self._drop_parts(lambda key: key >= self._key)
        if self.member:
            # A void attempt, or one of a lost generation, is as much memory as a whole result.
            self._drop_sums(lambda key: key == self._key)
        self._emit(Begin(self.applied, tag, members, claims, self._governing().resync))
        if members == (self.me,):
            self._confirm_lease(self._key)
        self._work()

    def _work(self) -> None:
        """Compute what is claimed; contribute once all of it is in the bank."""
        if not self.member or self.mode is not Mode.RUNNING:
            return
        todo = self.claims - self.asked
        if todo:
            self.asked |= todo
            risky = bool(self.losses and todo & self.losses[0])
            self._emit(Compute(self.applied, todo, risky))
        elif not self.sent and not self.claims - self.bank:
            self._contribute()

    def _on_computed(self, event: Computed) -> None:
        if event.round == self.applied:
            self.bank |= event.ranges & self.asked
            self._fit = event.fit
            self._work()
            self._fit = False

    def _contribute(self) -> None:
        """To every owner, also without samples: that a Sum has all Parts proves all have come.

        One canonical order, whatever order gradients become ready in.
        """
        self.sent = True
        asks = tuple(Newcomer(peer, number) for peer, number in self.asks.items())
        report = SelfReport(self.speed, asks)
        nobody_else = self.members == tuple(self.states) == (self.me,)
        if self._fit and nobody_else and not self._view_is_old(self._governing()):
            self._conclude(report)
            return
        for k in reversed(range(self.course.num_parts)):
            first = report if k == 0 else None
            part = Part(self.applied, self.tag, k, self.claims, report=first)
            self._emit(Send(self.members[k % len(self.members)], part))

    def _conclude(self, report: SelfReport) -> None:
        """With nobody else there, all parts at once: what this peer has is the result."""
        part = Part(self.applied, self.tag, 0, self.claims, report=report)
        self.book.add_part(self.me, part, refused=False)
        record = self._write_record()
        share = (Share(self.me, self.claims),)
        self._adding.update(range(self.course.num_parts))
        exact = self._governing().resync
        self._emit(Conclude(part, Sum(*self._key, 0, share, EMPTY, record, exact=exact)))

    def _on_concluded(self, event: Concluded) -> None:
        head = event.sum
        if (head.round, head.attempt) != self._key or self.mode is not Mode.RUNNING:
            return  # a cut came: this attempt is void
        self.book.conclude(head, event.digest)
        self._release()
        self._progress()

    def _drop_bank(self) -> None:
        if self.asked:
            self.asked = self.bank = EMPTY
            self._emit(DropBank(self.applied))

    # -- owner -------------------------------------------------------------------------------

    def _on_part(self, event: PartArrived) -> None:
        part = event.part
        if not self._expects(part) or not self.book.add_part(
            event.sender, part, refused=event.refused
        ):
            self._emit(Discard(event))
            return
        if (part.round, part.attempt) == self._key:
            self._add_up(part.k)

    def _expects(self, part: Part) -> bool:
        """At most one attempt ahead: nobody can be further without this peer's contribution.

        Only a follower that was just taken in may be more rounds behind than that.
        """
        if part.k >= self.course.num_parts or not self.based or not self._may_be_owner():
            return False
        if part.attempt.cut < self.cut or part.round < self.applied:
            return False
        if self.mode is not Mode.RUNNING:
            return part.round <= self.applied + 1
        if not self.member:
            return True
        if part.round == self.applied:
            ahead = part.attempt.attempt - self.tag.attempt
            return part.attempt.cut == self.tag.cut and 0 <= ahead <= 1
        return part.round == self.applied + 1 and part.attempt.attempt == 0

    def _may_be_owner(self) -> bool:
        return self.active or self.ready_told

    def _add_up(self, k: int) -> None:
        """Have part k added up if this peer owns it and all contributions are here."""
        if not self.member or self.mode is not Mode.RUNNING or k in self._adding:
            return
        if self.members[k % len(self.members)] != self.me:
            return
        box = self.book.contributions(self._key, k)
        if len(box) < len(self.members) or any(m not in box for m in self.members):
            return
        record = None
        if k == 0:
            record = self._write_record()
            if record is None:
                return
        shares = tuple(Share(m, box[m].part.ranges) for m in self.members)
        refused = Ranges.union(box[m].part.ranges for m in self.members if box[m].refused)
        self._adding.add(k)
        exact = self._governing().resync
        self._emit(AddUp(Sum(self.applied, self.tag, k, shares, refused, record, exact=exact)))

    def _write_record(self) -> Record | None:
        """The lead's record; None while its view is older than that of the governing one.

        With an older view it might drop a member, or take one in again that has gone.
        """
        assert self.view is not None
        governing = self._governing()
        if self._view_is_old(governing):
            return None
        box = self.book.contributions(self._key, 0)
        reports = {m: report for m in self.members if (report := box[m].part.report) is not None}
        following = self.applied + 1 - governing.num_resyncs
        record = next_record(
            Closure(
                view=self.view,
                members=self.members,
                reports=reports,
                prev=self.chain,
                generation=self.generation,
                quarantine=self.quarantine,
                governing=governing,
                last=governing.closing or self.course.is_over(following),
                following=Ranges.whole(self.course.num_samples(following)),
                classes=self.course.resyncs.classes(reports),
                is_time=following % self.course.resyncs.every == 0,
            )
        )
        return msgspec.structs.replace(record, form=self.course.form)

    def _view_is_old(self, governing: Record) -> bool:
        return self.view is None or self.view.number < governing.view

    def _on_summed(self, event: Summed) -> None:
        head = event.sum
        current = self.mode is Mode.RUNNING and (head.round, head.attempt) == self._key
        if not current or head.k not in self._adding:
            self._emit(Discard(event))  # a cut came: this attempt is void
            return
        self._emit(Send(None, head))
        self._take(head, event.digest, event)

    # -- everybody ---------------------------------------------------------------------------

    def _on_sum(self, event: SumArrived) -> None:
        if not self._is_from_owner(event):
            self._emit(Discard(event))
        elif self._is_passed_over(event.sum):
            self._start_over("others went on from an earlier round")
        elif self._accepts(event.sum):
            self._take(event.sum, event.digest, event)
        else:
            self._emit(Discard(event))

    def _is_from_owner(self, event: SumArrived) -> bool:
        """Whether whoever sent this result has added it up; others send a Fill.

        A member knows who takes part in its attempt. Anybody else has only the result's own word:
        it lists all members, in their order.
        """
        head = event.sum
        members = tuple(share.peer for share in head.contributions)
        if self.member and (head.round, head.attempt) == self._key and members != self.members:
            return False
        return bool(members) and members[head.k % len(members)] == event.sender

    def _is_passed_over(self, head: Sum) -> bool:
        """Whether followers took over at an earlier round than this peer's, without hearing it."""
        record = head.record
        newer = record is not None and record.generation > self.generation
        return newer and self.based and head.round < self.applied

    def _accepts(self, head: Sum) -> bool:
        if head.k >= self.course.num_parts or (self.based and head.round < self.applied):
            return False
        if not self.active:
            return True
        if head.attempt.cut < self.frozen:
            return False  # the others have been told what this peer holds of it
        if self.member and self.mode is Mode.RUNNING:
            return (head.round, head.attempt) == self._key
        return True

    def _take(self, head: Sum, digest: bytes, arrival: Arrival) -> None:
        if not self.book.add_sum(head, digest):
            self._emit(Discard(arrival))
            return
        self._release()
        self._progress()

    def _release(self) -> None:
        """A result of this round has everybody's Part, so everybody has committed the last one.

        Not while a cut is answered: a leaver that is behind may still have to be filled in.
        """
        if self.kept is None or self.mode is not Mode.RUNNING:
            return
        if self._next_round_seen():
            self.kept = None
            if self.lease:
                self._emit(Stable(self.applied, self.chain))
            self._maybe_go()

    def _next_round_seen(self) -> bool:
        if self.member and self.book.results(self._key):
            return True
        return any(record.prev == self.chain for record in self.book.records(self.applied))

    def _progress(self) -> None:
        while self.based and not self.stopped and self._step():
            pass
        self._say_ready()

    def _step(self) -> bool:
        """Commit one round, or begin it again; False if neither can be done."""
        if self.mode is Mode.TALKING:
            return False
        if not self.trusted and not self._becomes_trusted():
            # The record that would confirm a snapshot may have died with its lead.
            return self.based and not self.brought and self._follow()
        if self.mode is Mode.FILLING:
            assert self.fill_tag is not None
            if self.book.complete(Key(self.applied, self.fill_tag)) and self._commit(self.fill_tag):
                if not self.stopped:
                    self._filled()
                return True
            return False
        for tag in self.book.attempts(self.applied):
            key = Key(self.applied, tag)
            if self.book.complete(key) and self._counts_now(tag):
                refused = self.book.refused(key)
                if not refused:
                    return self._commit(tag)
                if self.member or self.course.on_refusal is OnRefusal.STOP:
                    self._try_again(tag, refused)
                    return True
        return False if self.member else self._follow()

    def _counts_now(self, tag: Tag) -> bool:
        """Whether a complete attempt is committed at once, without further evidence."""
        return tag == self.tag if self.member else self.active and tag.cut == self.cut

    def _try_again(self, tag: Tag, refused: Ranges) -> None:
        """All parts are here, and some contribution was refused: every member sees the same."""
        heads = [result.sum for result in self.book.results(Key(self.applied, tag)).values()]
        self._emit(Retry(self.applied, tag, refused, *blamed(heads, refused)))
        more = EMPTY
        match self.course.on_refusal:
            case OnRefusal.STOP:
                self._stop_refused(refused)
                return
            case OnRefusal.SKIP:
                self.quarantine |= refused
            case OnRefusal.REDO:
                opinion = ask_others(self.doubts, heads[0].contributions, refused)
                self.doubts = opinion.doubts
                self.quarantine |= opinion.quarantine
                more = opinion.claims.get(self.me, EMPTY)
        if self.claims & refused:
            self._drop_bank()  # a contribution is refused as a whole
        following = Tag(tag.cut, tag.attempt + 1)
        self._begin(self.members, (self.claims - refused) | more, following)

    def _commit(self, tag: Tag) -> bool:
        """Commit round `applied` with the result of this attempt; False if it has to wait."""
        key = Key(self.applied, tag)
        record = self.book.record(key)
        assert record is not None
        if record.prev != self.chain:
            self._start_over("the run has another history")
            return False
        if not self._may_commit():
            return False
        results = self.book.results(key)
        self.previous, self.chain = self.chain, self.book.chain_after(self.chain, key)
        sums = tuple(results[k].sum for k in range(len(results)))
        alone = key == self.book.concluded
        self.kept = Kept(key, {} if alone else results)
        self.applied += 1
        over = self._governing().closing
        self._emit(Commit(*key, sums, self.chain, record, self.member, over, alone))
        self.book.drop_parts(lambda key: key.round >= self.applied)  # Commit says so
        self.book.drop_sums(lambda key: key.round >= self.applied)
        self.record, self.generation = record, record.generation
        self.known = max(self.known, record.view)
        self.asked = self.bank = self.quarantine = self.claims = EMPTY
        self.wanting, self.losses, self.doubts = None, (), Doubts()
        self._serve(record, tuple(share.peer for share in sums[0].contributions))
        if over:
            number = self.applied - 1 - record.num_resyncs
            finished = self.finished or self.course.is_over(number)
            text = "the run is finished" if finished else "all have left the run"
            self._stop(StopReason.FINISHED, text, Resign(finished, text))
        elif self.mode is Mode.RUNNING:
            if self.active:
                self._begin(record.members, record.share_of(self.me), Tag(self.cut, 0))
            self._release()
            self._maybe_go()
        return True

    def _serve(self, record: Record, members: tuple[int, ...]) -> None:
        """Send the newcomers of the record this peer's piece of the state: each donor has one.

        Of several classes only one gives: a state with pieces of two would be like none of theirs.
        The others remember it, too: somebody has to ask again if all of that class die.
        """
        if self.me not in members:
            return
        donors = tuple(p for p in members if p in record.anchors) or members
        for peer, number in record.snapshot_for:
            if self.asks.get(peer, number) <= number:
                self.asks.pop(peer, None)
                self.served[peer] = Served(number, donors)
            if self.me in donors:
                place = donors.index(self.me)
                head = Snapshot(number, self.applied, self.chain, record, place, len(donors))
                self._emit(Send(peer, head))
        self._ask_for_those_left()

    # -- lease -------------------------------------------------------------------------------

    def _may_commit(self) -> bool:
        """Not without a lease; alone, not before the arbiter was heard in this attempt.

        Others would have to answer, and the arbiter vouches for them. One that is alone could
        commit round after round in the time that its lease outlasts its exclusion.
        """
        filling = self.mode is Mode.FILLING
        key = Key(self.applied, Tag(self.cut, 0) if filling else self.tag)
        if self.lease and (self._confirmed == key or not self._is_alone()):
            return True
        self._confirm_lease(key)
        return False

    def _is_alone(self) -> bool:
        """Whether this commit needs nobody else's word."""
        return self.members == (self.me,)

    def _confirm_lease(self, key: Key) -> None:
        if self._confirming != key:
            self._confirming = key
            self._emit(ConfirmLease(*key))

    def _on_lease(self, event: LeaseConfirmed) -> None:
        key = Key(event.round, event.attempt)
        if key == self._confirming:
            self._confirming, self._confirmed = None, key
            self._progress()
