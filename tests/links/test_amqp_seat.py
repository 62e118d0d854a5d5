"""The arbiter's seat, without a broker: what is published, to whom, and acknowledged when."""

from __future__ import annotations

import time

import pytest

from manyhands.core.peers import NO_VIEW, PeerId, PeerState, View, ViewNumber
from manyhands.links import arbiter
from manyhands.links.amqp.seat import MAX_PEERS, Seat
from manyhands.links.messages import (
    HEADER_BYTES,
    SCHEMA,
    BeatBack,
    Bye,
    Call,
    Dismissal,
    Fence,
    Header,
    Lost,
    Missing,
    NewView,
    Ready,
    Resign,
    Terms,
)

TERMS = Terms(beat_s=1.0, lease_s=10.0, grace_s=1.0)
A, B, C = PeerId("a", 10), PeerId("b", 11), PeerId("c", 12)
ACTIVE, LEAVING, WATCHING = PeerState.ACTIVE, PeerState.LEAVING, PeerState.WATCHING


class Line:
    """A control line that remembers."""

    def __init__(self) -> None:
        self.fences: list[int] = []
        self.views: list[View] = []
        self.told: list[tuple[int, Header]] = []
        self.acks: list[int] = []
        self.given_up = self.asked = 0
        self.tag = 0

    def to_peer(self, incarnation: int, header: Header) -> None:
        self.tag += 1
        self.told.append((incarnation, header))

    def to_all(self, header: Header) -> int:
        self.tag += 1
        match header:
            case Fence(token):
                self.fences.append(token)
            case NewView(view):
                self.views.append(view)
        return self.tag

    def ask_begun(self) -> None:
        self.asked += 1

    def acknowledge(self, delivery_tag: int) -> None:
        self.acks.append(delivery_tag)

    def give_up(self) -> None:
        self.given_up += 1

    def dismissed(self) -> dict[int, str]:
        return {i: word.reason for i, word in self.told if isinstance(word, Dismissal)}


class Office:
    """A seat of peer A and what surrounds it. Confirms at once unless told otherwise."""

    def __init__(self, view: View | None = None, *, unsure=False, new_run=True) -> None:
        self.line = Line()
        self.dropped: list[PeerId] = []
        self.view, self.unsure, self.new_run = view or View(NO_VIEW, ()), unsure, new_run
        self.confirms = True
        self.num_events = 0
        self.seat = Seat(
            self.line,
            A,
            TERMS,
            newest=lambda: self.view,
            unsure=lambda: self.unsure,
            dropped=self.dropped.append,
            run="a-run",
        )

    def call(self, peer: PeerId, view: ViewNumber | None = None, word: Header | None = None, **how):
        """An event; without a view, the caller has seen the newest one."""
        self.num_events += 1
        newest = self.line.views[-1] if self.line.views else self.view
        member = newest.member(peer.incarnation)
        if view is None:
            view = newest.number if member else NO_VIEW
        state = member.state if member else WATCHING
        given = {"n": 1, "view": view, "state": state, "wants": state}
        given |= {"word": b"" if word is None else SCHEMA.encode(word)} | how
        before = self.line.given_up
        self.offer(Call(peer, **given))
        if self.line.given_up > before:  # nobody else is there: the event comes again
            self.seat.lose()
            self.offer(Call(peer, **given))
        if self.confirms:
            self.seat.on_confirm(self.line.tag, multiple=True)

    def offer(self, event: Call) -> None:
        """The broker gives it to A, and what A asks for before it decides."""
        asked = self.line.asked
        self.seat.on_call(self.num_events, event)
        if self.line.asked > asked and self.new_run:
            self.seat.not_begun()
        if not self.seat.taken and self.line.fences:
            self.seat.on_fence(self.line.fences[-1])

    def tick(self, start_s: float, stop_s: float, *, may_judge: bool = True, alive=()) -> None:
        """Time passes: from so many seconds after now to so many."""
        now_s = time.monotonic()
        for step in range(int(start_s * 5), int(stop_s * 5) + 1):
            for peer in alive:
                self.seat._members.leases.heard(peer.incarnation, now_s + step / 5)
            self.seat.tick(now_s + step / 5, may_judge=may_judge)

    @property
    def roster(self) -> dict[str, PeerState]:
        return {m.peer.name: m.state for m in self.line.views[-1].roster}


def run_of(*peers: PeerId, era: int = 5) -> View:
    """A view of a run in which all of them are active."""
    view = arbiter.first_view(era)
    for peer in peers:
        view = arbiter.ready(arbiter.joined(view, peer), peer)
    return view


def in_office(*peers: PeerId) -> Office:
    """A is the arbiter of a run of these, and everybody has the newest view."""
    office = Office(run_of(*peers))
    office.call(A)
    assert office.seat.taken
    return office


class TestTakingTheSeat:
    def test_nothing_is_decided_before_the_fence_is_back(self):
        office = Office(run_of(A))
        seat, line = office.seat, office.line
        seat.on_call(1, Call(B, 0, NO_VIEW, WATCHING, WATCHING))
        (token,) = line.fences
        seat.on_fence(token + 1)  # another arbiter's
        assert not seat.taken
        newer = office.view = run_of(A, C)  # arrives in front of the fence
        seat.on_fence(token)
        assert seat.taken
        (view,) = line.views
        assert view.peers() == (A, C, B)
        assert view.number == newer.number._replace(n=newer.number.n + 1)
        seat.on_fence(token)  # a copy of it
        assert len(line.views) == 1

    def test_a_lost_fence_is_sent_again_and_any_copy_counts(self):
        """An inbox may take longer than the time between two copies."""
        office = Office(run_of(A))
        office.seat.on_call(1, Call(B, 0, NO_VIEW, WATCHING, WATCHING))
        now_s = time.monotonic()
        for i in range(1, 4):
            office.seat.tick(now_s + i * 1.5 * TERMS.beat_s, may_judge=True)
        assert len(office.line.fences) == 4
        assert len(set(office.line.fences)) == 1
        office.seat.on_fence(office.line.fences[0])
        assert office.seat.taken

    def test_an_event_is_acknowledged_after_its_views_are_confirmed(self):
        office = Office(run_of(A))
        office.confirms = False
        office.call(B)
        assert len(office.line.views) == 1
        assert office.line.acks == []
        office.seat.on_confirm(1, multiple=False)  # of the fence
        assert office.line.acks == []
        office.seat.on_confirm(2, multiple=False)
        assert office.line.acks == [1]
        office.call(B)  # changes nothing
        assert office.line.acks == [1, 2]

    def test_a_seat_that_was_lost_decides_nothing(self):
        office = Office(run_of(A))
        office.seat.on_call(1, Call(B, 0, NO_VIEW, WATCHING, WATCHING))
        office.seat.lose()
        office.seat.on_fence(office.line.fences[0])
        assert not office.seat.taken
        office.call(B)
        assert office.seat.taken
        office.confirms = False
        office.call(C)
        office.seat.lose()
        office.seat.on_confirm(office.line.tag, multiple=True)
        assert office.line.acks == [1], "the event of the lost line is not acknowledged"
        office.tick(0, 2)
        assert len(office.line.views) == 2

    def test_a_successor_goes_on_and_an_event_told_twice_changes_nothing(self):
        first = in_office(A)
        first.confirms = False
        event = Call(B, 0, NO_VIEW, WATCHING, WATCHING)
        first.seat.on_call(7, event)
        second = Office(first.line.views[-1])
        second.seat.on_call(1, event)
        second.seat.on_fence(second.line.fences[0])
        assert second.line.views == []
        assert second.line.acks == [1]
        second.call(C)
        assert second.line.views[-1].number.n == first.line.views[-1].number.n + 1
        assert second.line.views[-1].number.era == first.line.views[-1].number.era

    def test_a_newcomer_gives_way_once(self):
        """To one who has seen the run."""
        office = Office(new_run=False)
        event = Call(B, 0, ViewNumber(5, 3), ACTIVE, ACTIVE)
        office.offer(event)
        assert office.line.given_up == 1
        assert not office.seat.taken
        office.seat.lose()
        office.offer(event)
        assert office.line.given_up == 1
        assert office.seat.taken

    @pytest.mark.parametrize("view", [None, run_of(A)])
    def test_others_do_not_give_way(self, view):
        office = Office(view, new_run=view is None)
        office.call(B, view=ViewNumber(5, 3))
        assert office.line.given_up == 0
        assert office.seat.taken

    def test_a_line_lost_before_the_run_began_changes_nothing(self):
        """Whoever made the queue: no arbiter was there before, so nobody can come back."""
        office = Office()
        event = Call(B, 0, NO_VIEW, WATCHING, WATCHING)
        for _ in range(3):
            office.seat.on_call(1, event)
            office.seat.not_begun()
            office.seat.lose()
        assert office.line.given_up == 0
        office.call(B)
        assert office.roster == {"b": WATCHING}

    @pytest.mark.parametrize("unsure", [False, True])
    @pytest.mark.parametrize("begun", [False, True])
    def test_a_run_that_the_broker_does_not_know(self, unsure, begun):
        """Only whoever was cut off from it may have been put out before it ended; it may notice
        that late."""
        office = Office(run_of(A))
        office.seat.on_call(1, Call(A, 0, ViewNumber(5, 3), WATCHING, WATCHING))
        assert office.line.asked
        office.unsure = unsure
        if not begun:
            office.seat.not_begun()
        assert office.seat.forgotten == (unsure and not begun)

    def test_the_answer_of_an_earlier_line_does_not_count(self):
        """Another arbiter may have been there in between."""
        office = Office()
        office.seat.on_call(1, Call(B, 0, NO_VIEW, WATCHING, WATCHING))
        office.seat.not_begun()
        office.seat.lose()
        office.new_run = False
        office.call(B)
        assert office.line.given_up == 1
        assert office.seat.taken
        assert office.line.views == []


class TestCollecting:
    def test_a_new_run_starts_at_once(self):
        office = Office()
        office.call(A)
        assert office.line.views[-1].founder == A

    def test_a_run_that_was_there_before_does_not(self, caplog):
        office = Office(new_run=False)
        office.call(A)
        assert caplog.messages == ["waiting up to 10 s: run 'a-run' had peers that may come back"]
        office.tick(0, TERMS.lease_s - 1, alive=[A])
        assert office.line.views == []
        assert office.line.acks == [1], "the next one is to be heard"
        assert (A.incarnation, BeatBack(1)) in office.line.told
        office.tick(TERMS.lease_s - 1, TERMS.lease_s + 1, alive=[A])
        assert office.roster == {"a": WATCHING}

    def test_one_cut_when_all_are_back(self):
        before = run_of(A, B)
        office = Office(before, unsure=True)
        office.call(A)
        office.call(C)  # a newcomer is taken in with them
        seen = before.number._replace(era=7)  # B has seen a view that A has missed
        office.call(B, view=seen, wants=LEAVING, state=LEAVING)
        (view,) = office.line.views
        assert view.number.era == 8
        assert view.cut == view.number
        assert office.roster == {"a": ACTIVE, "b": LEAVING, "c": WATCHING}
        assert view.founder is None

    def test_who_does_not_come_back_is_out(self):
        office = Office(run_of(A, B), unsure=True)
        office.call(A)
        office.tick(0, TERMS.lease_s + 1, alive=[A])
        assert office.roster == {"a": ACTIVE}
        assert "did not come back" in office.line.dismissed()[B.incarnation]
        assert office.dropped == [B]

    def test_a_predecessor_of_a_newcomer_is_fenced(self):
        office = Office(run_of(A, B), unsure=True)
        office.call(A)
        office.call(PeerId("b", 99))
        office.call(B)
        assert "joined as 'b'" in office.line.dismissed()[B.incarnation]
        assert (B.incarnation, BeatBack(1)) not in office.line.told

    def test_words_are_kept_until_the_end(self):
        office = Office(run_of(A, B), unsure=True)
        office.call(A, word=Resign(False, "for a test"))
        office.call(B)
        assert office.roster == {"b": ACTIVE}


class TestEvents:
    def test_strangers_are_dismissed(self):
        office = in_office(A)
        office.call(B, view=ViewNumber(5, 1))
        assert "away" in office.line.dismissed()[B.incarnation]
        assert office.line.views == []
        assert (B.incarnation, BeatBack(1)) not in office.line.told
        assert office.line.acks == [1, 2]

    def test_what_a_peer_wants(self):
        office = in_office(A)
        office.call(B)
        office.call(B, wants=ACTIVE)
        assert office.roster == {"a": ACTIVE, "b": ACTIVE}
        office.call(B, wants=LEAVING)
        assert office.roster == {"a": ACTIVE, "b": LEAVING}
        office.call(B, wants=ACTIVE)  # an old call: there is no way back
        assert office.roster == {"a": ACTIVE, "b": LEAVING}

    def test_one_that_never_was_active_can_want_to_leave(self):
        office = in_office(A)
        office.call(B)
        office.call(B, wants=LEAVING)
        assert office.roster == {"a": ACTIVE, "b": LEAVING}

    def test_a_replaced_inbox_is_a_cut_once(self):
        office = in_office(A, B)
        office.call(B, renewed_at=office.view.number)
        (view,) = office.line.views
        assert view.cut == view.number
        assert view.peers() == (A, B)
        office.call(B, view=office.view.number, renewed_at=office.view.number)
        assert len(office.line.views) == 1, "that cut has told everybody"
        office.call(B, renewed_at=view.number)
        assert len(office.line.views) == 2, "but not what was lost after it"

    def test_a_watching_peer_that_was_away_is_no_cut(self):
        office = in_office(A)
        office.call(B)
        office.call(B, renewed_at=office.line.views[-1].number)
        assert len(office.line.views) == 1

    def test_a_missed_view_is_told_again(self):
        office = in_office(A, B)
        office.call(C)
        told = (B.incarnation, NewView(office.line.views[-1], TERMS))
        assert told not in office.line.told
        office.call(B, view=office.view.number)
        assert told in office.line.told
        assert office.line.told.index(told) < office.line.told.index((B.incarnation, BeatBack(1)))
        assert len(office.line.views) == 1
        office.line.told.clear()
        office.call(B)
        assert office.line.told == [(B.incarnation, BeatBack(1))]

    @pytest.mark.parametrize("word", [b"no frame", SCHEMA.encode(Ready())[:-1], b"x" * 9000])
    def test_a_word_that_nobody_understands(self, word):
        office = in_office(A, B)
        office.num_events += 1
        office.seat.on_call(2, Call(B, 3, office.view.number, ACTIVE, LEAVING, None, word))
        assert office.roster == {"a": ACTIVE, "b": LEAVING}, "the rest of the call stands"
        office.seat.on_confirm(office.line.tag, multiple=True)
        assert office.line.acks == [1, 2]

    def test_words(self):
        office = in_office(A, B, C)
        office.call(B, word=Lost(C.incarnation))
        assert office.line.views[-1].cut == office.line.views[-1].number
        office.call(B, word=Bye())
        assert office.roster == {"a": ACTIVE, "c": ACTIVE}
        office.call(C, word=Resign(True, "all done"))
        assert office.line.views[-1].over

    def test_a_bye_of_one_that_never_came_in(self):
        office = in_office(A)
        office.call(B, word=Bye())
        assert office.line.views == []
        assert office.line.acks == [1, 2]

    def test_a_full_run(self):
        peers = [PeerId(f"{i:0100}", (1 << 62) + i) for i in range(MAX_PEERS)]
        view = run_of(*peers, era=time.time_ns() // 1_000_000)
        view = arbiter.shaken(view, peers)  # its cut has the whole roster too
        assert len(SCHEMA.encode(NewView(view, TERMS))) <= HEADER_BYTES
        office = Office(view)
        office.call(B)
        assert "full" in office.line.dismissed()[B.incarnation]
        assert office.line.views == []

    def test_alone(self):
        office = Office(new_run=False)
        office.call(A)
        assert not office.seat.alone(), "others may come back"
        office.tick(0, TERMS.lease_s + 1, alive=[A])
        assert office.seat.alone()
        office.call(B)
        assert not office.seat.alone()
        office.call(A, word=Bye())
        assert not office.seat.alone(), "B is still there"
        office.call(B, word=Bye())
        assert office.seat.alone()
        office.seat.await_own_end(0)

    def test_its_own_end_is_awaited_until_the_others_can_see_it(self):
        office = in_office(A, B)
        office.confirms = False
        office.call(A, word=Bye())
        assert not office.seat._own_end.is_set()
        office.seat.on_confirm(office.line.tag, multiple=True)
        assert office.seat._own_end.is_set()

    def test_one_that_retires_leaves_the_rest_to_the_next(self):
        """If it put the others out while it goes, none of them would be the last."""
        office = in_office(A, B)
        office.call(A, word=Bye())
        assert not office.seat.retire()
        office.call(B, word=Bye())
        assert office.roster == {"b": ACTIVE}
        assert office.line.acks == [1, 2]
        successor = Office(office.line.views[-1])
        successor.call(B, word=Bye())
        assert successor.seat.retire(), "it is the last one"

    def test_one_that_retires_does_not_take_the_seat(self):
        office = Office(run_of(A, B))
        office.seat.on_call(1, Call(B, 0, NO_VIEW, WATCHING, WATCHING))
        assert not office.seat.retire()
        office.seat.on_fence(office.line.fences[0])
        assert not office.seat.taken

    def test_the_end_that_another_arbiter_decides(self):
        office = Office(run_of(A, B))
        assert not office.seat._own_end.is_set()
        office.seat.put_out()
        office.seat.await_own_end(60)

    def test_an_arbiter_decides_its_own_end(self):
        office = in_office(A, B)
        office.seat.put_out()
        assert not office.seat._own_end.is_set()


class TestJudging:
    def test_silence_ends_a_lease(self):
        office = in_office(A, B)
        office.tick(0, TERMS.lease_s - 1, alive=[A])
        assert office.line.views == []
        office.tick(TERMS.lease_s - 1, TERMS.lease_s + 1, alive=[A])
        assert office.roster == {"a": ACTIVE}
        assert office.dropped == [B]

    def test_without_answers_of_its_own_it_does_not_judge(self):
        office = in_office(A, B)
        office.tick(0, 5 * TERMS.lease_s, may_judge=False)
        assert office.line.views == []
        office.tick(5 * TERMS.lease_s, 6 * TERMS.lease_s - 1, alive=[A])
        assert office.line.views == [], "all leases have started anew"
        office.tick(6 * TERMS.lease_s - 1, 6 * TERMS.lease_s + 1, alive=[A])
        assert office.roster == {"a": ACTIVE}

    def test_a_new_arbiter_starts_all_leases(self):
        office = Office(run_of(A, B))
        office.call(A)
        office.tick(0, TERMS.lease_s - 1, alive=[A])
        assert office.line.views == []

    def test_the_silent_are_knocked_at_and_out_if_nobody_is_there(self):
        office = in_office(A, B, C)
        office.line.told.clear()
        office.tick(0, 3, alive=[A, C])
        assert office.line.told
        assert set(office.line.told) == {(B.incarnation, BeatBack(0))}
        office.seat.bounced(B.incarnation)
        office.tick(3, 3.4, alive=[A, C])
        assert office.roster == {"a": ACTIVE, "c": ACTIVE}

    def test_who_misses_one_beat_is_knocked_at(self):
        office = in_office(A, B, C)
        office.line.told.clear()
        office.tick(0, TERMS.beat_s, alive=[A, C])
        assert office.line.told == [], "it may be on its way"
        office.tick(TERMS.beat_s, 1.4 * TERMS.beat_s, alive=[A, C])
        assert office.line.told == [(B.incarnation, BeatBack(0))]

    def test_the_arbiter_does_not_answer_itself(self):
        """When nothing is heard at all, not even itself, it must not go on to judge the others."""
        office = in_office(A, B)
        office.line.told.clear()
        office.tick(0, 3, alive=[])
        assert {incarnation for incarnation, _ in office.line.told} == {B.incarnation}

    def test_a_peer_that_others_miss_has_its_grace(self):
        office = in_office(A, B)
        office.call(A, word=Missing(B.incarnation))
        office.call(B)
        office.tick(0, 3, alive=[A])
        assert office.line.views == [], "it has called since"
        office.call(A, word=Missing(B.incarnation))
        office.call(A, word=Missing(12345))
        office.tick(0, 0.6, alive=[A])
        assert office.line.views == []
        office.tick(0.6, 2, alive=[A])
        assert office.roster == {"a": ACTIVE}
