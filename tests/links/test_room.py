"""A room with ports that the test is: routing, views, leases, and the time after a restart."""

from __future__ import annotations

import pytest

from manyhands.core.peers import NO_VIEW, PeerId, PeerState, View, ViewNumber
from manyhands.links import arbiter
from manyhands.links.membership import Membership
from manyhands.links.messages import (
    Bye,
    Credit,
    Data,
    Gone,
    Leaving,
    Lost,
    NewView,
    Ready,
    Resign,
    Return,
    Terms,
)
from manyhands.links.room import Frame, Room

TERMS = Terms(beat_s=0.1, lease_s=10.0, grace_s=1.0)


class Seat:
    """A port that keeps what is put into it."""

    def __init__(self, name: str, incarnation: int) -> None:
        self.peer = PeerId(name, incarnation)
        self.num_gaps = 0
        self.heard_s = 0.0
        self.frames: list[tuple[Frame, bool]] = []
        self.out: str | None = None

    def put(self, frame: Frame, *, droppable: bool = False, pushed: bool = False) -> None:
        assert self.out is None
        self.frames.append((frame, droppable))

    def dismiss(self, reason: str) -> None:
        assert self.out is None
        self.out = reason

    @property
    def views(self) -> list[View]:
        return [f.header.view for f, _ in self.frames if isinstance(f.header, NewView)]

    @property
    def messages(self) -> list[tuple[bytes, bool]]:
        return [(f.header.message, d) for f, d in self.frames if isinstance(f.header, Data)]


class Scene:
    """A room and its clock."""

    def __init__(self, view: View | None = None, **options) -> None:
        self.saved: list[View] = []
        self.now_s = 0.0
        view = view or arbiter.first_view(1)
        self.room = Room(TERMS, view, 0.0, journal=self.saved.append, **options)

    def join(self, name: str, incarnation: int, back: Return | None = None) -> Seat:
        seat = Seat(name, incarnation)
        seat.heard_s = self.now_s
        self.refused = self.room.join(seat, self.now_s, back)
        return seat

    def say(self, seat: Seat, *words) -> None:
        for word in words:
            self.room.post(seat.peer, Frame(word))

    def pass_time(self, seconds: float, *beating: Seat) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += self.room.tick_s
            for seat in beating:
                seat.heard_s = self.now_s
            self.room.tick(self.now_s)


@pytest.fixture
def scene():
    return Scene()


def states(view: View) -> dict[str, str]:
    return {m.peer.name: m.state.value for m in view.roster}


def test_every_view_is_saved_before_anybody_sees_it(scene):
    one = scene.join("one", 1)
    scene.say(one, Ready())
    two = scene.join("two", 2)
    assert scene.saved == one.views
    assert two.views == one.views[-1:]


def test_data_goes_where_it_is_addressed(scene):
    one, two, three = (scene.join(name, i) for i, name in enumerate(("one", "two", "three"), 1))
    scene.say(one, Ready())
    scene.say(two, Ready())
    scene.say(one, Data(1, None, 1, (), b"all"), Data(1, 2, 1, (), b"direct"))
    scene.say(one, Data(1, 99, 1, (), b"nobody"))
    assert one.messages == []
    assert two.messages == [(b"all", False), (b"direct", False)]
    assert three.messages == [(b"all", True)], "a watching peer's copy may be dropped"
    scene.say(two, Credit(2, 1, 1, 1))
    assert isinstance(one.frames[-1][0].header, Credit)


def test_what_the_excluded_send_reaches_nobody(scene):
    one, two = scene.join("one", 1), scene.join("two", 2)
    scene.room.dismiss(two.peer, "for a test")
    assert two.out == "for a test"
    scene.say(two, Data(2, None, 1, (), b"late"), Ready(), Bye())
    assert one.messages == []
    assert states(one.views[-1]) == {"one": "watching"}


def test_ready_with_an_unseen_gap_is_not_heard(scene):
    one = scene.join("one", 1)
    one.num_gaps = 2
    scene.say(one, Ready(gaps=1))
    assert states(scene.room.view) == {"one": "watching"}
    scene.say(one, Ready(gaps=2))
    assert states(scene.room.view) == {"one": "active"}


def test_words(scene):
    one, two = scene.join("one", 1), scene.join("two", 2)
    scene.say(one, Ready())
    scene.say(two, Ready())
    before = scene.room.view
    scene.say(one, Lost(2))
    assert scene.room.view.cut > before.cut
    scene.say(two, Leaving())
    scene.say(two, Gone(scene.room.view.cut))
    assert two.out == "it left"
    scene.say(one, Resign(True, "done"))
    assert "done" in (one.out or "")
    assert scene.room.view.over


def test_silence_and_a_closed_connection(scene):
    one, two, three = (scene.join(name, i) for i, name in enumerate(("one", "two", "three"), 1))
    scene.pass_time(5.0, one, two, three)
    scene.room.closed(two, scene.now_s)
    scene.pass_time(0.7, one)
    assert two.out is None
    scene.pass_time(0.5, one)
    assert "closed" in (two.out or "")
    assert three.out is None
    scene.pass_time(9.5, one)
    assert "nothing was heard" in (three.out or "")
    assert states(one.views[-1]) == {"one": "watching"}


def test_a_connection_that_is_back_is_forgiven(scene):
    one = scene.join("one", 1)
    scene.pass_time(1.0, one)
    scene.room.closed(one, scene.now_s)
    scene.pass_time(5.0, one)
    assert one.out is None


def test_nobody_comes_back_to_a_room_that_did_not_restart(scene):
    scene.join("one", 1, Return(b"", 0, ViewNumber(1, 1), PeerState.ACTIVE))
    assert "lease" in (scene.refused or "")
    assert scene.room.num_ports == 0


class TestAfterARestart:
    """Two active peers and a watching one were here."""

    @pytest.fixture
    def before(self):
        scene = Scene()
        for i, name in enumerate(("one", "two", "three"), 1):
            seat = scene.join(name, i)
            if i < 3:
                scene.say(seat, Ready())
        return scene.room.view

    @pytest.fixture
    def scene(self, before):
        return Scene(before, era=2, restarted=True)

    def back(self, scene, name, incarnation, state=PeerState.ACTIVE, era=1):
        return scene.join(name, incarnation, Return(b"", 0, ViewNumber(era, 5), state))

    def all_back(self, scene):
        return (
            self.back(scene, "two", 2),
            self.back(scene, "one", 1),
            self.back(scene, "three", 3, PeerState.WATCHING),
        )

    def test_one_cut_once_all_are_back(self, scene, before):
        seats = self.all_back(scene)
        for seat in seats:
            (view,) = seat.views
            assert view.number == view.cut == ViewNumber(2, 1)
            assert [m.peer for m in view.roster] == [m.peer for m in before.roster]
            assert states(view) == states(before)
        assert scene.saved == seats[0].views

    def test_the_era_is_above_any_that_is_heard_of(self, scene):
        self.back(scene, "one", 1, era=7)
        self.back(scene, "two", 2)
        three = self.back(scene, "three", 3)
        assert three.views[-1].number.era == 8

    def test_those_who_stay_away_are_out_after_a_lease(self, scene):
        one = self.back(scene, "one", 1)
        scene.pass_time(9.5, one)
        assert one.views == []
        scene.pass_time(1.0, one)
        assert states(one.views[-1]) == {"one": "active"}
        late = self.back(scene, "two", 2)
        assert scene.refused
        assert late.views == []

    def test_newcomers_wait_and_watch(self, scene):
        new = scene.join("new", 9)
        assert new.views == []
        self.all_back(scene)
        assert states(new.views[-1])["new"] == "watching"
        assert len(new.views) == 1

    def test_what_is_said_meanwhile_counts_afterwards(self, scene):
        one = self.back(scene, "one", 1)
        scene.say(one, Leaving(), Lost(2))
        assert one.views == scene.saved == []
        two = self.back(scene, "two", 2)
        self.back(scene, "three", 3)
        first, second = two.views
        assert states(first)["one"] == "active"
        assert states(second)["one"] == "leaving"
        assert second.cut == first.number, "one cut, not one for the loss too"

    def test_one_that_closes_meanwhile_is_not_in_the_view(self, scene):
        one, two = self.back(scene, "one", 1), self.back(scene, "two", 2)
        scene.say(one, Bye())
        assert one.out
        assert two.views == []
        scene.pass_time(10.5, two)
        assert states(two.views[-1]) == {"two": "active"}
        assert two.views[-1].number.era == 2

    def test_one_that_breaks_the_protocol_meanwhile_is_not_either(self, scene):
        one, two = self.back(scene, "one", 1), self.back(scene, "two", 2)
        scene.room.dismiss(one.peer, "bad")
        assert one.out == "bad"
        scene.pass_time(10.5, two)
        assert states(two.views[-1]) == {"two": "active"}

    def test_one_that_goes_again_meanwhile_is_not_either(self, scene):
        one, two = self.back(scene, "one", 1), self.back(scene, "two", 2)
        scene.pass_time(0.4, one, two)
        scene.room.closed(one, scene.now_s)
        scene.pass_time(2.0, two)
        assert one.out
        assert two.views == []
        scene.pass_time(9.0, two)
        assert [states(view) for view in two.views] == [{"two": "active"}]

    def test_a_name_is_there_once(self, scene):
        old = self.back(scene, "one", 1)
        new = scene.join("one", 9)
        assert "another peer" in (old.out or "")
        self.back(scene, "one", 1)
        assert scene.refused
        scene.pass_time(10.5, new)
        assert [m.peer for m in new.views[-1].roster] == [new.peer]

    def test_without_a_memory_it_waits_for_all_who_may_come(self):
        scene = Scene(era=1, restarted=True)
        one = self.back(scene, "one", 1, era=4)
        scene.pass_time(5.0, one)
        two = self.back(scene, "two", 2, era=4)
        assert one.views == []
        scene.pass_time(6.0, one, two)
        assert states(one.views[-1]) == {"one": "active", "two": "active"}
        assert one.views[-1].number == ViewNumber(5, 1)

    def test_a_run_that_nobody_had_begun_still_has_a_founder(self):
        view = arbiter.joined(arbiter.first_view(1), PeerId("one", 1))
        scene = Scene(view, era=2, restarted=True)
        one = self.back(scene, "one", 1, PeerState.WATCHING)
        assert one.views[-1].founder == one.peer
        assert one.views[-1].cut == NO_VIEW


def test_a_peer_that_keeps_losing_messages_is_kept_out():
    """Each of its losses is a cut for everybody: three a minute, then it may only watch."""
    published, dropped = [], []
    members = Membership(
        Terms(),
        arbiter.first_view(1),
        0.0,
        publish=published.append,
        drop=lambda peer, reason: dropped.append((peer, reason)),
    )
    good, bad = PeerId("good", 1), PeerId("bad", 2)
    for peer in (good, bad):
        members.join(peer, 0.0)
        members.word(peer, Ready())
    cut = members.view.cut
    for n in range(3):
        members.word(bad, Lost(1))
        assert members.view.cut > cut, n
        cut = members.view.cut
        assert bad in members
    members.word(bad, Lost(1))
    assert bad not in members
    assert dropped[-1][0] == bad
    assert "3 times in a minute" in dropped[-1][1]
    again = PeerId("bad", 3)
    members.join(again, 5.0)
    members.word(again, Ready())
    assert members.view.peers(PeerState.ACTIVE) == (good,)
    keep_alive(members, 59.0)
    assert members.view.peers(PeerState.ACTIVE) == (good,)
    keep_alive(members, 61.0)
    assert members.view.peers(PeerState.ACTIVE) == (good, again)


def keep_alive(members, until_s):
    for now_s in range(5, int(until_s) + 1):
        for peer in members.view.peers():
            members.leases.heard(peer.incarnation, float(now_s))
        members.tick(float(now_s))
