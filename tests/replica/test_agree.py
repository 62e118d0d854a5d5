"""What peers agree on is the same everywhere, whatever each of them has said, and whoever dies."""

from __future__ import annotations

import itertools
import math
import os

import pytest
from torch.utils.data import DataLoader

from manyhands.core.errors import UsageError
from tests.collectives.rounds_peer import PeerProcess
from tests.replica.loops import EPOCHS, THREE, Points, Recipe, mean_loss, together

pytestmark = pytest.mark.usefixtures("zygote", "hub")  # before the leak check looks
PROGRAM = "tests.replica.agreement"
_runs = itertools.count()


def test_the_first_of_the_roster_has_the_word():
    """Known right after the round for which it was said."""
    found = {}

    def loop(hand, model, optimizer, loader, scheduler):
        mine = found.setdefault(hand.name, [])
        for _ in range(EPOCHS):
            for batch in loader:
                at, roster = hand.round, [int(peer.name[-1]) for peer in hand.roster]
                agreed = hand.agree(10 * hand.name + at, "mine")
                mean_loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                mine.append((agreed.round, float(agreed), bool(agreed)))
                assert hand.round == at + 1
        assert float(agreed) == 10 * roster[0] + at

    together(Recipe(loop), THREE)
    assert [round_ for round_, *_ in found[0]] == list(range(len(found[0])))
    assert found[1] == found[2] == found[0]


def test_who_says_nothing_leaves_it_to_the_others():
    found = {}

    def loop(hand, model, optimizer, loader, scheduler):
        for _ in range(EPOCHS):
            for batch in loader:
                roster = [int(peer.name[-1]) for peer in hand.roster]
                if hand.name != roster[0]:
                    hand.agree(hand.name, "late")
                mean_loss(model, batch).backward()
                optimizer.step()
        found[hand.name] = (float(hand.agree(math.nan, "late")), float(roster[1]))

    together(Recipe(loop), THREE)
    assert all(agreed == second for agreed, second in found.values())
    assert len(set(found.values())) == 1


def test_who_has_no_samples_is_heard_too():
    """Two samples a round, for three peers."""
    known = []

    def loop(hand, model, optimizer, loader, scheduler):
        for batch in loader:
            hand.agree(hand.name, f"of {hand.name}")
            mean_loss(model, batch).backward()
            optimizer.step()
        known.append(dict(hand._session.scalars.agreed))

    together(Recipe(loop, data=lambda: DataLoader(Points(), 2), epochs=1), THREE)
    assert known == [known[0]] * 3
    assert sorted(known[0]) == ["of 0", "of 1", "of 2"]


def test_it_is_false_before_anything_is_known_and_names_are_checked():
    def loop(hand, model, optimizer, loader, scheduler):
        for batch in loader:
            agreed = hand.agree(True, "done")
            assert not agreed
            assert math.isnan(float(agreed))
            assert agreed.round is None
            with pytest.raises(UsageError, match="1 to 64 bytes"):
                hand.agree(1, "")
            mean_loss(model, batch).backward()
            assert agreed
            break

    together(Recipe(loop))


def test_said_after_backward_it_comes_with_the_next_round():
    def loop(hand, model, optimizer, loader, scheduler):
        before = None
        for _ in range(EPOCHS):
            for batch in loader:
                mean_loss(model, batch).backward()
                agreed = hand.agree(hand.round, "round")
                assert agreed.round == (None if before is None else hand.round - 1)
                if before is not None:
                    assert float(agreed) == before
                before = hand.round
                optimizer.step()

    together(Recipe(loop), THREE)


class Peers:
    """Of one run; each with a wish."""

    def __init__(self, zygote, url, wishes, points=(), **more):
        run = f"agree-{os.getpid()}-{next(_runs)}"
        train = {"url": url, "run": run, "min_peers": len(wishes), "lease_s": 10.0, "epochs": 4}
        self.all = [
            PeerProcess(
                zygote,
                f"hand{number}",
                program=PROGRAM,
                points=[point for place, point in points if place == number],
                train=train | {"name": f"hand{number}", "wish": wish} | more,
            )
            for number, wish in enumerate(wishes)
        ]

    def __enter__(self):
        return self.all

    def __exit__(self, *error):
        for peer in self.all:
            peer.close()


def test_different_wishes_and_one_end(zygote, url):
    # At a broker one may be a little late for the first rounds: it is in before the first wish.
    with Peers(zygote, url, [8, 5, 12], linger_s=0.1) as peers:
        for peer in peers:
            assert peer.wait(60) == 0, peer.report()
        ends = [peer.until(lambda said: "stopped" in said) for peer in peers]
        assert ends == [ends[0]] * 3
        assert ends[0]["stopped"] == ends[0]["value"] + 1


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("what", ["forward", "backward", "Sum"])
def test_one_is_killed_and_the_others_go_by_the_same(zygote, hub, place, what):
    url = f"{hub.address}?insecure=1"
    points = [(place, {"what": what, "round": 5 if what == "Sum" else 3, "then": "die"})]
    with Peers(zygote, url, [6, 7, 8], points) as peers:
        assert peers[place].wait(60) == -9, peers[place].report()
        left = [peer for peer in peers if peer is not peers[place]]
        for peer in left:
            assert peer.wait(60) == 0, peer.report()
        first, second = ([s for s in peer.said if "round" in s] for peer in left)
        assert first == second
        ends = [peer.until(lambda said: "stopped" in said) for peer in left]
        assert ends[0] == ends[1]
        assert ends[0]["stopped"] < 16
