"""Thousands of random schedules: the invariants hold, and every broken rule breaks one of them."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from manyhands.collectives import events as e
from manyhands.collectives import messages as m
from manyhands.collectives.instructions import AddUp, StopReason
from manyhands.collectives.machine import RoundMachine
from manyhands.collectives.ranges import EMPTY
from manyhands.collectives.shares import share_out
from manyhands.collectives.standing import Mode
from manyhands.core.peers import NO_VIEW, PeerState, ViewNumber
from manyhands.links.messages import Gone, Resign
from tests.collectives.world import HUB, SEED_CHAIN, Violation, World

BLOCK = 1000
BLOCKS = 10  # of each mode
INTERESTING = (
    "stood", "retried", "filled in", "sent back", "retries", "refused samples", "banks dropped",
    "take-overs", "quiet leaves", "all leaving", "snapshots", "started over", "finished",
    "finished by newcomers", "lost", "stopped: excluded", "stopped: sent back", "stopped: over",
    "kill", "pause", "suspect", "offline", "join", "rejoin", "leave", "restart", "lost queue",
)  # fmt: skip


@pytest.mark.parametrize("block", range(BLOCKS))
@pytest.mark.parametrize("unordered", [False, True], ids=["ordered", "unordered"])
def test_the_invariants_hold(block, unordered):
    total = World(block * BLOCK, unordered=unordered).run()
    for seed in range(block * BLOCK + 1, (block + 1) * BLOCK):
        try:
            total += World(seed, unordered=unordered).run()
        except Exception as error:
            error.add_note(f"seed {seed}: see python -m tests.collectives.chaos --trace {seed}")
            raise
    missing = [name for name in INTERESTING if not total[name]]
    assert not missing, f"these never happened, so nothing is known about them: {missing}"


# -- the rules, broken one at a time ---------------------------------------------------------


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


class DecidesByMajority(RoundMachine):
    def _all_heard(self, heard):
        return 2 * len(heard) > len(self.participants)


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


class ExitsAfterTheLastRealRound(RoundMachine):
    def _serve(self, record):
        super()._serve(record)
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


class LetsAnybodyGoQuietly(World):
    """The hub makes a Gone quiet although a cut has come since."""

    def hear(self, number, word):
        super().hear(number, Gone(self.view.cut) if isinstance(word, Gone) else word)


# -- schedules for what dice rarely bring about -----------------------------------------------


class Directed(World):
    """Nothing but the faults named, at their steps."""

    script = ()

    def __init__(self, seed, **options):
        super().__init__(seed * 5, **options)  # no storms
        self.faults = list(self.script)
        self.fenced, self.poison = False, set()


class LostQueues(Directed):
    """Cut upon cut, with everybody alive."""

    script = tuple((step, "lost queue") for step in range(60, 300, 20))


class ComingAndGoing(Directed):
    """The lead hears late of those who leave."""

    script = ((1, "join"), (60, "leave"), (70, "join"), (90, "join"))


class Sniper(Directed):
    """The only member is excluded the moment that a follower could take over; it learns it late."""

    script = tuple((step, "snipe") for step in range(10, 400, 2))

    def fault(self, kind):
        members = [p for p in self.alive() if p.machine.member and p.machine.active]
        if len(members) == 1 and len(self.view.peers(PeerState.ACTIVE)) > 1:
            number = members[0].number
            self.exclude(number)
            self.slow[HUB, number], self.slowness = True, 0.98


class Liars(Directed):
    """Members fan out results of parts that are not theirs."""

    script = tuple((step, "lie") for step in range(20, 300, 10))

    def __init__(self, seed, **options):
        super().__init__(seed, **options)
        self.lazy = False  # or a result would lie beside the lie while it is being made

    def fault(self, kind):
        liars = [p for p in self.alive() if p.machine.member and len(p.machine.members) > 1]
        if not liars:
            return
        liar = self.rng.choice(liars)
        machine, k = liar.machine, self.rng.randrange(1, self.num_parts)
        if machine.members[k % len(machine.members)] == liar.number:
            return
        shares = tuple(m.Share(peer, EMPTY) for peer in machine.members)
        lie = m.Sum(machine.applied, machine.tag, k, shares)
        for other in self.alive():
            if other is not liar:
                self.push(liar.number, other.number, (m.encode(lie), b"a lie"))

    def file(self, peer, head, digest):
        peer.sums.setdefault((head.round, head.attempt, head.k), digest)  # the first one stays


class Strangers(Directed):
    """Peers with other tensors join. Nobody can read what they send."""

    script = ((1, "join"), *((step, "stranger") for step in (5, 30, 60)))

    def fault(self, kind):
        self.form = "other tensors" if kind == "stranger" else World.form
        self.join()

    def poisoned(self, peer, part):
        return peer.machine.course.form != World.form and bool(part.ranges)

    def check_samples(self, round_, heads, record, whole):
        super().check_samples(round_, heads, record, whole)
        self.require(not record.quarantine, "I12 samples were refused for another form")


class Resumed(World):
    """Everybody comes with the last state of an earlier run, in which there were many views."""

    seed_state = e.StateOffered(
        2,
        SEED_CHAIN,
        m.Record(b"", ViewNumber(1, 90_000), ViewNumber(1, 80_000), (), closing=True),
    )

    def stop(self, peer, instruction):
        super().stop(peer, instruction)
        if instruction.reason is StopReason.FINISHED:
            last = peer.history[peer.machine.applied - 1]
            self.require(last.empty, "I9 it went by the end of the run before")


MUTATIONS = [  # (what is broken, where it shows, schedules within which it must)
    (KeepsTheResultUntilTheNextRoundStarts, LostQueues, 300),
    (TakesResultsAfterItsStatus, LostQueues, 300),
    (DecidesByMajority, World, 100),
    (IgnoresTags, World, 100),
    (SharesByItsOwnKnowledgeOfSpeeds, World, 100),
    (AdmitsByView, World, 100),
    (RefusesForItsOwnPartAlone, World, 100),
    (ExitsAfterTheLastRealRound, World, 100),
    (SharesOutTheWholeRoundAgain, World, 200),
    (LeadsWithAnOldView, ComingAndGoing, 800),
    (CommitsWithoutALease, Sniper, 300),
    (CommitsWithoutEvidence, World, 300),
    (TrustsItsLeaseWhenAlone, World, 300),
    (GoesByARecordThatDidNotKnow, World, 200),
    (TrustsItsOwnStateAtTheFirstRecord, World, 500),
    (AsksOnceWhateverIsLost, World, 300),
    (TakesResultsFromAnybody, Liars, 50),
    (AveragesWithAnybody, Strangers, 50),
    (GoesByTheRecordOfAnotherRun, Resumed, 50),
    (ClosesWithThoseOfAnotherRun, Resumed, 300),
    (RoundMachine, LetsAnybodyGoQuietly, 800),
]


def schedules_until_caught(machine, world, schedules):
    """How many schedules it takes to see that something is wrong; None if it does not show."""
    for n in range(schedules):
        try:
            world(n // 2, machine=machine, unordered=bool(n % 2)).run()
        except (Violation, AssertionError, LookupError):  # a machine that breaks is caught, too
            return n + 1
    return None


@pytest.mark.parametrize(
    ("machine", "world", "schedules"),
    MUTATIONS,
    ids=[(w if m is RoundMachine else m).__name__ for m, w, _ in MUTATIONS],
)
def test_a_broken_rule_is_noticed(machine, world, schedules):
    needed = schedules_until_caught(machine, world, schedules)
    assert needed is not None
    print(f"noticed after {needed} schedules")


@pytest.mark.parametrize("world", [LostQueues, ComingAndGoing, Sniper, Liars, Strangers, Resumed])
def test_the_rules_as_they_are_pass_the_same_schedules(world):
    assert schedules_until_caught(RoundMachine, world, 800) is None
