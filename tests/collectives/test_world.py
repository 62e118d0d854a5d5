"""Thousands of random schedules: the invariants hold, and every broken rule breaks one of them."""

from __future__ import annotations

import pytest

from manyhands.collectives.machine import RoundMachine
from tests.collectives import world_mutants as broken
from tests.collectives.world import Violation, World
from tests.collectives.world_directed import (
    ComingAndGoing,
    Deadly,
    Divided,
    Haunted,
    Hurriers,
    LastWords,
    LetsAnybodyGoQuietly,
    Liars,
    LostQueues,
    Orphaned,
    Overtaken,
    Redoing,
    Resumed,
    Shaken,
    Sniper,
    Starved,
    Stopping,
    Strangers,
    TwoLeavers,
    Widows,
)

BLOCK = 1000
BLOCKS = 10  # of each mode
INTERESTING = (
    "stood", "retried", "filled in", "sent back", "retries", "refused samples", "banks dropped",
    "take-overs", "quiet leaves", "all leaving", "snapshots", "started over", "finished",
    "finished by newcomers", "lost", "stopped: excluded", "stopped: sent back", "stopped: over",
    "kill", "pause", "suspect", "offline", "join", "rejoin", "leave", "restart", "lost queue",
    "alone",
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


MUTATIONS = [  # (what is broken, where it shows, schedules within which it must)
    (broken.KeepsTheResultUntilTheNextRoundStarts, LostQueues, 300),
    (broken.TakesResultsAfterItsStatus, LastWords, 20),
    (broken.GoesOnFromResultsAfterItsStatus, LastWords, 20),
    (broken.DecidesByMajority, World, 100),
    (broken.IgnoresTags, World, 100),
    (broken.SharesByItsOwnKnowledgeOfSpeeds, World, 100),
    (broken.AdmitsByView, World, 100),
    (broken.RefusesForItsOwnPartAlone, World, 100),
    (broken.ExitsAfterTheLastRealRound, World, 100),
    (broken.SharesOutTheWholeRoundAgain, World, 200),
    (broken.LeadsWithAnOldView, ComingAndGoing, 800),
    (broken.CommitsWithoutALease, Sniper, 300),
    (broken.CommitsWithoutEvidence, World, 300),
    (broken.TrustsItsLeaseWhenAlone, World, 300),
    (broken.GoesByARecordThatDidNotKnow, ComingAndGoing, 200),
    (broken.ConcludesAlthoughOthersAreThere, Starved, 50),
    (broken.TakesPartZeroForAll, World, 50),
    (broken.TrustsItsOwnStateAtTheFirstRecord, Resumed, 50),
    (broken.AsksOnceWhateverIsLost, World, 800),
    (broken.ForgetsWhoWasServed, World, 2000),
    (broken.TakesResultsFromAnybody, Liars, 50),
    (broken.AveragesWithAnybody, Strangers, 50),
    (broken.GoesByTheRecordOfAnotherRun, Resumed, 50),
    (broken.ClosesWithThoseOfAnotherRun, Resumed, 300),
    (RoundMachine, LetsAnybodyGoQuietly, 800),
    (broken.ReleasesDuringACut, TwoLeavers, 150),
    (broken.WaitsForThoseWhoAreGone, Orphaned, 200),
    (broken.OverlooksThatOthersTookOver, Overtaken, 50),
    (broken.ReportsWhatALostGenerationLeft, Haunted, 200),
    (broken.TakesAnyFill, World, 100),
    (broken.TakesPartsFromFarAhead, Hurriers, 50),
    (broken.KeepsResultsOfOtherAttempts, World, 100),
    (broken.NeverMissesARound, Starved, 50),
    (broken.WaitsForARecordThatIsLost, Starved, 50),
    (broken.LeavesBeforeItsLastRoundIsStable, Widows, 50),
    (broken.ForgetsWhoDied, Deadly, 50),
    (broken.CountsTheDeathsItHasSeen, Deadly, 800),
    (broken.TakesTheUninformedForDead, Deadly, 200),
    (broken.MovesClaimsInSilence, Shaken, 400),
    (broken.ForgetsMovesAtACut, Shaken, 400),
    (broken.AsksThoseWhoWereRefused, Redoing, 100),
    (broken.StopsForWhatItSawRefused, Stopping, 300),
    (broken.CountsResyncsAsRounds, Divided, 300),
    (broken.AnybodyGivesItsState, Divided, 800),
    (broken.ServesAStateOfTwoClasses, Divided, 300),
]
DIRECTED = (
    LostQueues, ComingAndGoing, Sniper, Liars, Hurriers, Strangers, Resumed,
    Deadly, Redoing, Shaken, Stopping, Divided,
)  # fmt: skip
AMBUSHES = (LastWords, Widows, TwoLeavers, Starved, Orphaned, Overtaken, Haunted)


def first_violation(machine, world, schedules):
    """Which schedule breaks an invariant, counted from 1, and how; None if none does.

    Only invariants count: a mutant that trips over itself says nothing about the protocol.
    """
    for n in range(schedules):
        try:
            world(n // 2, machine=machine, unordered=bool(n % 2)).run()
        except Violation as violation:
            return n + 1, str(violation)
    return None


@pytest.mark.parametrize(
    ("machine", "world", "schedules"),
    MUTATIONS,
    ids=[(w if m is RoundMachine else m).__name__ for m, w, _ in MUTATIONS],
)
def test_a_broken_rule_is_noticed(machine, world, schedules):
    found = first_violation(machine, world, schedules)
    assert found is not None
    print("noticed in schedule {}: {}".format(*found))


@pytest.mark.parametrize("world", DIRECTED)
def test_the_rules_as_they_are_pass_the_same_schedules(world):
    assert first_violation(RoundMachine, world, 800) is None


@pytest.mark.parametrize("world", AMBUSHES)
def test_the_rules_as_they_are_survive_ambushes(world):
    struck = 0
    for n in range(200):
        struck += world(n // 2, unordered=bool(n % 2)).run()["struck"]
    assert struck >= 10, "its moment hardly ever came, so nothing is known about it"
