"""Failure: what ends a team, and in which words."""

from __future__ import annotations

import pytest

from manyhands.collectives.backend.failure import judge_view
from manyhands.core.peers import Member, PeerId, PeerState, View, ViewNumber

ROSTER = tuple(PeerId(f"rank-{rank}", 100 + rank) for rank in range(3))
STRANGER = PeerId("stranger", 7)
FIRST = ViewNumber(1, 5)


def view(number: ViewNumber, peers, *, cut: ViewNumber = FIRST) -> View:
    return View(number, tuple(Member(peer, PeerState.ACTIVE, FIRST) for peer in peers), cut)


@pytest.mark.parametrize(
    ("before", "parted", "after", "cut"),
    [
        (ROSTER, (), ROSTER, False),
        ((*ROSTER, STRANGER), (), ROSTER, False),
        ((*ROSTER, STRANGER), (), ROSTER, True),
        (ROSTER, (2,), ROSTER[:2], True),
        (ROSTER, (0, 2), ROSTER[1:2], True),
    ],
    ids=["news", "a stranger left", "a stranger died", "one parted", "two parted"],
)
def test_a_view_that_a_team_can_go_on_with(before, parted, after, cut):
    number = ViewNumber(1, 6)
    new = view(number, after, cut=number if cut else FIRST)
    assert judge_view(ROSTER, parted, view(FIRST, before), new) is None


@pytest.mark.parametrize(
    ("before", "parted", "after"),
    [(ROSTER, (), ROSTER), ((*ROSTER, STRANGER), (), ROSTER), (ROSTER, (2,), ROSTER[:2])],
    ids=["all came back", "all but a stranger", "all but one that had parted"],
)
def test_a_restart_of_the_meeting_point_is_explained_by_nobody(before, parted, after):
    """Who does not come back is no reason: what was on its way to the others is gone, too."""
    number = ViewNumber(2, 1)
    error = judge_view(ROSTER, parted, view(FIRST, before), view(number, after, cut=number))
    assert "lost messages" in str(error)


def test_messages_that_were_lost_in_between():
    number = ViewNumber(1, 6)
    error = judge_view(ROSTER, (), view(FIRST, ROSTER), view(number, ROSTER, cut=number))
    assert "lost messages" in str(error)


def test_whoever_is_gone_is_named():
    error = judge_view(ROSTER, (1,), view(FIRST, ROSTER), view(ViewNumber(1, 6), ROSTER[:1]))
    assert "rank 2 (rank-2" in str(error)
    assert "rank 1" not in str(error)
