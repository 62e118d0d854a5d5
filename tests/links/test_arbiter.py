"""The arbiter's rules, alone."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from manyhands.core.peers import NO_VIEW, Member, PeerId, PeerState, View, ViewNumber
from manyhands.links import arbiter

A, B, C = (PeerId(name, i + 1) for i, name in enumerate("abc"))
FOLLOWED = (PeerState.ACTIVE, PeerState.LEAVING)


def view_of(*steps) -> View:
    view = arbiter.first_view(1)
    for step, *arguments in steps:
        view = step(view, *arguments)
    return view


JOIN_A, READY_A = (arbiter.joined, A), (arbiter.ready, A)
JOIN_B, READY_B = (arbiter.joined, B), (arbiter.ready, B)


def test_the_first_to_join_is_the_founder_until_somebody_is_active():
    view = view_of(JOIN_A, JOIN_B)
    assert view.founder == A
    assert view_of(JOIN_A, JOIN_B, (arbiter.removed, [A])).founder == B
    view = arbiter.ready(view, B)
    assert view.founder is None
    assert view.cut == view.number
    # Also when nobody is left: the run has state, and nobody starts it afresh.
    assert arbiter.joined(arbiter.removed(view, [A, B]), C).founder is None


def test_a_second_active_peer_is_no_cut():
    before = view_of(JOIN_A, READY_A, JOIN_B)
    after = arbiter.ready(before, B)
    assert after.cut == before.cut
    assert after.number > before.number


def test_the_next_first_active_peer_is_a_cut_again():
    view = view_of(JOIN_A, READY_A, (arbiter.removed, [A]), JOIN_B, READY_B)
    assert view.cut == view.number


def test_a_successor_takes_the_place_of_its_predecessor():
    again = PeerId(A.name, 99)
    watching = arbiter.joined(view_of(JOIN_A, JOIN_B), again)
    assert watching.peers() == (B, again)
    assert watching.cut == NO_VIEW
    active = arbiter.joined(view_of(JOIN_A, READY_A, JOIN_B), again)
    assert active.peers() == (B, again)
    assert active.cut == active.number


def test_what_changes_nothing_is_no_new_view():
    view = view_of(JOIN_A, READY_A, JOIN_B)
    for same in (
        arbiter.joined(view, A),
        arbiter.ready(view, A),
        arbiter.ready(view, C),
        arbiter.leaving(view, B),
        arbiter.leaving(view, C),
        arbiter.gone(view, C, view.cut),
        arbiter.resigned(view, C, finished=True),
        arbiter.removed(view, [C]),
        arbiter.shaken(view, [B]),
        arbiter.shaken(view, []),
    ):
        assert same is view


def test_gone_is_quiet_only_for_a_leaver_that_knows_the_newest_cut():
    active = view_of(JOIN_A, READY_A, JOIN_B, READY_B)
    leaving = arbiter.leaving(active, B)
    quiet = arbiter.gone(leaving, B, leaving.cut)
    assert (quiet.peers(), quiet.cut) == ((A,), leaving.cut)
    for view, cut in ((leaving, NO_VIEW), (active, active.cut)):
        loud = arbiter.gone(view, B, cut)
        assert loud.peers() == (A,)
        assert loud.cut == loud.number


def test_a_finished_run_stays_finished():
    view = arbiter.resigned(view_of(JOIN_A, READY_A, JOIN_B), A, finished=True)
    assert view.over
    assert view.cut == view.number
    assert arbiter.ready(view, B).peers() == ()
    assert arbiter.joined(view, C).over
    assert arbiter.returned(view, 5, view.roster).over


def test_a_loss_of_a_followed_peer_is_a_cut_with_the_same_roster():
    before = view_of(JOIN_A, READY_A, JOIN_B)
    after = arbiter.shaken(before, [B, A])
    assert after.roster == before.roster == after.cut_roster
    assert after.cut == after.number > before.number


def test_after_a_restart_one_cut_in_a_new_era():
    before = view_of(JOIN_A, READY_A, JOIN_B)
    after = arbiter.returned(before, 7, before.roster[:1])
    assert after.number == after.cut == ViewNumber(7, 1)
    assert after.peers() == (A,)
    assert after.founder is None
    nobody = arbiter.returned(before, 7, [])
    assert nobody.founder is None
    assert arbiter.joined(nobody, B).founder is None


def test_after_a_restart_a_run_that_never_began_is_still_new():
    before = view_of(JOIN_A, JOIN_B)
    after = arbiter.returned(before, 7, before.roster)
    assert after.cut == NO_VIEW
    assert after.founder == A
    told = [Member(A, PeerState.ACTIVE, NO_VIEW)]  # by a peer, where the journal knows nothing
    assert arbiter.returned(arbiter.first_view(1), 7, told).founder is None


peers = st.builds(PeerId, st.sampled_from("abcd"), st.integers(1, 12))
cuts = st.one_of(st.none(), st.builds(ViewNumber, st.integers(0, 3), st.integers(0, 30)))
events = st.lists(
    st.one_of(
        st.tuples(st.just("joined"), peers),
        st.tuples(st.just("ready"), peers),
        st.tuples(st.just("leaving"), peers),
        st.tuples(st.just("gone"), peers, cuts),
        st.tuples(st.just("resigned"), peers, st.booleans()),
        st.tuples(st.just("removed"), st.lists(peers, max_size=3)),
        st.tuples(st.just("shaken"), st.lists(peers, max_size=3)),
        st.tuples(st.just("returned"), st.integers(1, 4), st.sets(st.integers(0, 3))),
    ),
    max_size=40,
)


def happen(view: View, event) -> View:
    match event:
        case ("gone", peer, cut):
            return arbiter.gone(view, peer, view.cut if cut is None else cut)
        case ("resigned", peer, finished):
            return arbiter.resigned(view, peer, finished=finished)
        case ("returned", era, places):
            members = [m for i, m in enumerate(view.roster) if i in places]
            return arbiter.returned(view, view.number.era + era, members)
        case (name, argument):
            return getattr(arbiter, name)(view, argument)


@example([("joined", PeerId("a", 1)), ("resigned", PeerId("b", 1), True)])  # one number, two names
@given(events)
def test_whatever_happens(sequence):
    view = arbiter.first_view(1)
    rosters = {NO_VIEW: ()}
    over = False
    for event in sequence:
        before, view = view, happen(view, event)
        if view is before:
            continue
        assert view.number > before.number
        rosters[view.number] = view.roster
        names = [m.peer.name for m in view.roster]
        assert len(set(names)) == len(names)
        assert view.cut in (before.cut, view.number)
        assert view.cut_roster == rosters[view.cut]
        assert (view.founder is None) == (view.cut != NO_VIEW or not view.roster)
        assert over <= view.over
        over = view.over
        followed = {m.peer for m in before.roster if m.state in FOLLOWED}
        here = set(view.peers())
        if event[0] in ("joined", "removed") and followed <= here:
            assert view.cut == before.cut, "a watching peer makes no cut"
        if event[0] != "gone" and not followed <= here:
            assert view.cut == view.number, "nobody that is followed disappears in silence"
        if view.peers(PeerState.ACTIVE) and not before.peers(PeerState.ACTIVE):
            assert view.cut == view.number
        for member in view.roster:
            assert member.since <= view.number
