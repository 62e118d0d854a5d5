"""A minute of faults of every kind, half of it at each meeting point; and the arithmetic of the
tool that plays longer ones.
"""

from __future__ import annotations

import copy
import statistics
from unittest.mock import Mock

import pytest

from tests.replica import chaos
from tests.replica.chaos import Commit, History
from tests.replica.chaos_peer import BATCH

pytestmark = pytest.mark.usefixtures("zygote", "hub")  # before the leak check looks


DECKS = {
    "hub": ("kill", "leave", "stall", "stop"),
    "amqp": ("kill", "blip", "cut", "stop+kill"),
}
SEED, EVERY_S = 20261116, 4.5


def test_half_a_minute_of_faults(zygote, url, request):
    """Each sample once, equal states, the losses of one process, everybody back in the end; `play`
    fails if not.
    """
    deck = DECKS[request.node.callspec.params["url"]]
    seconds = (len(deck) + 1) * EVERY_S  # the first is calm
    played = chaos.play(zygote, url, seed=SEED, seconds=seconds, every_s=EVERY_S, deck=deck)
    chaos.show(played.rows())  # orientation: it depends on the machine's speed
    assert sorted(fault.kind for fault in played.faults) == sorted(deck)
    # Not how quick this machine is, but by what a death is noticed: by its link, which breaks, or
    # else by nothing before its lease is over.
    assert statistics.median(played.pauses("kill")) < 0.75 * chaos.LEASE_S
    assert statistics.median(played.pauses(*chaos.SILENT)) < 2 * chaos.LEASE_S


def test_the_decks_have_all_kinds():
    assert {kind for deck in DECKS.values() for kind in deck} == set(chaos.DECK)


def test_a_pause_counts_to_its_end():
    """Also if that is after the next fault."""
    played = chaos.Chaos(Mock(), "", 1, (), Mock())
    times = (0.0, 1.0, 2.5, 3.0, 9.0, 9.5)
    played.commits = {n: Commit(at_s, {}) for n, at_s in enumerate(times)}
    played.faults = [
        chaos.Fault(kind, "a", at_s) for kind, at_s in (("kill", 0.0), ("stop", 2.5), ("cut", 4.0))
    ]
    assert played.pauses("kill", "stop") == [1.5, 6.0]


def history(name: str = "a", rounds=(0, 1, 2)) -> History:
    half = BATCH // 2
    shares = {"a": [[0, half]], "b": [[half, BATCH]]}
    said = [
        {"round": r, "at_s": float(r), "loss": 1.0, "shares": shares, "state": f"{r}"}
        for r in rounds
    ]
    return History(name, copy.deepcopy(said))


def test_the_oracle_takes_what_is_right():
    dead = History("c", [{**history().said[1], "state": "its own"}], away=[float("inf")])
    absent = History("d", [*dead.said, history().said[2]], away=[1.5])
    chaos.check([history(), history("b", (1, 2)), dead, absent], losses=[1.0] * 3)


def test_only_the_last_round_before_an_absence_may_differ():
    first, last = history().said[1:]
    for said, away in (
        ([{**first, "state": "x"}, last], 2.5),
        ([first, {**last, "state": "x"}], 1.5),
    ):
        with pytest.raises(AssertionError, match="another state"):
            chaos.check([history(), History("b", said, away=[away])], losses=[1.0] * 3)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"shares": {"a": [[0, BATCH - 1]]}}, "not all samples"),
        ({"shares": {"a": [[0, BATCH]], "b": [[7, 8]]}}, "one twice"),
        ({"loss": 1.0 + 2 * chaos.TOLERANCE}, "loss"),
        ({"state": "another"}, "another state"),
        ({"round": 3}, "missing"),
    ],
)
def test_the_oracle_finds(change, complaint):
    wrong = history("b")
    wrong.said[1].update(change)
    histories = [wrong] if "round" in change else [history(), wrong]
    with pytest.raises(AssertionError, match=complaint):
        chaos.check(histories, losses=[1.0] * 4)


def test_rounds_count_when_they_are_committed():
    commits = {n: Commit(10.0 + n, {}) for n in range(11)}
    assert chaos.committed_between(10.0, 12.5, commits) == 2 * BATCH
    assert chaos.committed_between(17.0, 19.0, commits) == 2 * BATCH - 140  # the end of an epoch


def test_alive_time_is_what_is_within():
    spans = [[0.0, 2.0], [3.0, float("inf")], [9.0, 10.0]]
    assert chaos.overlap_s(1.0, 5.0, spans) == pytest.approx(3.0)


def row(kind: str, **facts) -> dict:
    return {"kind": kind, "faults": 2, "goodput": 1.0, "lost_most_s": 0.0, "never_back": 0} | facts


def test_promises():
    kept = [row("kill", goodput=0.971), row("stop", lost_most_s=3.9, goodput=0.7), row("cut")]
    assert chaos.broken(kept) == []
    for one in (
        row("kill", goodput=0.969),
        row("stop+kill", lost_most_s=4.1),
        row("cut", never_back=1),
    ):
        assert len(chaos.broken([*kept, one])) == 1
