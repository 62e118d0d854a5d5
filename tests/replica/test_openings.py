"""Rounds of the engine and rounds of the user."""

from unittest.mock import Mock

from manyhands.collectives.instructions import StopReason
from manyhands.collectives.messages import Record
from manyhands.collectives.outcomes import Committed, Stopped
from manyhands.core.peers import NO_VIEW
from manyhands.data.calendar import Calendar
from manyhands.replica.agenda import Agenda
from manyhands.replica.cap import Cap
from manyhands.replica.conductor import Base, Conductor
from manyhands.replica.openings import Openings, opened_chain


def test_rounds_with_samples_are_counted_without_the_openings():
    openings = Openings((0, 7))
    kinds = [openings.is_opening(n) for n in range(12)]
    assert kinds == [True, True] + [False] * 5 + [True, True] + [False] * 3
    assert [openings.count(n) for n in range(12)] == [0, 0, 0, 1, 2, 3, 4, 5, 5, 5, 6, 7]
    assert [n for n in range(12) if openings.is_gathering(n)] == [1, 8]


def test_openings_may_overlap():
    """A run that was resumed, ended while it opened, and was resumed again."""
    openings = Openings().opened(0).opened(1)
    assert [openings.count(n) for n in range(6)] == [0, 0, 0, 0, 1, 2]
    assert openings.num_rounds == 3


def test_an_opened_history_is_another_one():
    assert opened_chain(b"x", b"a") != b"x"
    assert opened_chain(b"x", b"a") != opened_chain(b"y", b"a")
    assert opened_chain(b"x", b"a") != opened_chain(b"x", b"b")


def test_who_follows_from_a_checkpoint_that_all_left_applies_every_round():
    """The record that was saved says that a closing round follows, which was of another life."""
    saved = Record(b"", NO_VIEW, NO_VIEW, (), closing=True)
    base = Base(9, b"chain", saved, Openings((0,))).open(b"a")

    def commit(number, *, closing=False):
        record = Record(b"", NO_VIEW, NO_VIEW, ())
        return Committed(number, Mock(), (), record, b"%d" % number, False, closing)

    outcomes = [commit(9), commit(10), commit(11)]
    conductor = Conductor(
        connect=Mock(return_value=Mock(next=lambda timeout_s: outcomes.pop(0))),
        take=Mock(),
        tell=Mock(),
        look=Mock(),
        between=Mock(),
        enough=Mock(),
        nothing=(),
        base=base,
        agenda=Agenda(Calendar(100, 10), 10),
        cap=Cap(None),
        gather_s=1.0,
        offers=True,
    )
    conductor.begin(Mock(return_value=True))
    turn = conductor.next_turn()
    assert (turn.number, turn.round, turn.committed.round) == (11, 7, 11)
    assert conductor.base.applied == 11
    conductor.advance(turn.committed)
    outcomes += [commit(12, closing=True), Stopped(StopReason.FINISHED, "the run is finished")]
    assert conductor.next_turn() is None  # a closing round has nothing to apply
