"""Follower: what a peer outside the round commits, and whose word it takes for it."""

from __future__ import annotations

from abc import abstractmethod

import msgspec

from manyhands.collectives.book import Key
from manyhands.collectives.events import RoundGoneArrived, WantArrived
from manyhands.collectives.instructions import Send
from manyhands.collectives.messages import Fill, Record, RoundGone, Tag, Want
from manyhands.collectives.standing import Standing


class Follower(Standing):
    """Who comes, and who is behind. Members use some of it: they answer a Want."""

    @abstractmethod
    def _commit(self, tag: Tag) -> bool:
        """Commit round `applied` with the result of this attempt; False if it has to wait."""

    def _becomes_trusted(self) -> bool:
        """A newcomer's base is right if a record says that its chain came before that round.

        With a snapshot nothing can be missing after it. A state of one's own may be older than
        the first result that reached this peer: all parts of one attempt show that none was lost.
        """
        for tag in self.book.attempts(self.applied):
            key = Key(self.applied, tag)
            record = self.book.record(key)
            if record is not None and record.prev != self.chain:
                self._start_over("the state is not one of this run")
                return False
            if record is not None and (not self.brought or self.book.complete(key)):
                self.trusted = True
                if self.brought:
                    self._govern_by(key, record)
                return True
        if self.brought and self.book.newest_round() > self.applied:
            self._start_over("the run has gone on since this state")
        return False

    def _govern_by(self, key: Key, record: Record) -> None:
        """What governs the round that this complete attempt confirms, as it shows itself.

        The record that came with the state may be one of an earlier run: the last one of it, with
        its numbers. Nobody in this run whose chain is the same has a newer generation than this.
        """
        heads = [result.sum for result in self.book.results(key).values()]
        samples = any(share.ranges for head in heads for share in head.contributions)
        if samples or record.quarantine:
            self.record = msgspec.structs.replace(self._governing(), closing=False)
        self.generation = min(self.generation, record.generation)

    def _follow(self) -> bool:
        """Outside the round, commit on the evidence of the next: a record with the right chain.

        A record of an older generation than one that is held for this round proves nothing:
        followers took over, and its round was lost.
        """
        following = self.book.records(self.applied + 1)
        seen = (*self.book.records(self.applied), *following)
        newest = max((record.generation for record in seen), default=self.generation)
        proofs = {record.prev for record in following if record.generation == newest}
        for tag in self.book.attempts(self.applied):
            key = Key(self.applied, tag)
            if self.book.complete(key) and self.book.chain_after(self.chain, key) in proofs:
                return self._commit(tag)
        if proofs or self._was_left_behind():
            self._want()
        return False

    def _was_left_behind(self) -> bool:
        """Whether the results of this round were lost with their owner, and not just late.

        The run is at least two rounds ahead, and has been through a cut that nothing of this
        round or the next has come from.
        """
        near = (*self.book.attempts(self.applied), *self.book.attempts(self.applied + 1))
        newest = self.book.newest_round()
        far = self.book.attempts(newest) if newest > self.applied + 1 else ()
        return bool(far) and max(far).cut > max(near, default=self.tag).cut

    def _want(self) -> None:
        """Ask a peer for the round that was committed without this one; again, if it has gone."""
        helpers = self._following()
        if self.wanting is not None and self.wanting[1] in helpers:
            return
        if helpers:
            helper = helpers[self.applied % len(helpers)]
            self.wanting = (self.applied, helper)
            self._emit(Send(helper, Want(self.applied)))

    def _on_want(self, event: WantArrived) -> None:
        if self.kept is None or self.kept.key.round != event.round or not self.kept.results:
            self._emit(Send(event.sender, RoundGone(event.round)))
            return
        for result in self.kept.results.values():
            self._emit(Send(event.sender, Fill(None, result.sum)))

    def _on_round_gone(self, event: RoundGoneArrived) -> None:
        if self.wanting == (event.round, event.sender) and event.round == self.applied:
            self._start_over("a round was missed, and nobody keeps it any more")
