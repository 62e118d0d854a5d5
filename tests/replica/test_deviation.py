"""Peers whose bits are not those of the others: they are found, and get the others' state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from manyhands.collectives.messages import NOTES_BYTES, SelfReport
from manyhands.core.peers import PeerId
from manyhands.replica.deviation import (
    STRIDE,
    Compared,
    Deviant,
    Deviated,
    Differs,
    Scope,
    Watch,
    compare,
)
from manyhands.replica.fingerprint import Tensors
from tests.replica.hands import Hands, held_at, until_members, until_round
from tests.replica.training import nudge

pytestmark = pytest.mark.usefixtures("zygote", "hub")  # before the leak check looks


def num_lives(hand) -> int:
    return sum("dialed" in said for said in hand.said)


def begin(hands: Hands, astray: list[int]):
    """Three peers, of which the second goes astray."""
    first, second, third = (hands.join(min_peers=3, astray=bad) for bad in (None, astray, None))
    hands.strays[second] = []
    until_members(first, 3)
    return first, second, third


def test_one_that_is_off_by_one_bit_once(zygote, url):
    """It is named, takes the state of the others, and is one of them again; they never stop."""
    with Hands(zygote, url, epochs=25, linger_s=0.1, linger_from=20) as hands:
        first, astray, third = begin(hands, [20])
        apart = until_members(first, 2, after=20)
        until_members(first, 3, after=apart)
        hands.hurry()
        until_round(astray, hands.num_rounds - 1)  # from the run's first round to its last
        hands.finish()
        rounds = hands.strays[astray]
        assert rounds == list(range(20, rounds[-1] + 1))
        assert len(rounds) < 10
        assert [num_lives(hand) for hand in (first, astray, third)] == [1, 2, 1]
        for hand in (first, third):
            (named,) = next(said["deviated"] for said in hand.said if "deviated" in said)
            assert named == ["hand1", 21, "2.weight"]
            said = [said["round"] for said in hand.said if "round" in said]
            assert said == list(range(hands.num_rounds))


def test_one_that_is_off_again_and_again(zygote, url):
    """It stops with an error that says where to look, and the others go on."""
    with Hands(zygote, url, epochs=25, linger_s=0.1) as hands:
        first, astray, third = begin(hands, list(range(5, 100)))
        assert astray.wait() == 1, astray.report()
        assert "Differs" in astray.report()
        assert "2.weight of hand1" in astray.report()
        assert "look for what depends on the peer" in astray.report()
        hands.finish(astray)
        assert [num_lives(hand) for hand in (first, astray, third)] == [1, 3, 1]


def test_the_others_die_before_they_could_help(zygote, url):
    """Then its own state is the best there is: the run goes on with that."""
    gives = {"what": "Snapshot", "applied": 8, "before": True, "then": "wait"}  # not when it opens
    with Hands(zygote, url, epochs=10, min_peers=2) as hands:
        first = hands.join(held_at(30), gives)
        first.until(lambda said: "dialed" in said)  # the first of the roster: it is right
        astray = hands.join(astray=[6])
        hands.strays[astray] = []
        astray.until(lambda _: num_lives(astray) == 2)
        first.kill()
        hands.finish(first)
        assert num_lives(astray) == 2


def test_peers_of_two_kinds(zygote, url):
    """One line says so; nobody is named, also not who got its state from both of them."""
    with Hands(zygote, url, epochs=12, linger_s=0.1) as hands:
        first, _ = (hands.join(min_peers=2, flush=flush) for flush in (False, True))
        until_members(first, 2)
        late = hands.join()
        until_members(first, 3)
        hands.finish()
        for hand in hands.all:
            assert next(said["deviated"] for said in hand.said if "deviated" in said) == []
            assert hand.report().count("kinds of arithmetic") == 1
        assert num_lives(late) == 1


class Peer:
    """A model, and what its peer says of its bits."""

    def __init__(self, number: int, *, kind: bytes = b"cpu") -> None:
        torch.manual_seed(1)
        self.number = number
        self.model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(40)))
        self.count = lambda applied: applied
        self.watch = Watch(Tensors(self.model, []), lambda applied: self.count(applied))
        self.watch.begin(number, kind)

    def look(self, applied: int, members=(1, 2, 3), *, alone: bool = False) -> bytes:
        self.watch.look(applied, members, alone=alone)
        return self.said

    @property
    def said(self) -> bytes:
        return self.watch.report(SelfReport(1)).fingerprint

    def heed(self, compared: Compared) -> tuple[list[Deviated], bool]:
        return self.watch.heed(compared, lambda number: PeerId(f"peer{number}", number))


def count_from(here: tuple[int, int], number: int) -> int:
    """What a peer knows of a number: that here, after `applied`, so many rounds had samples."""
    applied, count = here
    return count + number - applied


def look_all(peers: list[Peer], applied: int) -> Compared:
    return compare([peer.look(applied) for peer in peers])


def first_found(peers: list[Peer], start: int) -> tuple[int, Compared]:
    for applied in range(start, start + 3 * STRIDE):
        if (found := look_all(peers, applied)).deviants:
            return applied, found
    raise AssertionError("nobody was found")


class TestCompare:
    @pytest.mark.parametrize(("size", "rounds"), [(3, 4), (512, 32), (1024, STRIDE)])
    def test_a_small_model_is_gone_through_in_few_rounds(self, size, rounds):
        peers = [Peer(number) for number in (1, 2, 3)]
        for peer in peers:
            layers = nn.Sequential(nn.Linear(size, size), nn.Linear(size, size))
            for parameter in layers.parameters():
                nn.init.zeros_(parameter)
            peer.watch = Watch(Tensors(layers, []), lambda applied: applied)
            peer.watch.begin(peer.number, b"cpu")
            for applied in range(4):  # four tensors: the last one's turn is the last of these
                peer.look(applied)
            if peer.number == 1:
                nudge(layers[1].bias, 0)
        at, _ = first_found(peers, 4)
        assert at == 3 + rounds + 1  # it is said in the next round

    def test_peers_that_are_equal(self):
        peers = [Peer(number) for number in (1, 2, 3)]
        for applied in range(70):
            assert look_all(peers, applied) == Compared((), 1)

    def test_one_of_three_is_found_within_a_cycle(self):
        peers = [Peer(number) for number in (1, 2, 3)]
        for applied in range(5):
            assert not look_all(peers, applied).deviants
        nudge(peers[0].model[17].bias, 1)
        at, found = first_found(peers, 5)
        assert at <= 5 + STRIDE
        (deviant,) = found.deviants
        assert (deviant.peer, deviant.like) == (1, 2)
        ((event,), mine) = peers[0].heed(found)
        assert mine
        assert event == Deviated(PeerId("peer1", 1), deviant.scope.applied, "17.bias")
        assert peers[1].heed(found) == ([event], False)
        assert peers[1].heed(found) == ([], False)  # it was said

    def test_of_two_the_first_is_right(self):
        peers = [Peer(1), Peer(2)]
        nudge(peers[0].model[3].weight, 0)
        (deviant,) = first_found(peers, 0)[1].deviants
        assert deviant.peer == 2

    def test_one_of_all_is_always_right(self):
        peers = [Peer(number) for number in range(1, 6)]
        for number, peer in enumerate(peers):
            nudge(peer.model[number].weight, number)
        found = first_found(peers, 0)[1]
        assert [deviant.peer for deviant in found.deviants] == [2, 3, 4, 5]

    def test_somebody_new_makes_all_look_at_everything(self):
        peers = [Peer(1), Peer(2)]
        for applied in range(3):
            for peer in peers:
                peer.look(applied, (1,))
        nudge(peers[1].model[39].weight, 8)
        for applied in (3, 4):
            found = compare([peer.look(applied, (1, 2)) for peer in peers])
        ((event,), mine) = peers[1].heed(found)
        assert (mine, event.round, event.tensor) == (True, 3, "39.weight")

    def test_the_round_is_the_one_that_it_was_then(self):
        """Where a re-sync comes after it, the engine's number would be another one's now."""
        peers = [Peer(1), Peer(2)]
        nudge(peers[1].model[0].weight, 0)
        for applied, count in enumerate((7, 7)):  # a re-sync, and then the round with number 7
            for peer in peers:
                peer.count = lambda number, here=(applied, count): count_from(here, number)
            found = look_all(peers, applied)
        (deviant,) = found.deviants
        assert deviant.scope.applied == 0
        ((event,), _) = peers[0].heed(found)
        assert event.round == 7

    def test_kinds_are_not_compared_with_each_other(self):
        peers = [Peer(1), Peer(2, kind=b"cuda"), Peer(3)]
        nudge(peers[1].model[0].weight, 0)
        for applied in range(70):
            assert look_all(peers, applied) == Compared((), 2)
        nudge(peers[2].model[0].weight, 0)
        (deviant,) = first_found(peers, 70)[1].deviants
        assert deviant.peer == 3

    def test_a_state_of_another_kind_makes_one_of_its_own(self):
        """Only who has got the same one is compared with it."""
        peers = [Peer(number) for number in (1, 2, 3, 4)]
        peers[1].watch.replaced(peers[0].watch.kind, b"any chain")
        assert peers[1].watch.kind == peers[0].watch.kind
        for peer in peers[2:]:
            nudge(peer.model[0].weight, 0)
            peer.watch.replaced(b"gpu", b"chain")
        late = Peer(5)
        late.watch.replaced(peers[2].watch.kind, b"later")
        assert late.watch.kind == peers[2].watch.kind != peers[0].watch.kind
        for applied in range(70):
            assert look_all(peers, applied) == Compared((), 2)
        nudge(peers[3].model[0].weight, 0)
        (deviant,) = first_found(peers, 70)[1].deviants
        assert (deviant.peer, deviant.like) == (4, 3)

    def test_one_that_reports_before_it_has_come_as_far(self):
        """It has no samples, so its report goes out while its thread is a round behind."""
        ahead, behind = Peer(1), Peer(2)
        nudge(behind.model[0].weight, 0)
        found = Compared()
        for applied in range(STRIDE + 3):
            found = compare([ahead.look(applied), behind.said])
            behind.look(applied)
            if found.deviants:
                break
        assert [deviant.peer for deviant in found.deviants] == [2]

    def test_what_is_no_report_is_left_out(self):
        peers = [Peer(1), Peer(2)]
        nudge(peers[1].model[0].weight, 0)
        for applied in range(2):
            said = [peer.look(applied) for peer in peers]
        assert compare([b"", b"nonsense", said[0]]) == Compared((), 1)
        assert compare([b"nonsense", *said]).deviants

    def test_alone_nothing_is_looked_at(self):
        peer = Peer(1)
        said = peer.said
        for applied in range(70):
            assert peer.look(applied, (1,), alone=True) == said

    def test_the_third_time_is_the_last(self):
        peer = Peer(1)
        for number in (1, 2):
            peer.watch.begin(number, b"cpu")
            scope = Scope(10 * number, 1)
            assert peer.heed(Compared((Deviant(number, 9, scope, 0),), 1))[1]
        peer.watch.begin(3, b"cpu")
        with pytest.raises(Differs, match="3rd time") as error:
            peer.heed(Compared((Deviant(3, 9, Scope(30, 1), 0),), 1))
        assert "memory and device" in str(error.value.hint)

    def test_what_was_long_ago_does_not_count(self):
        peer = Peer(1)
        for number in range(1, 9):
            peer.watch.begin(number, b"cpu")
            compared = Compared((Deviant(number, 9, Scope(2000 * number, 1), 0),), 1)
            assert peer.heed(compared)[1]

    def test_more_tensors_than_numbers(self):
        peers = [Peer(1), Peer(2)]
        for peer in peers:
            layers = (nn.Linear(1, 1) for _ in range(400))
            peer.watch = Watch(Tensors(nn.Sequential(*layers), []), lambda applied: applied)
            peer.watch.begin(peer.number, b"cpu")
        for applied in range(2):
            said = [peer.look(applied) for peer in peers]
        assert max(map(len, said)) < NOTES_BYTES
        (deviant,) = compare(said).deviants
        assert " or " in peers[0].heed(Compared((deviant,), 1))[0][0].tensor
