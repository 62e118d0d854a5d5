"""Peers of different arithmetic get equal parameters again and again, whoever dies meanwhile."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from torch import nn

from manyhands.collectives.bank import Bank, pool_for
from manyhands.collectives.layout import Layout
from manyhands.collectives.messages import Record, SelfReport
from manyhands.collectives.ranges import EMPTY
from manyhands.collectives.results import Result
from manyhands.collectives.shares import ONE_CLASS
from manyhands.core.errors import UsageError
from manyhands.core.peers import NO_VIEW
from manyhands.replica.conductor import Base, Turn
from manyhands.replica.deviation import Watch, classes_of
from manyhands.replica.gates import Gate
from manyhands.replica.gradients import Gradients, parameters_of
from manyhands.replica.openings import Openings
from manyhands.replica.options import Options
from manyhands.replica.replica import Replica
from manyhands.replica.scalars import Scalars
from tests.replica.hands import Hands, saving, until_members, until_round, until_saved
from tests.replica.loops import EPOCHS, TWO, Recipe, mean_loss, together
from tests.replica.test_deviation import Peer
from tests.replica.training import digest_of, nudge

pytestmark = pytest.mark.usefixtures("zygote", "hub")  # before the leak check looks

RESYNC = {"what": "Part", "exact": True}
COUNT = {"what": "Snapshot", "count": "any", "before": True, "then": "say"}
NEVER = 1 << 20


@pytest.fixture
def hub_url(hub):
    """Where nobody comes late for the first round."""
    return f"{hub.address}?insecure=1"


class Classes(Hands):
    """Peers of two classes. Those of the second are off by a bit after each step."""

    def __init__(self, zygote, url, *, epochs=6, **train):
        train = {"shares": "equal", "show": True, "pace_s": 0.005, **train}
        super().__init__(zygote, url, epochs=epochs, **train)

    def join_second(self, *points, **train):
        off = list(range(self.num_rounds))
        hand = self.join(*points, flush=True, astray=off, **train)
        self.strays[hand] = []
        return hand

    def begin(self, classes: str, *points, **train):
        """One after the other, the first with these points: it is the first of the roster."""
        hands = []
        for name in classes:
            join = self.join if name == "a" else self.join_second
            hands.append(join(*(() if hands else points), min_peers=len(classes), **train))
            hands[-1].until(lambda said: "dialed" in said)
        return hands


def parameters(hand, when="begins") -> dict[int, str]:
    """By round."""
    return {said[when]: said["parameters"] for said in hand.said if when in said}


def equal_rounds(one, other, when="begins") -> set[int]:
    """Those that both have begun, or ended, with the same parameters."""
    mine, theirs = parameters(one, when), parameters(other, when)
    return {number for number in mine if theirs.get(number) == mine[number]}


def check_equal(one, other) -> None:
    """Both have begun all rounds after one that both were in with the same, and ended none so."""
    in_both = [s["counted"] for s in one.said if {one.name, other.name} <= {*s.get("names", ())}]
    after = {number + 1 for number in in_both} & parameters(one).keys()
    assert after - equal_rounds(one, other) == set(), f"{one.report()}\n{other.report()}"
    assert len(after) > 6
    assert not equal_rounds(one, other, "ends") & after


def test_equal_at_every_resync_and_only_there(zygote, hub_url):
    """Between two they drift; nobody is named for that, and the run is that of one process."""
    with Classes(zygote, hub_url, resync_every=4) as hands:
        first, same, other = hands.begin("aab")
        hands.finish()
        assert equal_rounds(first, same) == set(range(hands.num_rounds))
        came = until_members(first, 3)
        # An opening of two rounds comes before round 0.
        expected = {number for number in range(hands.num_rounds) if (number + 2) % 4 == 0}
        after = set(range(came + 2, hands.num_rounds))  # there was one when the other had come
        assert equal_rounds(first, other) & after == expected & after
        assert len(expected & after) > 2
        assert not equal_rounds(first, other, "ends")
        for hand in hands.all:
            assert next(said["deviated"] for said in hand.said if "deviated" in said) == []
            assert hand.report().count("made equal every 4 rounds (resync_every)") == 1


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
def test_equal_in_every_round(zygote, hub_url, wire):
    """What a codec leaves out of gradients it does not leave out of parameters."""
    with Classes(zygote, hub_url, resync_every=1, wire=wire) as hands:
        first, other = hands.begin("ab")
        for hand in hands.all:
            assert hand.wait() == 0, hand.report()
        check_equal(first, other)
        # Whose they are, it has them as before.
        ended, begun = parameters(first, "ends"), parameters(first)
        assert all(ended[n] == begun[n + 1] for n in range(hands.num_rounds - 1))
        if wire == "fp32":
            hands.check()


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_the_anchor_dies_in_a_resync(zygote, url, before):
    """The next one of its class gives; before anything was sent, or after some of it."""
    with Classes(zygote, url, resync_every=1) as hands:
        death = {**RESYNC, "count": 9, "before": before, "then": "die"}
        first, second, other = hands.begin("aab", death)
        assert first.wait() == -9, first.report()
        hands.finish(first)
        check_equal(second, other)


def test_all_of_the_anchors_class_die(zygote, hub_url):
    """In a re-sync. Those of one class are left: there are no more of them."""
    with Classes(zygote, hub_url, resync_every=1) as hands:
        first, *others = hands.begin("abb", {**RESYNC, "count": 5, "then": "die"})
        assert first.wait() == -9, first.report()
        hands.finish(first)
        assert equal_rounds(*others) == set(range(hands.num_rounds))
        ended, begun = (parameters(others[0], when) for when in ("ends", "begins"))
        alone = [n for n in range(hands.num_rounds - 1) if ended[n] == begun[n + 1]]
        assert alone[-1] == hands.num_rounds - 2
        assert alone == list(range(alone[0], hands.num_rounds - 1))
        assert alone[0] > 0  # until then it had taken the first one's


def test_one_of_another_class_that_comes_causes_one(zygote, url):
    with Classes(zygote, url, epochs=12, resync_every=NEVER, linger_s=0.1) as hands:
        first, second = hands.begin("aa")
        until_round(first, 3)
        late = hands.join_second()
        came = until_members(first, 3)
        hands.finish()
        assert equal_rounds(first, second) == set(parameters(second))
        both = equal_rounds(first, late)
        # It has got its state before some round, and was made equal after the first it was in.
        assert came + 1 in both
        assert not {n for n in both if n >= came} - {came + 1}


def test_a_state_comes_from_one_class(zygote, url):
    """From the anchors' alone, though it is another one that is asked, perhaps."""
    with Classes(zygote, url, epochs=12, resync_every=1, linger_s=0.1) as hands:
        first = hands.join(COUNT, min_peers=3)
        first.until(lambda said: "dialed" in said)
        hands.join(COUNT, min_peers=3)
        other = hands.join_second(COUNT, min_peers=3)
        until_members(first, 3)
        late = hands.join()
        until_members(first, 4)
        hands.finish()
        sent = [sum(said.get("at") == "Snapshot" for said in hand.said) for hand in hands.all]
        assert sent[0], sent
        assert sent[1], sent
        assert not sent[2], sent
        both = equal_rounds(first, late)
        assert both == set(parameters(late))  # like those it got its state from, to the bit
        assert not equal_rounds(other, late, "ends")


def test_all_who_had_the_state_die_before_it_is_there(zygote, url):
    """The newcomer gets that of the other class."""
    with Classes(zygote, url, epochs=12, resync_every=NEVER, linger_s=0.1) as hands:
        middle = {"what": "Snapshot", "applied": 8, "count": 2, "before": True, "then": "die"}
        donor, first, _ = hands.begin("abb", middle)
        until_round(first, 8)
        late = hands.join_second()
        assert donor.wait() == -9, donor.report()
        late.until(lambda said: "begins" in said)
        hands.finish(donor)


def test_one_that_cannot_keep_up(zygote, hub_url):
    """A re-sync costs it no time, and is no sign that it could."""
    with Classes(zygote, hub_url, epochs=60, lease_s=2.0, resync_every=1, linger_s=0.05) as hands:
        first, _ = hands.begin("ab")
        until_members(first, 2)
        slow = hands.join(pace_s=0.4)
        assert slow.wait() == 1, slow.report()
        assert "TooSlow" in slow.report()


def test_of_one_class_there_are_none(zygote, hub_url):
    with Hands(zygote, hub_url, resync_every=1) as hands:
        point = {**RESYNC, "count": "any", "then": "say"}
        first, second = (hands.join(point, min_peers=2) for _ in range(2))
        hands.finish()
        for hand in (first, second):
            assert not any(said.get("at") == "Part" for said in hand.said)
            assert "kinds of arithmetic" not in hand.report()


def test_resumed_in_the_middle(zygote, hub_url, tmp_path):
    """Re-syncs are no rounds of the course, in the next life of a run either."""
    folder = tmp_path / "saved"
    with Classes(
        zygote, hub_url, resync_every=1, checkpoints=str(folder), save_every=1, resume=True
    ) as hands:
        hands.begin("ab", hands.brink, resume=False, **saving(6))
        until_saved(hands, folder, 6)
        hands.kill()
        dead = list(hands.all)
        first, other = hands.begin("ab")
        hands.finish(*dead)
        assert min(parameters(first)) >= 6
        check_equal(first, other)


def test_what_is_said_late_is_heard_after_a_resync(monkeypatch):
    """All peers are of classes of their own here: a re-sync follows every round."""
    begin = Watch.begin
    monkeypatch.setattr(
        Watch, "begin", lambda self, me, _: begin(self, me, me.to_bytes(8, "little"))
    )
    found = {}

    def loop(hand, model, optimizer, loader, scheduler):
        mine = found.setdefault(hand.name, [])
        for _ in range(EPOCHS):
            for batch in loader:
                mean_loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                late = hand.mean(hand.round, "late")
                mine.append((late.round, float(late)))
        assert hand._session.conductor.base.record.num_resyncs > len(mine) / 2

    together(Recipe(loop, options={"resync_every": 1}), TWO)
    assert found[0][1:] == found[1][1:]
    assert [at for at, _ in found[0][1:]] == list(range(len(found[0]) - 1))


def test_what_cannot_be():
    with pytest.raises(UsageError, match="resync_every=0"):
        Options(resync_every=0)


class TestClasses:
    """Who speaks for all."""

    def reports(self, peers, speeds):
        return {
            peer.number: SelfReport(speed, fingerprint=peer.said)
            for peer, speed in zip(peers, speeds, strict=True)
        }

    def test_most_speed_together(self):
        peers = [Peer(4), Peer(2, kind=b"cuda"), Peer(3)]
        assert classes_of(self.reports(peers, (3, 5, 3))).anchors == (4, 3)
        assert classes_of(self.reports(peers, (2, 5, 2))).anchors == (2,)

    def test_then_the_order_of_the_roster(self):
        peers = [Peer(4, kind=b"cuda"), Peer(2), Peer(3)]
        assert classes_of(self.reports(peers, (0, 0, 0))).anchors == (4,)
        assert classes_of(self.reports(peers[::-1], (2, 2, 4))).anchors == (3, 2)

    def test_one_class_and_one_peer(self):
        peers = [Peer(1), Peer(2)]
        assert classes_of(self.reports(peers, (1, 1))) == ONE_CLASS
        assert classes_of(self.reports(peers[:1], (1,))) == ONE_CLASS
        assert classes_of({1: SelfReport(1), 2: SelfReport(1, fingerprint=b"?")}) == ONE_CLASS

    def test_the_digest_is_of_which_there_are(self):
        some = [Peer(1), Peer(2, kind=b"cuda"), Peer(3)]
        digest = classes_of(self.reports(some, (1, 1, 1))).digest
        assert classes_of(self.reports(some[:2][::-1], (7, 1))).digest == digest
        others = [*some, Peer(4, kind=b"mps")]
        assert classes_of(self.reports(others, (1, 1, 1, 1))).digest != digest

    def test_a_deviant_does_not(self):
        peers = [Peer(1), Peer(2), Peer(3), Peer(4, kind=b"cuda")]
        nudge(peers[0].model[0].weight, 0)
        for applied in range(2):
            for peer in peers:
                peer.look(applied, (1, 2, 3, 4))
        assert classes_of(self.reports(peers, (1, 1, 1, 1))).anchors == (2, 3)


class TestCounting:
    """Re-syncs are rounds of the engine's, and none of the user's."""

    def base(self, *, applied=12, resync=False, num_resyncs=3):
        record = Record(b"", NO_VIEW, NO_VIEW, (), resync=resync, num_resyncs=num_resyncs)
        return Base(applied, b"chain", record, Openings((0,)))

    def test_those_before_and_the_next(self):
        assert self.base().round == 12 - 2 - 3
        assert self.base(resync=True).round == 12 - 2 - 2
        assert self.base().count(11) == 6

    def test_a_run_that_starts_anew_begins_with_an_opening(self):
        for resync, before in ((False, 3), (True, 2)):
            opened = self.base(resync=resync).open(b"about")
            assert not opened.resyncs
            assert opened.is_opening(12)
            assert not opened.is_gathering(12)
            assert opened.is_gathering(13)
            assert not opened.is_opening(14)
            assert opened.count(14) == opened.round == 12 - 2 - before

    def test_no_resync_is_an_opening(self):
        base = self.base(applied=1, resync=True, num_resyncs=1)
        assert not base.is_opening(1)
        assert self.base(applied=2, num_resyncs=1).is_opening(2)


def test_who_waits_for_a_state_gets_that_after_a_resync_too():
    """Between two bodies there may be several states."""
    conductor = Mock(healing=False, base=Mock(applied=7))
    notes = Scalars().note([])
    committed = Mock(weight=0.0, round=7, sums=[Mock(notes=notes)])
    turns = [Turn(5, 7, EMPTY, committed=committed, resyncs=True), None]
    conductor.next_turn = lambda: turns.pop(0)
    conductor.advance = lambda done: conductor.base.configure_mock(applied=done.round + 1)
    replica = Replica(
        conductor,
        Mock(),
        Scalars(),
        Gate(),
        seed=0,
        batch=lambda _: 1,
        num_samples=lambda _: 1,
        undone={},
        loss="mean",
        balance=False,
    )
    between = []
    conductor.between = between.append
    assert replica.next_turn() is None
    assert between == [7, 8]
    committed.result.close.assert_called_once()


def test_values_of_any_layout_are_adopted_in_place():
    """To the bit, also what is infinite; a buffer that has them already is not touched."""
    mine, theirs = (
        nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).to(memory_format=torch.channels_last)
        for _ in range(2)
    )
    assert not mine[0].weight.is_contiguous()
    with torch.no_grad():
        theirs[0].bias[0] = -torch.inf
        theirs[1].running_mean.add_(1.0)
    optimizer = torch.optim.SGD(mine.parameters())
    gradients, others = (Gradients(model, parameters_of(model, [])) for model in (mine, theirs))
    layout = Layout.of(gradients.like, 1 << 20)
    pool = pool_for(layout, "fp32", 1 << 20)
    bank = Bank(layout, "fp32", pool)
    bank.lend(layout.check(others.values()), 1.0)
    blocks = {part.k: pool.take(bank.num_bytes(part.k)) for part in layout.parts}
    for k, block in blocks.items():
        bank.encode(k, block.tensor)
    version = mine[1].running_var._version
    gradients.adopt_values(Result(layout, bank.codecs, blocks, pool))
    assert optimizer.param_groups[0]["params"][0] is mine[0].weight
    assert not mine[0].weight.is_contiguous()
    assert digest_of(mine) == digest_of(theirs)
    assert mine[1].running_var._version == version
