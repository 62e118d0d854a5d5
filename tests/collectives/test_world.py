"""Thousands of random schedules: the invariants hold, and every broken rule breaks one of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from manyhands.collectives.machine import RoundMachine
from tests.collectives import world, world_directed, world_waits
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

ROOT = Path(__file__).parents[2]
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


MUTATIONS = [  # (what is broken, where it shows, schedules within which it must, what it breaks)
    (broken.KeepsTheResultUntilTheNextRoundStarts, LostQueues, 300, "I5"),
    (broken.TakesResultsAfterItsStatus, LastWords, 20, "I10"),
    (broken.GoesOnFromResultsAfterItsStatus, LastWords, 20, "I10"),
    (broken.DecidesByMajority, World, 100, "I5"),
    (broken.DecidesAlone, LostQueues, 100, "I1 I4 I5 I11"),
    (broken.IgnoresTags, World, 100, "I10"),
    (broken.SharesByItsOwnKnowledgeOfSpeeds, World, 100, "I6"),
    (broken.AdmitsByView, World, 100, "I5"),
    (broken.RefusesForItsOwnPartAlone, World, 100, "I2"),
    (broken.ExitsAfterTheLastRealRound, World, 100, "I9"),
    (broken.SharesOutTheWholeRoundAgain, World, 200, "I3"),
    (broken.LeadsWithAnOldView, ComingAndGoing, 800, "I10"),
    (broken.CommitsWithoutALease, Sniper, 300, "I8"),
    (broken.CommitsWithoutEvidence, World, 300, "I10"),
    (broken.TrustsItsLeaseWhenAlone, World, 300, "I8"),
    (broken.GoesByARecordThatDidNotKnow, ComingAndGoing, 200, "I10"),
    (broken.ConcludesAlthoughOthersAreThere, Starved, 50, "I10"),
    (broken.TakesPartZeroForAll, World, 50, "I1 I3"),
    (broken.TrustsItsOwnStateAtTheFirstRecord, Resumed, 50, "I9"),
    (broken.AsksOnceWhateverIsLost, World, 800, "I10"),
    (broken.ForgetsWhoWasServed, World, 2000, "I10"),
    (broken.TakesResultsFromAnybody, Liars, 50, "I1 I2"),
    (broken.AveragesWithAnybody, Strangers, 50, "I12"),
    (broken.GoesByTheRecordOfAnotherRun, Resumed, 50, "I3"),
    (broken.ClosesWithThoseOfAnotherRun, Resumed, 300, "I9"),
    (RoundMachine, LetsAnybodyGoQuietly, 800, "I10"),
    (broken.ReleasesDuringACut, TwoLeavers, 150, "I10"),
    (broken.WaitsForThoseWhoAreGone, Orphaned, 200, "I10"),
    (broken.OverlooksThatOthersTookOver, Overtaken, 50, "I10"),
    (broken.TakesOverInSilence, World, 200, "I7"),
    (broken.ReportsWhatALostGenerationLeft, Haunted, 200, "I5"),
    (broken.TakesAnyFill, World, 100, "I13"),
    (broken.TakesPartsFromFarAhead, Hurriers, 50, "I13"),
    (broken.KeepsResultsOfOtherAttempts, World, 100, "I13"),
    (broken.NeverMissesARound, Starved, 50, "I10"),
    (broken.WaitsForARecordThatIsLost, Starved, 50, "I10"),
    (broken.LeavesBeforeItsLastRoundIsStable, Widows, 50, "I9"),
    (broken.ForgetsWhoDied, Deadly, 50, "I14"),
    (broken.CountsTheDeathsItHasSeen, Deadly, 800, "I14"),
    (broken.TakesTheUninformedForDead, Deadly, 200, "I14"),
    (broken.MovesClaimsInSilence, Shaken, 400, "I6"),
    (broken.ForgetsMovesAtACut, Shaken, 400, "I6"),
    (broken.AsksThoseWhoWereRefused, Redoing, 100, "I10"),
    (broken.StopsForWhatItSawRefused, Stopping, 300, "I15"),
    (broken.CountsResyncsAsRounds, Divided, 300, "I3"),
    (broken.AnybodyGivesItsState, Divided, 800, "I16"),
    (broken.ServesAStateOfTwoClasses, Divided, 300, "I16"),
]
DIRECTED = (
    LostQueues, ComingAndGoing, Sniper, Liars, Hurriers, Strangers, Resumed,
    Deadly, Redoing, Shaken, Stopping, Divided,
)  # fmt: skip
AMBUSHES = (LastWords, Widows, TwoLeavers, Starved, Orphaned, Overtaken, Haunted)


def first_violation(machine, world, schedules):
    """Which schedule breaks something, counted from 1, and how; None if none does."""
    for n in range(schedules):
        try:
            world(n // 2, machine=machine, unordered=bool(n % 2)).run()
        except Violation as violation:
            return n + 1, str(violation)
    return None


def broken_by(machine, world, schedules, wanted):
    """Of the wanted invariants those that these schedules break: in which one first, and how.

    Only what names an invariant counts: a mutant that trips over itself says nothing about the
    protocol.
    """
    found = {}
    for n in range(schedules):
        try:
            world(n // 2, machine=machine, unordered=bool(n % 2)).run()
        except Violation as violation:
            number = re.match(r"I\d+\b", str(violation))
            if number is not None and number[0] in wanted:
                found.setdefault(number[0], f"in schedule {n + 1}: {violation}")
                if wanted == found.keys():
                    break
    return found


@pytest.mark.parametrize(
    ("machine", "world", "schedules", "breaks"),
    MUTATIONS,
    ids=[(w if m is RoundMachine else m).__name__ for m, w, *_ in MUTATIONS],
)
def test_a_broken_rule_breaks_these_invariants(machine, world, schedules, breaks):
    wanted = set(breaks.split())
    found = broken_by(machine, world, schedules, wanted)
    print(*found.values(), sep="\n")
    assert wanted == found.keys()


def test_every_invariant_has_a_check_and_every_check_is_tripped_by_some_broken_rule():
    modules = (world, world_directed, world_waits)
    texts = [Path(module.__file__).read_text() for module in modules]
    checked = {number for text in texts for number in re.findall(r"""["'](I\d+)\b""", text)}
    promised = re.findall(r"^- (I\d+) ", (ROOT / "docs/rounds.md").read_text(), flags=re.M)
    assert checked == set(promised)
    assert checked == {number for *_, breaks in MUTATIONS for number in breaks.split()}


@pytest.mark.parametrize("world", DIRECTED)
def test_the_rules_as_they_are_pass_the_same_schedules(world):
    assert first_violation(RoundMachine, world, 800) is None


@pytest.mark.parametrize("seed", [40035, 62101], ids=["between two cuts", "with a cut"])
def test_a_follower_that_comes_hides_no_death(seed):
    """Rare: of the cuts before it the members had settled none, or it has begun at none itself."""
    assert Deadly(seed).run()["killed"] == 3


@pytest.mark.parametrize("world", AMBUSHES)
def test_the_rules_as_they_are_survive_ambushes(world):
    struck = 0
    for n in range(200):
        struck += world(n // 2, unordered=bool(n % 2)).run()["struck"]
    assert struck >= 10, "its moment hardly ever came, so nothing is known about it"
