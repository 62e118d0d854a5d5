"""Round machines with one rule broken each; tests/collectives/test_world.py has to notice."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from manyhands.collectives.book import Book
from manyhands.collectives.instructions import AddUp, Generation, Send, StopReason
from manyhands.collectives.machine import RoundMachine
from manyhands.collectives.messages import NO_TAG, Fill
from manyhands.collectives.ranges import EMPTY, Ranges
from manyhands.collectives.refusal import Doubts
from manyhands.collectives.shares import share_out
from manyhands.collectives.standing import Mode
from manyhands.core.peers import NO_VIEW, PeerState
from manyhands.links.messages import Resign


class KeepsTheResultUntilTheNextRoundStarts(RoundMachine):
    def _contribute(self):
        self.kept = None
        super()._contribute()


class TakesResultsAfterItsStatus(RoundMachine):
    def _accepts(self, head):
        own = self.member and (head.round, head.attempt) == self._key
        return super()._accepts(head) or own

    def _step(self):
        if self.mode is Mode.TALKING and self.member and self.book.complete(self._key):
            return not self.book.refused(self._key) and self._commit(self.tag)
        return super()._step()


class GoesOnFromResultsAfterItsStatus(TakesResultsAfterItsStatus):
    """As well as it can: a verdict that it is ahead of does not stop it."""

    def _act(self, verdict):
        if self.applied > verdict.target:
            self._verdict = replace(verdict, target=self.applied, stands=True)
            self._go_on()
        else:
            super()._act(verdict)

    def _fill_in(self, verdict):
        if not verdict.stands or self.applied < verdict.target:
            super()._fill_in(verdict)
            return
        for k, peer in verdict.fillers.items():
            if peer == self.me:
                self._emit(Send(None, Fill(self.cut, self.kept.results[k].sum)))


class ReleasesDuringACut(RoundMachine):
    def _release(self):
        mode, self.mode = self.mode, Mode.RUNNING
        super()._release()
        self.mode = mode

    def _fill_in(self, verdict):
        if verdict.stands or self.kept is not None:  # what it has released it cannot send
            super()._fill_in(verdict)


class WaitsForThoseWhoAreGone(RoundMachine):
    def _is_first(self):
        return self.brought and not self.trusted and super()._is_first()


class OverlooksThatOthersTookOver(RoundMachine):
    def _is_passed_over(self, head):
        return False


class TakesOverInSilence(RoundMachine):
    """As if what the dead had called stable were not lost."""

    def _emit(self, *instructions):
        super()._emit(*instructions)
        if any(isinstance(one, Generation) for one in instructions):
            self.generation = self._verdict.generation


class ReportsWhatALostGenerationLeft(RoundMachine):
    def _status(self):
        generation, self.generation = self.generation, NO_VIEW
        status = super()._status()
        self.generation = generation
        return msgspec.structs.replace(status, generation=generation)


class TakesAnyFill(RoundMachine):
    def _may_fill(self, cut):
        return True


class TakesPartsFromFarAhead(RoundMachine):
    def _expects(self, part):
        useful = part.attempt.cut >= self.cut and part.round >= self.applied
        return useful and self.based and self._may_be_owner()


class KeepsResultsOfOtherAttempts(RoundMachine):
    beginning = False

    def _begin(self, *place):
        self.beginning = True
        super()._begin(*place)
        self.beginning = False

    def _drop_sums(self, wanted):
        if not self.beginning:
            super()._drop_sums(wanted)


class NeverMissesARound(RoundMachine):
    def _was_left_behind(self):
        return False


class WaitsForARecordThatIsLost(RoundMachine):
    def _follow(self):
        return self.trusted and super()._follow()


class LeavesBeforeItsLastRoundIsStable(RoundMachine):
    def _maybe_go(self):
        kept, self.kept = self.kept, None
        super()._maybe_go()
        self.kept = kept


class DecidesByMajority(RoundMachine):
    def _all_heard(self, heard):
        return 2 * len(heard) > len(self.participants)


class DecidesAlone(RoundMachine):
    def _all_heard(self, heard):
        return self.me in heard


class IgnoresTags(RoundMachine):
    def _on_part(self, event):
        super()._on_part(replace(event, part=self._with_my_tag(event.part)))

    def _on_sum(self, event):
        mine = self.member and self.mode is Mode.RUNNING
        super()._on_sum(replace(event, sum=self._with_my_tag(event.sum)) if mine else event)

    def _with_my_tag(self, message):
        return msgspec.structs.replace(message, attempt=self.tag)


class SharesByItsOwnKnowledgeOfSpeeds(RoundMachine):
    def _begin(self, members, claims, tag):
        if self.me in members and not self.asked and tag.attempt == 0:
            speeds = {m: 1 + (m == self.me) for m in members}
            shares = share_out(self._whole(), members, speeds)
            claims = next(share.ranges for share in shares if share.peer == self.me)
        super()._begin(members, claims, tag)


class AdmitsByView(RoundMachine):
    def _begin(self, members, claims, tag):
        if members and tag.attempt == 0:
            members = tuple(p for p, s in self.states.items() if s is PeerState.ACTIVE)
        super()._begin(members, claims, tag)


class RefusesForItsOwnPartAlone(RoundMachine):
    def _emit(self, *instructions):
        super()._emit(*map(self._dropped, instructions))

    def _dropped(self, instruction):
        if not isinstance(instruction, AddUp) or not instruction.sum.refused:
            return instruction
        head = instruction.sum
        good = tuple(s for s in head.contributions if not s.ranges & head.refused)
        return AddUp(msgspec.structs.replace(head, contributions=good, refused=EMPTY))


class ConcludesAlthoughOthersAreThere(RoundMachine):
    def _contribute(self):
        states, self.states = self.states, {self.me: self.states[self.me]}
        super()._contribute()
        self.states = states


class TakesPartZeroForAll(RoundMachine):
    """As if every result had been concluded."""

    def _step(self):
        self.book.__class__ = _HastyBook  # a new one is made when it starts over
        return super()._step()


class _HastyBook(Book):
    def complete(self, key):
        return super().complete(key) or set(self.results(key)) == {0}


class ExitsAfterTheLastRealRound(RoundMachine):
    def _serve(self, record, donors):
        super()._serve(record, donors)
        if record.closing:
            self._stop(StopReason.FINISHED, "one round too early", Resign(True, ""))

    def _begin(self, *place):
        if not self.stopped:
            super()._begin(*place)


class SharesOutTheWholeRoundAgain(RoundMachine):
    def _settle(self, verdict):
        found = super()._settle(verdict)
        if not found.members:
            return found
        speeds = {p: self._heard[p].speed for p in found.members}
        samples = self._whole() - found.quarantine
        return replace(found, claims=share_out(samples, found.members, speeds))


class LeadsWithAnOldView(RoundMachine):
    def _view_is_old(self, governing):
        return False


class CommitsWithoutALease(RoundMachine):
    def _may_commit(self):
        return True


class CommitsWithoutEvidence(RoundMachine):
    def _counts_now(self, tag):
        return tag == self.tag if self.member else True


class TrustsItsLeaseWhenAlone(RoundMachine):
    def _is_alone(self):
        return False


class GoesByARecordThatDidNotKnow(RoundMachine):
    def _since(self):
        return NO_VIEW


class TrustsItsOwnStateAtTheFirstRecord(RoundMachine):
    def _becomes_trusted(self):
        self.brought = False
        return super()._becomes_trusted()


class AsksOnceWhateverIsLost(RoundMachine):
    def _seek(self, *, again=False):
        super()._seek()


class ForgetsWhoWasServed(RoundMachine):
    def _ask_for_those_left(self):
        self.served.clear()


class TakesResultsFromAnybody(RoundMachine):
    def _is_from_owner(self, event):
        return True


class AveragesWithAnybody(RoundMachine):
    def _on_record(self, event):
        pass


class GoesByTheRecordOfAnotherRun(RoundMachine):
    def _found(self):
        record, generation = self.record, self.generation
        super()._found()
        self.record, self.generation = record, generation


class ClosesWithThoseOfAnotherRun(RoundMachine):
    def _govern_by(self, key, record):
        pass


class ForgetsWhoDied(RoundMachine):
    def _status(self):
        return msgspec.structs.replace(super()._status(), losses=())


class CountsTheDeathsItHasSeen(RoundMachine):
    def _settle(self, verdict):
        return super()._settle(replace(verdict, losses=self.losses if verdict.losses else ()))


class MovesClaimsInSilence(RoundMachine):
    def _status(self):
        return msgspec.structs.replace(super()._status(), doubted=EMPTY)


class AsksThoseWhoWereRefused(RoundMachine):
    def _try_again(self, tag, refused):
        self.doubts = Doubts()
        super()._try_again(tag, refused)


class ForgetsMovesAtACut(RoundMachine):
    def _begin(self, members, claims, tag):
        if tag.attempt == 0:
            self.doubts = Doubts()
        super()._begin(members, claims, tag)


class TakesTheUninformedForDead(RoundMachine):
    def _status(self):
        return msgspec.structs.replace(super()._status(), begun=NO_TAG)


class StopsForWhatItSawRefused(RoundMachine):
    def _act(self, verdict):
        super()._act(replace(verdict, refused=EMPTY))


class CountsResyncsAsRounds(RoundMachine):
    def _whole(self):
        record = self._governing()
        if record.closing or record.resync:
            return super()._whole()
        return Ranges.whole(self.course.num_samples(self.applied))


class AnybodyGivesItsState(RoundMachine):
    def _settle(self, verdict):
        found = super()._settle(verdict)
        if not found.members or not self._governing().resync:
            return found
        speeds = {p: self._heard[p].speed for p in found.members}
        claims = share_out(self._whole() - found.quarantine, found.members, speeds)
        return replace(found, claims=claims)


class ServesAStateOfTwoClasses(RoundMachine):
    def _serve(self, record, members):
        turned = tuple(p for p in members if p not in record.anchors)
        super()._serve(msgspec.structs.replace(record, anchors=turned), members)
