"""Post: which letters leave, by which courier, and which are not wanted any more."""

from __future__ import annotations

import threading

import pytest
import torch

from manyhands.collectives import messages as m
from manyhands.collectives.bank import Bank, pool_for
from manyhands.collectives.instructions import Begin
from manyhands.collectives.layout import Layout
from manyhands.collectives.post import Post
from manyhands.collectives.ranges import Ranges
from manyhands.core.peers import Member, PeerId, PeerState, View, ViewNumber

CUT = ViewNumber(1, 4)
ME, OWNER, OTHER, OUTSIDE = 1, 2, 3, 4
PART_BYTES = 4000


class Letters(list):
    """A courier that sends nothing."""

    def post(self, letter, *, urgent=False) -> None:
        self.append((letter, urgent))

    @property
    def words(self) -> list:
        return [m.decode(letter.message) for letter, _ in self]


class Desk:
    def __init__(self, num_parts=30, monkeypatch=None) -> None:
        tensors = [torch.ones(num_parts * PART_BYTES // 4)]
        layout = Layout.of(tensors, PART_BYTES)
        assert layout.num_parts >= num_parts
        pool = pool_for(layout, "fp32", 1 << 16)
        self.bank = Bank(layout, "fp32", pool)
        self.bank.lend(layout.check(tensors), 1.0)
        self.main, self.aside = Letters(), Letters()
        self.post = Post(self.main, self.aside, self.bank, pool, PART_BYTES, threading.RLock())
        names = (ME, OWNER, OTHER, OUTSIDE)
        lines = tuple(Member(PeerId(f"p{n}", n), PeerState.ACTIVE, CUT) for n in names)
        self.post.see(View(CUT, lines))

    def begin(self, round_=3, attempt=m.Tag(CUT, 0), members=(ME, OWNER, OTHER)) -> int:  # noqa: B008
        self.attempt, self.round = attempt, round_
        return self.post.begin(Begin(round_, attempt, members, Ranges.whole(2)))

    def part(self, k) -> m.Part:
        return m.Part(self.round, self.attempt, k, Ranges.whole(2), weight=1.0)


@pytest.fixture
def desk(monkeypatch):
    monkeypatch.setattr("manyhands.collectives.post.AHEAD_BYTES", 2 * 6 * PART_BYTES)
    return Desk()


def test_beyond_its_allowance_a_reader_is_sent_nothing_until_it_has_used_some(desk):
    desk.begin()
    for k in reversed(range(1, 20)):
        desk.post.send_part(OWNER, desk.part(k))
    sent = len(desk.main)
    size = desk.bank.num_bytes(5)
    assert sent * size <= 6 * PART_BYTES < (sent + 1) * size
    desk.post.send_part(OTHER, desk.part(7))  # others are not held up by that
    assert len(desk.main) == sent + 1
    desk.post.taken(OWNER, CUT, 2 * size)
    assert len(desk.main) == sent + 3
    desk.post.taken(OWNER, CUT, 1 * size)  # an older word changes nothing
    desk.post.taken(OWNER, ViewNumber(1, 1), 1 << 30)  # nor one of another cut
    assert len(desk.main) == sent + 3
    desk.post.taken(OWNER, CUT, 1 << 30)
    order = [word.k for word in desk.main.words if word.k != 7 or word.round == 3]
    assert [k for k in order if k != 7] == [k for k in reversed(range(1, 20)) if k != 7]


def test_after_a_cut_nothing_of_the_attempt_before_is_sent(desk):
    desk.begin()
    for k in reversed(range(1, 20)):
        desk.post.send_part(OWNER, desk.part(k))
    waiting = [letter for letter, _ in desk.main]
    old = len(desk.main)
    desk.begin(attempt=m.Tag(ViewNumber(1, 9), 0))
    assert all(letter.buffers() is None for letter in waiting)  # those in the courier's hands
    desk.post.taken(OWNER, CUT, 1 << 30)
    assert len(desk.main) == old  # and those that were held back
    desk.post.send_part(OWNER, desk.part(19))
    letter, urgent = desk.main[-1]
    assert not urgent
    assert b"".join(letter.buffers()) == bytes(
        torch.ones(desk.bank.num_bytes(19) // 4).view(torch.uint8)
    )


def test_a_contribution_whose_bank_was_dropped_is_not_sent(desk):
    desk.begin()
    desk.post.send_part(OWNER, desk.part(4))
    desk.bank.clear()
    assert desk.main[0][0].buffers() is None
    desk.post.send_part(OWNER, desk.part(3))  # nothing is a contribution too
    assert desk.main[1][0].buffers == ()


def test_whoever_is_outside_the_round_has_a_courier_of_its_own(desk):
    status = m.Status(
        CUT, 3, b"", b"", CUT, m.NO_TAG, b"", Ranges(), m.NO_TAG, True, Ranges(), Ranges(), 1
    )
    desk.post.send(OUTSIDE, m.Ask(1))  # before any round is known
    assert desk.aside.words == [m.Ask(1)]
    desk.begin()
    desk.post.send(OUTSIDE, m.RoundGone(2))
    desk.post.send(OWNER, m.RoundGone(2))
    desk.post.send(None, m.RoundGone(2))
    desk.post.send(OUTSIDE, status)  # all who answer a cut are waited for
    assert desk.aside.words == [m.Ask(1), m.RoundGone(2)]
    assert desk.main.words == [m.RoundGone(2), m.RoundGone(2), status]
    assert all(urgent for _, urgent in desk.main)


def test_a_peer_that_no_view_has_shown(desk):
    desk.begin()
    desk.post.send(77, m.Ask(1))
    assert desk.post.name_of(77) is None
    assert not desk.main
    assert not desk.aside
