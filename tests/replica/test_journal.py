"""What happens to a run: what all see has one id everywhere, what one knows is told."""

from __future__ import annotations

import pytest

from manyhands.collectives.instructions import DropState, Generation, Lost, Retry, StopReason
from manyhands.collectives.messages import NO_TAG
from manyhands.collectives.outcomes import Stopped
from manyhands.collectives.ranges import Ranges
from manyhands.core.errors import CheckpointError
from manyhands.core.peers import NO_VIEW, PeerId
from manyhands.replica.deviation import Deviated
from manyhands.replica.journal import Journal
from manyhands.replica.keeper import NotSaved, Saved
from manyhands.replica.news import News, gather

SAMPLES = Ranges.of((0, 4))


def name_of(incarnation):
    return PeerId(f"peer{incarnation}", incarnation)


def take(journal, step, *members):
    return [(h.what, h.peer, h.step) for h in journal.take(step, members, name_of)]


def test_who_comes_and_goes_follows_from_the_members():
    journal = Journal(News())
    assert take(journal, 0) == []
    assert take(journal, 0, 1, 2) == [("joined", "peer1#0001", 0), ("joined", "peer2#0002", 0)]
    assert take(journal, 1, 1, 2) == []
    assert take(journal, 2, 2, 3) == [("left", "peer1#0001", 2), ("joined", "peer3#0003", 2)]
    assert list(journal) == []  # they are no events of this peer's


@pytest.mark.parametrize(
    "event",
    [
        Deviated(PeerId("a", 7), 3, "weight"),
        Retry(5, NO_TAG, SAMPLES),
        Lost(5, SAMPLES),
        Generation(NO_VIEW, 4),
    ],
    ids=lambda event: type(event).__name__,
)
def test_what_all_see_has_the_same_id_everywhere(event):
    journals = [Journal(News()) for _ in range(2)]
    for journal in journals:
        journal.extend([event])
        assert list(journal) == [event]
        assert journal.waiting() == []  # nobody tells it
    (one,), (other,) = (journal.take(0, [], name_of) for journal in journals)
    assert one.id == other.id
    assert one.what == other.what


@pytest.mark.parametrize(
    ("event", "what", "text"),
    [
        (Saved(3, "place"), "saved", "round 3, place"),
        (NotSaved(3, CheckpointError("full", hint="x")), "not saved", "round 3: full"),
        (DropState("lost"), "started over", "lost"),
        (Stopped(StopReason.EXCLUDED, "silent"), "put out", "excluded: silent"),
    ],
    ids=lambda given: type(given).__name__,
)
def test_what_one_knows_is_told(event, what, text):
    mine, theirs = News(), News()
    mine.peer = "a#0001"
    journal, other = Journal(mine), Journal(theirs)
    journal.append(event)
    (waits,) = journal.waiting()
    assert journal.take(0, [], name_of) == []  # not before a round has brought it back
    bulletins = gather([mine.report()])
    mine.hear(bulletins)
    theirs.hear(bulletins)
    (one,), (two,) = (j.take(4, [], name_of) for j in (journal, other))
    assert one == two
    assert (one.what, one.text, one.peer, one.step) == (what, text, "a#0001", 4)
    assert one.id == waits.id
    assert journal.waiting() == []


@pytest.mark.parametrize("reason", [StopReason.FINISHED, StopReason.LEFT, None])
def test_an_end_is_no_news(reason):
    journal = Journal(News())
    journal.append(Stopped(reason, ""))
    assert journal.waiting() == journal.take(0, [], name_of) == []
