"""A peer that was put out comes back, also to a meeting point that is not there at once."""

from __future__ import annotations

import time
from unittest.mock import Mock, call

import pytest

from manyhands.collectives.instructions import StopReason
from manyhands.collectives.messages import Record, Share
from manyhands.collectives.outcomes import Stopped
from manyhands.collectives.ranges import EMPTY
from manyhands.core.errors import Excluded, LinkBroken, LinkTimeout, Malformed, Refused
from manyhands.core.peers import NO_VIEW, PeerId
from manyhands.data.calendar import Calendar
from manyhands.replica import conductor as module
from manyhands.replica.agenda import Agenda
from manyhands.replica.cap import Cap
from manyhands.replica.conductor import Base, Conductor
from manyhands.replica.session import Session

# What a hub says that is being closed, and a broker that has just started.
PASSING = ("closing", "missing", "locked", "vhost", "precondition")


def engine(*outcomes):
    left = list(outcomes)
    return Mock(next=lambda timeout_s: left.pop(0))


def outside():
    return engine(Stopped(StopReason.EXCLUDED, "the run goes on without this peer"))


def conductor_of(*connects, look=None, **more):
    found = Conductor(
        connect=Mock(side_effect=connects),
        take=Mock(),
        tell=Mock(),
        look=look or Mock(),
        between=Mock(),
        enough=Mock(),
        nothing=(),
        base=Base(3, b"chain"),
        agenda=Agenda(Calendar(100, 10), 10),
        cap=Cap(None),
        gather_s=1.0,
        **more,
    )
    found.begin(Mock(return_value=True))
    return found


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(module, "_AGAIN_S", 0.0)


def test_it_dials_until_the_meeting_point_is_there_again():
    back = engine(Stopped(StopReason.FINISHED, "the run is finished"))
    errors = LinkBroken("no hub"), Excluded("again"), LinkTimeout("an answer", 1.0)
    errors += tuple(Refused(code, "not now") for code in PASSING)
    errors += (Malformed("half an answer, of a hub that starts"),)
    conductor = conductor_of(outside(), *errors, back)
    assert conductor.next_turn() is None
    assert conductor.rounds is back
    back.offer_state.assert_called_once_with(3, b"chain", None)


@pytest.mark.parametrize(
    ("error", "more"),
    [
        (LinkBroken("no hub"), {"outage_s": -1.0}),
        (Refused("closing", "the hub closes"), {"outage_s": -1.0}),
        (Excluded("again"), {"outage_s": -1.0}),
        (Refused("token", "not you"), {}),
    ],
)
def test_not_for_ever_nor_where_it_is_turned_away(error, more):
    conductor = conductor_of(outside(), error, **more)
    with pytest.raises(type(error)):
        conductor.next_turn()


@pytest.mark.parametrize("error", [LinkBroken("no hub"), Excluded("again")])
def test_it_waits_before_it_dials_again(error, monkeypatch):
    clock = Mock(monotonic=time.monotonic)
    monkeypatch.setattr(module, "_AGAIN_S", 0.125)
    monkeypatch.setattr(module, "time", clock)
    back = engine(Stopped(StopReason.FINISHED, "the run is finished"))
    assert conductor_of(outside(), error, error, back).next_turn() is None
    assert clock.sleep.call_args_list == [call(0.125)] * 2


def test_asked_to_leave_meanwhile_it_has_left():
    asked = []

    def look():
        if asked:
            conductor.leave(finished=False)

    def dial():
        asked.append(True)
        raise LinkBroken("no hub")

    conductor = conductor_of(outside(), look=look)
    conductor.connect = dial
    assert conductor.next_turn() is None
    assert conductor.over
    assert conductor.tell.call_args.args[0].reason is StopReason.LEFT
    assert conductor.left_outside


ME, OTHER = PeerId("me", 1), PeerId("other", 2)


def session_of(*members, **of_conductor):
    """The first of the roster, whose loop has ended after a round that these are the next of."""
    found = object.__new__(Session)
    found.replica = Mock(abandon=Mock(return_value=None))
    found.loader = Mock(abandon=Mock(return_value=None))
    found._between, found._keeper, found._link = Mock(), Mock(), Mock(me=ME)
    found._num_rounds, found._agenda = None, Agenda(Calendar(100, 10), 10)
    record = Record(b"", NO_VIEW, NO_VIEW, tuple(Share(m.incarnation, EMPTY) for m in members))
    found.conductor = Mock(base=Base(3, b"chain", record), healing=False, left_outside=False)
    found.conductor.rounds.view.peers.return_value = members
    found.conductor.configure_mock(**of_conductor)
    return found


@pytest.mark.parametrize("state", ["healing", "left_outside"])
def test_a_state_that_is_not_the_runs_is_not_saved_at_the_end(state, caplog):
    session = session_of(ME, OTHER, **{state: True})
    session.conductor.finish.side_effect = lambda *_, **__: setattr(
        session.conductor, "healing", False
    )
    assert not session.finish()
    session._keeper.save_last.assert_not_called()
    assert "the state after round 3 was not saved" in caplog.text


@pytest.mark.parametrize(("members", "left"), [((ME, OTHER), False), ((ME,), True)])
def test_a_state_that_is_the_runs_is_saved_at_the_end(members, left):
    """Also that of one who was alone: nobody can have gone on without it."""
    session = session_of(*members, left_outside=left)
    assert session.finish()
    session._keeper.save_last.assert_called_once_with(session.conductor.base, 3)
