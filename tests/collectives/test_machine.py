"""The round machine and its messages, one rule at a time. test_world.py has them all together."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from manyhands.collectives import events as e
from manyhands.collectives import instructions as i
from manyhands.collectives import messages as m
from manyhands.collectives.machine import RoundMachine
from manyhands.collectives.ranges import EMPTY, Ranges
from manyhands.collectives.standing import Course, Mode
from manyhands.core.errors import Malformed, Oversized, UsageError
from manyhands.core.peers import NO_VIEW, PeerId, ViewNumber
from manyhands.links import arbiter
from manyhands.links.messages import MESSAGE_BYTES, Gone, Leaving, Ready, Resign

PARTS, SAMPLES = 2, 6
COURSE = Course(num_parts=PARTS, num_samples=lambda _: SAMPLES, num_rounds=10)
A, B, C = (PeerId(name, number) for name, number in zip("abc", (30, 10, 20), strict=True))
WHOLE = Ranges.whole(SAMPLES)


class Seat:
    """A machine, and all that it has said."""

    def __init__(self, peer, course=COURSE):
        self.me = peer.incarnation
        self.machine = RoundMachine(self.me, course)
        self.said = []

    def tell(self, *events, lease=True):
        """Hand events in; returns what was answered, with own Parts looped back at once."""
        answers = []
        for event in events:
            for said in self.machine.handle(event, lease=lease):
                answers.append(said)
                if isinstance(said, i.Send) and said.to == self.me:
                    answers += self.tell(e.PartArrived(self.me, said.message), lease=lease)
                elif isinstance(said, i.AddUp):
                    digest = b"digest of %d" % said.sum.k
                    answers += self.tell(e.Summed(said.sum, digest), lease=lease)
                elif isinstance(said, i.Conclude):
                    answers += self.tell(e.Concluded(said.sum, b"of its own"), lease=lease)
        self.said += answers
        return answers


def only(kind, answers):
    return [said for said in answers if isinstance(said, kind)]


def sent(kind, answers):
    return [said.message for said in only(i.Send, answers) if isinstance(said.message, kind)]


def views(*steps):
    """The views of a run, one a step, from its beginning."""
    view, out = arbiter.first_view(1), []
    for step, *arguments in steps:
        view = step(view, *arguments)
        out.append(e.ViewSeen(view))
    return out


JOIN_A, READY_A = (arbiter.joined, A), (arbiter.ready, A)
JOIN_B, READY_B = (arbiter.joined, B), (arbiter.ready, B)
JOIN_C = (arbiter.joined, C)


def founder(*more):
    """A, which has founded the run, is active and computes its first round."""
    seat = Seat(A)
    joined, ready, *rest = views(JOIN_A, READY_A, *more)
    seat.tell(e.StateOffered(0, b"seed"))
    assert i.Tell(Ready()) in seat.tell(joined)
    seat.tell(ready)
    return seat, rest


def lone_round(seat):
    """Have a lone member compute its round; returns what it says until it asks for the lease."""
    machine = seat.machine
    return seat.tell(e.Computed(machine.applied, machine.claims))


def confirm(seat):
    machine = seat.machine
    return seat.tell(e.LeaseConfirmed(machine.applied, machine.tag))


# -- alone -----------------------------------------------------------------------------------


def test_a_founder_computes_everything_and_commits():
    seat, _ = founder()
    assert only(i.Compute, seat.said) == [i.Compute(0, WHOLE)]
    assert not only(i.Generation, seat.said)
    answers = lone_round(seat)
    assert [part.k for part in sent(m.Part, answers)] == [1, 0]  # one canonical order
    assert {head.k for head in sent(m.Sum, answers)} == {0, 1}
    (commit,) = only(i.Commit, confirm(seat))
    assert (commit.round, commit.member, commit.record.members) == (0, True, (A.incarnation,))
    assert commit.chain == seat.machine.chain
    assert seat.machine.applied == 1


def test_alone_it_waits_for_the_arbiter_in_every_round():
    seat, _ = founder()
    assert not only(i.Commit, lone_round(seat))
    stale = e.LeaseConfirmed(0, m.Tag(ViewNumber(9, 9), 0))
    assert not only(i.Commit, seat.tell(stale))
    assert only(i.Commit, confirm(seat))
    assert not only(i.Commit, lone_round(seat))


def test_without_a_lease_it_waits_and_asks_again():
    seat, _ = founder()
    lone_round(seat)
    machine = seat.machine
    confirmed = e.LeaseConfirmed(machine.applied, machine.tag)
    answers = seat.tell(confirmed, lease=False)
    assert answers == [i.ConfirmLease(machine.applied, machine.tag)]
    assert only(i.Commit, seat.tell(confirmed))


def test_what_is_concluded_has_one_head_for_all_parts():
    seat, _ = founder()
    answers = seat.tell(e.Computed(0, WHOLE, fit=True))
    (conclude,) = only(i.Conclude, answers)
    assert (conclude.sum.k, conclude.sum.record.prev) == (0, b"seed")
    assert not sent(m.Part, answers)
    assert not sent(m.Sum, answers)
    assert not only(i.Commit, answers)
    (commit,) = only(i.Commit, confirm(seat))
    assert (commit.alone, commit.sums) == (True, (conclude.sum,))
    assert commit.chain == seat.machine.chain
    assert not seat.machine.kept.results


def test_a_cut_does_not_undo_what_was_concluded():
    """All parts are held, although there is one head; it is committed once, after the cut."""
    seat, _ = founder()
    machine = seat.machine
    (conclude,) = only(i.Conclude, seat.tell(e.Computed(0, WHOLE, fit=True)))
    tag = machine.tag
    shaken = arbiter.shaken(machine.view, [A])
    answers = seat.tell(e.ViewSeen(shaken))
    assert only(i.Settled, answers) == [i.Settled(shaken.cut, True, 1, False, ())]
    assert not only(i.Commit, answers)
    (asked,) = only(i.ConfirmLease, answers)
    answers = seat.tell(e.LeaseConfirmed(asked.round, asked.attempt))
    (commit,) = only(i.Commit, answers)
    assert (commit.round, commit.attempt, commit.alone) == (0, tag, True)
    assert commit.sums == (conclude.sum,)
    assert only(i.Compute, answers) == [i.Compute(1, WHOLE)]


def test_another_attempt_is_not_complete_with_part_0():
    seat, _ = founder()
    machine = seat.machine
    (conclude,) = only(i.Conclude, seat.tell(e.Computed(0, WHOLE, fit=True)))
    confirm(seat)
    head = m.Sum(*machine._key, 0, conclude.sum.contributions, record=conclude.sum.record)
    assert machine.book.add_sum(head, b"digest")
    assert (machine.book.complete(machine._key), machine.book.mask(machine._key)) == (False, 1)
    assert machine.book.concluded is None  # dropped with the round


def test_the_chain_covers_the_record():
    # The same values at another view: another record, so another chain.
    one, _ = founder()
    other, (view,) = founder(JOIN_B)
    other.tell(view)
    for seat in (one, other):
        lone_round(seat)
        confirm(seat)
    assert one.machine.applied == other.machine.applied == 1
    assert one.machine.chain != other.machine.chain


def test_refused_samples_are_quarantined_and_not_done_again():
    seat, _ = founder()
    machine = seat.machine
    tag = machine.tag
    parts = sent(m.Part, machine.handle(e.Computed(0, WHOLE), lease=True))
    answers = seat.tell(*(e.PartArrived(A.incarnation, p, p.k == 1) for p in parts))
    mine = m.Share(A.incarnation, WHOLE)
    assert only(i.Retry, answers) == [i.Retry(0, tag, WHOLE, (mine,))]
    assert i.DropBank(0) in answers
    assert only(i.DropSums, answers) == [i.DropSums(0, tag)]  # at once, not with the commit
    assert machine.book.attempts(0) == [m.Tag(tag.cut, 1)]
    assert machine.tag == m.Tag(tag.cut, 1)
    assert not only(i.Compute, answers)
    (commit,) = only(i.Commit, confirm(seat))
    assert commit.record.quarantine == WHOLE


def test_a_kept_result_is_released_by_a_result_of_the_next_round():
    seat, _ = founder()
    lone_round(seat)
    answers = confirm(seat)
    assert not only(i.Stable, answers)
    assert only(i.Stable, lone_round(seat)) == [i.Stable(1, seat.machine.chain)]


def test_when_everybody_leaves_one_empty_round_closes_the_run():
    seat, (leaving,) = founder((arbiter.leaving, A))
    assert seat.tell(e.LeaveAsked()) == [i.Tell(Leaving())]
    assert not seat.tell(e.LeaveAsked())
    seat.tell(leaving)
    lone_round(seat)
    answers = confirm(seat)
    assert only(i.Commit, answers)[0].record.closing
    assert not only(i.Compute, answers)
    answers = confirm(seat)
    assert i.Tell(Resign(True, "the run is finished")) in answers
    assert only(i.Stop, answers)[0].reason is i.StopReason.FINISHED
    assert seat.tell(e.GapSeen()) == []


# -- members ---------------------------------------------------------------------------------


def pair():
    """A and B are members of round 1, which A leads; A has B's view of things at hand."""
    a, (joined, ready) = founder(JOIN_B, READY_B)
    b = Seat(B)
    b.tell(e.StateOffered(0, b"seed"), joined)
    a.tell(joined, ready)
    lone_round(a)
    for head in sent(m.Sum, a.said):
        b.tell(e.SumArrived(A.incarnation, head, b"digest of %d" % head.k))
    assert i.Tell(Ready()) in b.said
    confirm(a)
    b.tell(ready)
    assert a.machine.members == b.machine.members == (A.incarnation, B.incarnation)
    assert a.machine.chain == b.machine.chain
    return a, b


def test_a_newcomer_with_the_right_state_is_taken_in_by_the_record():
    a, b = pair()
    assert (a.machine.member, b.machine.member) == (True, True)
    assert a.machine.claims | b.machine.claims == WHOLE
    assert not a.machine.claims & b.machine.claims


def part_of(seat, k=0, *, round_=None, attempt=None):
    machine = seat.machine
    tag = machine.tag if attempt is None else m.Tag(machine.tag.cut, attempt)
    report = m.SelfReport(1) if k == 0 else None
    number = machine.applied if round_ is None else round_
    return e.PartArrived(B.incarnation, m.Part(number, tag, k, seat.machine.claims, report=report))


def test_contributions_are_kept_one_attempt_ahead_and_no_further():
    a, b = pair()
    at = a.machine.applied
    for early in (part_of(b, attempt=1), part_of(b, round_=at + 1)):
        assert a.tell(early) == []
        assert a.tell(early) == [i.Discard(early)]  # once is enough
    for wrong in (
        part_of(b, attempt=2),
        part_of(b, round_=at + 2),
        part_of(b, round_=at + 1, attempt=1),
        part_of(b, round_=at - 1),
        part_of(b, k=PARTS),
    ):
        assert a.tell(wrong) == [i.Discard(wrong)]


def test_a_lead_waits_for_the_view_that_its_round_was_made_from():
    a, b = pair()
    newest = a.machine.view
    old = arbiter.first_view(1)
    a.machine.view = old  # as if the record had come first
    a.tell(part_of(b))
    assert not only(i.AddUp, a.tell(e.Computed(1, a.machine.claims)))
    answers = a.tell(e.ViewSeen(newest))
    assert [said.sum.k for said in only(i.AddUp, answers)] == [0]


def sum_of(seat, sender, k=0, *, members=(A, B), attempt=0, generation=NO_VIEW):
    """A result of the round that this seat is at."""
    machine = seat.machine
    shares = tuple(m.Share(peer.incarnation) for peer in members)
    rides = record(machine.chain, generation) if k == 0 else None
    head = m.Sum(machine.applied, m.Tag(machine.tag.cut, attempt), k, shares, record=rides)
    return e.SumArrived(sender.incarnation, head, b"digest")


def test_a_result_of_another_attempt_is_not_taken():
    _, b = pair()
    event = sum_of(b, A, attempt=1)
    assert b.tell(event) == [i.Discard(event)]


def test_a_member_takes_results_from_their_owners_only():
    a, b = pair()
    for seat, wrong in (
        (a, sum_of(a, B, 0)),  # its own part
        (b, sum_of(b, A, 1)),
        (b, sum_of(b, C, 0)),
        (b, sum_of(b, B, 0, members=(B, A))),  # which makes itself the owner
        (b, sum_of(b, A, 0, members=(A,))),
        (b, sum_of(b, A, 0, members=())),
    ):
        assert seat.tell(wrong) == [i.Discard(wrong)]
        assert not seat.machine.book.results(seat.machine._key)
    assert not only(i.Discard, b.tell(sum_of(b, A, 0)))
    assert list(b.machine.book.results(b.machine._key)) == [0]


def test_a_cut_waits_for_everybody_and_keeps_claims():
    a, b = pair()
    claims = a.machine.claims
    shaken = arbiter.shaken(a.machine.view, [B])
    answers = a.tell(e.ViewSeen(shaken))
    (status,) = sent(m.Status, answers)
    assert (status.applied, status.member, status.claims) == (1, True, claims)
    assert status.kept != m.NO_TAG
    assert a.machine.mode is Mode.TALKING
    early = part_of(b)  # of the attempt that the cut has ended
    assert a.tell(early) == [i.Discard(early)]
    theirs = sent(m.Status, b.tell(e.ViewSeen(shaken)))[0]
    answers = a.tell(e.StatusArrived(B.incarnation, theirs))
    assert only(i.Settled, answers) == [i.Settled(shaken.cut, False, 1, False, ())]
    assert a.machine.tag == m.Tag(shaken.cut, 0)
    assert a.machine.claims == claims
    assert not only(i.Compute, answers)  # the pass under way goes on


def test_a_status_may_come_before_the_view():
    a, b = pair()
    shaken = arbiter.shaken(a.machine.view, [B])
    theirs = sent(m.Status, b.tell(e.ViewSeen(shaken)))[0]
    assert a.tell(e.StatusArrived(B.incarnation, theirs)) == []
    assert only(i.Settled, a.tell(e.ViewSeen(shaken)))


def test_what_a_dead_member_had_is_computed_by_the_others():
    a, _ = pair()
    lost = WHOLE - a.machine.claims
    answers = a.tell(e.ViewSeen(arbiter.removed(a.machine.view, [B])))
    assert only(i.Compute, answers) == [i.Compute(1, lost, risky=True)]
    assert a.machine.claims == WHOLE


def test_followers_take_over_when_no_member_is_left():
    _, b = pair()
    b.machine.member = False  # as if no record had taken it in yet
    alone = arbiter.removed(b.machine.view, [A])
    answers = b.tell(e.ViewSeen(alone))
    assert only(i.Generation, answers) == [i.Generation(alone.cut, 1)]
    assert b.machine.generation == alone.cut


# -- coming and going ------------------------------------------------------------------------


def newcomer(*more):
    """C joins a run of A and has asked it for the state."""
    seat = Seat(C)
    *_, view = views(JOIN_A, READY_A, JOIN_C)
    answers = seat.tell(view)
    assert only(i.Send, answers) == [i.Send(A.incarnation, m.Ask(0))]
    return seat


def record(prev=b"", generation=NO_VIEW):
    return m.Record(prev, ViewNumber(1, 2), generation, (m.Share(A.incarnation, WHOLE),))


def snapshot(number=0, applied=4):
    return e.SnapshotArrived(
        A.incarnation, m.Snapshot(number, applied, b"chain%d" % applied, record())
    )


def result(round_, k=0, *, prev=b"", cut=2, generation=NO_VIEW):
    rides = record(prev, generation) if k == 0 else None
    all_by_a = (m.Share(A.incarnation, WHOLE),)
    head = m.Sum(round_, m.Tag(ViewNumber(1, cut), 0), k, all_by_a, record=rides)
    return e.SumArrived(A.incarnation, head, b"digest")


def test_a_newcomer_is_ready_when_a_record_confirms_its_base():
    seat = newcomer()
    assert only(i.TakeState, seat.tell(snapshot()))
    seat.tell(e.CaughtUp())
    assert not only(i.Tell, seat.tell(result(4, 1)))
    assert seat.tell(result(4, prev=b"chain4")) == [i.Tell(Ready())]
    assert not only(i.Commit, seat.said)  # it is not active: it needs evidence


def test_nobody_waits_for_a_newcomer_that_has_still_to_replay():
    seat = newcomer()
    seat.tell(snapshot())
    assert not only(i.Tell, seat.tell(result(4, prev=b"chain4")))
    assert seat.tell(e.CaughtUp()) == [i.Tell(Ready())]


def test_a_newcomer_that_is_left_alone_goes_on_with_what_it_has():
    seat = newcomer()
    seat.tell(snapshot(), result(4, prev=b"chain4"))
    alone = e.ViewSeen(arbiter.removed(seat.machine.view, [A]))
    assert i.Tell(Ready()) in seat.tell(alone)


def test_of_what_the_dead_left_it_keeps_the_round_that_comes_next():
    """All parts of it may be here: then the round stands, and nothing is lost."""
    seat = newcomer()
    seat.tell(snapshot(), result(4, prev=b"chain4"), result(4, 1), result(5, 1))
    answers = seat.tell(e.ViewSeen(arbiter.removed(seat.machine.view, [A])))
    assert i.Tell(Ready()) in answers
    assert [key.round for key in only(i.DropSums, answers)] == [5]


def test_whoever_follows_takes_results_from_the_owners_that_they_name():
    seat = newcomer()
    seat.tell(snapshot(), e.CaughtUp())
    later = ViewNumber(1, 9)
    for wrong in (
        sum_of(seat, B, 0, members=(A, B)),
        sum_of(seat, A, 1, members=(A, B)),
        sum_of(seat, A, 0, members=()),
        replace(result(2, generation=later, cut=9), sender=B.incarnation),  # nor goes back for it
    ):
        assert seat.tell(wrong) == [i.Discard(wrong)]
    assert i.Tell(Ready()) in seat.tell(sum_of(seat, A, 0, members=(A, B)))


def test_a_follower_commits_on_the_evidence_of_the_next_record():
    seat = newcomer()
    seat.tell(snapshot(), result(4, 1), result(4, prev=b"chain4"))
    machine = seat.machine
    after = machine.book.chain_after(b"chain4", (4, m.Tag(ViewNumber(1, 2), 0)))
    assert not only(i.Commit, seat.tell(result(5, 1)))
    (commit,) = only(i.Commit, seat.tell(result(5, prev=after)))
    assert (commit.round, commit.member, machine.applied) == (4, False, 5)


def test_a_base_that_no_record_confirms_is_dropped():
    seat = newcomer()
    seat.tell(snapshot())
    answers = seat.tell(result(4, prev=b"something else"))
    assert only(i.DropState, answers)
    assert sent(m.Ask, answers) == [m.Ask(1)]


def test_a_state_from_before_a_gap_is_not_taken():
    seat = newcomer()
    answers = seat.tell(e.GapSeen())
    assert sent(m.Ask, answers) == [m.Ask(1)]
    assert seat.tell(snapshot(number=0)) == []
    assert only(i.TakeState, seat.tell(snapshot(number=1)))


def test_a_gap_after_ready_is_the_end_of_this_incarnation():
    seat = newcomer()
    seat.tell(snapshot(), e.CaughtUp(), result(4, prev=b"chain4"))
    answers = seat.tell(e.GapSeen())
    assert isinstance(only(i.Tell, answers)[0].word, Resign)
    assert only(i.Stop, answers)[0].reason is i.StopReason.SENT_BACK


def test_a_member_lacks_nothing_that_was_lost_before_it_was_one():
    """As one that has taken over from the dead, and is told late: without it nobody may be left."""
    a, b = pair()
    for seat in (a, b):
        assert seat.machine.member
        assert seat.tell(e.GapSeen()) == []


def test_after_a_cut_a_newcomer_asks_again():
    seat = newcomer()
    shaken = arbiter.shaken(seat.machine.view, [A])
    assert sent(m.Ask, seat.tell(e.ViewSeen(shaken))) == [m.Ask(0)]


def test_a_missed_round_is_asked_for_and_missed_for_good_if_nobody_keeps_it():
    seat = newcomer()
    seat.tell(snapshot(), e.CaughtUp(), result(4, prev=b"chain4"))
    answers = seat.tell(result(5, prev=b"whatever came of it"))
    assert only(i.Send, answers) == [i.Send(A.incarnation, m.Want(4))]
    assert only(i.Stop, seat.tell(e.RoundGoneArrived(A.incarnation, 4)))


def test_results_lost_with_their_owner_are_missed_too():
    seat = newcomer()
    seat.tell(snapshot(), result(4, prev=b"chain4"))
    assert not only(i.Send, seat.tell(result(6, prev=b"?")))  # the others may just be late
    assert sent(m.Want, seat.tell(result(6, prev=b"?", cut=3))) == [m.Want(4)]


def test_a_follower_that_was_passed_over_starts_over():
    seat = newcomer()
    seat.tell(snapshot())
    later = ViewNumber(1, 9)
    assert not only(i.DropState, seat.tell(result(2)))
    assert only(i.DropState, seat.tell(result(2, generation=later, cut=9)))


def test_a_donor_serves_the_state_after_the_record_that_names_the_newcomer():
    seat, (view,) = founder(JOIN_C)
    seat.tell(view, e.AskArrived(C.incarnation, 7))
    answers = lone_round(seat)
    assert not sent(m.Snapshot, answers)
    (head,) = sent(m.Snapshot, confirm(seat))
    assert (head.number, head.applied, head.chain) == (7, 1, seat.machine.chain)
    assert not seat.machine.asks


def test_a_want_is_answered_while_the_result_is_kept():
    seat, _ = founder()
    lone_round(seat)
    confirm(seat)
    answers = seat.tell(e.WantArrived(C.incarnation, 0))
    assert [fill.cut for fill in sent(m.Fill, answers)] == [None] * PARTS
    answers = seat.tell(e.WantArrived(C.incarnation, 5))
    assert sent(m.RoundGone, answers) == [m.RoundGone(5)]


def test_who_is_not_in_the_view_is_excluded():
    seat = newcomer()
    out = arbiter.removed(seat.machine.view, [C])
    (stop,) = seat.tell(e.ViewSeen(out))
    assert stop.reason is i.StopReason.EXCLUDED


def test_a_newcomer_has_nothing_to_do_in_a_run_that_is_over():
    seat = newcomer()
    over = arbiter.resigned(seat.machine.view, A, finished=True)
    assert only(i.Stop, seat.tell(e.ViewSeen(over)))[0].reason is i.StopReason.OVER


def test_a_newcomer_that_leaves_just_goes():
    answers = newcomer().tell(e.LeaveAsked())
    assert only(i.Stop, answers)[0].reason is i.StopReason.LEFT


def test_a_leaver_goes_when_a_record_that_knew_leaves_it_out():
    a, b = pair()
    leaving = arbiter.leaving(a.machine.view, B)
    for seat in (a, b):
        seat.tell(e.ViewSeen(leaving))
        seat.tell(e.Computed(1, seat.machine.claims))
    parts = {part.k: part for part in sent(m.Part, b.said) if part.round == 1}
    a.tell(e.PartArrived(B.incarnation, parts[0]))
    b.tell(*(e.PartArrived(A.incarnation, p) for p in sent(m.Part, a.said) if p.round == p.k == 1))
    first = next(h for h in sent(m.Sum, a.said) if (h.round, h.k) == (1, 0))
    second = next(h for h in sent(m.Sum, b.said) if (h.round, h.k) == (1, 1))
    a.tell(e.SumArrived(B.incarnation, second, b"digest of 1"))
    answers = b.tell(e.SumArrived(A.incarnation, first, b"digest of 0"))
    assert only(i.Commit, answers)
    assert not only(i.Stop, answers)  # that round is not stable yet
    lone_round(a)
    for head in sent(m.Sum, a.said)[-PARTS:]:
        b.tell(e.SumArrived(A.incarnation, head, b"digest of %d" % head.k))
    assert i.Tell(Gone(b.machine.cut)) in b.said
    assert only(i.Stop, b.said)[0].reason is i.StopReason.LEFT


def test_a_new_era_is_told_again_what_was_asked_for():
    seat = newcomer()
    seat.tell(snapshot(), e.CaughtUp(), result(4, prev=b"chain4"))
    seat.tell(e.LeaveAsked())
    view = seat.machine.view
    again = seat.tell(e.ViewSeen(arbiter.returned(view, 2, view.roster)))
    assert [said.word for said in only(i.Tell, again)] == [Ready(), Leaving()]


def test_a_run_that_lost_its_state_goes_on_from_a_checkpoint_as_a_new_generation():
    *_, back = views(JOIN_A, READY_A, (arbiter.removed, [A]), JOIN_B)
    assert back.view.founder is None
    seat = Seat(B)
    answers = seat.tell(e.StateOffered(7, b"saved", record()), back)
    assert i.Tell(Ready()) in answers
    active = arbiter.ready(back.view, B)
    answers = seat.tell(e.ViewSeen(active))
    assert only(i.Generation, answers) == [i.Generation(active.cut, 7, own=True)]
    assert seat.machine.member


SAVED = m.Record(b"", ViewNumber(1, 90), ViewNumber(1, 80), (), closing=True, sync=3)


def test_a_new_run_may_start_from_the_last_state_of_another():
    """Whose views had other numbers, and whose peers had all wanted to leave."""
    joined, ready, both, second, *_ = views(JOIN_A, READY_A, JOIN_B, READY_B)
    a, b = Seat(A), Seat(B)
    for seat in (a, b):
        seat.tell(e.StateOffered(7, b"saved", SAVED))
    assert only(i.Compute, a.tell(joined, ready, both)) == [i.Compute(7, WHOLE)]
    b.tell(both)
    lone_round(a)
    (commit,) = only(i.Commit, confirm(a))
    record = commit.record
    assert (commit.round, record.generation, record.closing, record.sync) == (7, NO_VIEW, False, 3)
    # B was there with the same state. It takes over before it could commit the round itself.
    heads = {head.k: head for head in sent(m.Sum, a.said)}
    b.tell(*(e.SumArrived(A.incarnation, heads[k], b"digest") for k in range(PARTS)))
    assert i.Tell(Ready()) in b.said
    machine = b.machine
    assert (machine.generation, machine.record.closing) == (NO_VIEW, False)
    b.machine.book.drop_sums(lambda key: False)  # as if one of them had not come
    b.tell(second, e.ViewSeen(arbiter.removed(second.view, [A])))
    answers = b.tell(e.Computed(7, WHOLE), e.LeaseConfirmed(7, machine.tag))
    assert [commit.round for commit in only(i.Commit, answers)] == [7]


def test_a_state_after_some_rounds_comes_with_its_record():
    with pytest.raises(UsageError, match=r"after 7 rounds.*\n.*Committed.record"):
        Seat(A).tell(e.StateOffered(7, b"saved"))


# -- one form --------------------------------------------------------------------------------


def with_form(seat, form):
    seat.machine.course = replace(seat.machine.course, form=form)
    return seat


def test_a_newcomer_of_another_form_stops_before_it_takes_part():
    seat = with_form(newcomer(), "three tensors")
    record = m.Record(b"", ViewNumber(1, 2), NO_VIEW, (), form="two tensors")
    told, stop = seat.tell(e.RecordSeen(record))
    assert isinstance(told.word, Resign)
    assert stop.reason is i.StopReason.MISFIT
    assert "the run has two tensors" in stop.text
    assert "this peer has three tensors" in stop.text
    assert "wire=" in stop.text


def test_one_of_the_same_form_goes_on():
    seat = with_form(newcomer(), "two tensors")
    record = m.Record(b"", ViewNumber(1, 2), NO_VIEW, (), form="two tensors")
    assert seat.tell(e.RecordSeen(record)) == []


def test_late_words_of_others_do_not_stop_a_member():
    a, b = pair()
    record = m.Record(b"", ViewNumber(1, 2), NO_VIEW, (), form="three tensors")
    for seat in (a, b):
        assert seat.tell(e.RecordSeen(record)) == []


def test_the_record_tells_the_form():
    seat, _ = founder()
    with_form(seat, "two tensors")
    lone_round(seat)
    (commit,) = only(i.Commit, confirm(seat))
    assert commit.record.form == "two tensors"


def test_what_cannot_be_is_an_error():
    with pytest.raises(UsageError):
        Course(num_parts=0, num_samples=lambda _: 1)
    with pytest.raises(UsageError):
        Course(num_parts=1, num_samples=lambda _: 1, num_rounds=0)
    with pytest.raises(UsageError):
        Seat(A).tell(e.SpeedMeasured(0))
    seat, _ = founder()
    with pytest.raises(UsageError):
        seat.tell(e.StateOffered(0, b"seed"))


# -- messages --------------------------------------------------------------------------------

_TAG, _CUT = m.Tag(ViewNumber(1, 5), 2), ViewNumber(1, 5)
_SHARES = (m.Share(7, Ranges.of((0, 4))), m.Share(8))
_RECORD = m.Record(
    b"c" * 32, _CUT, NO_VIEW, _SHARES, WHOLE, True, (m.Newcomer(9, 1),), (3, 4), 1, "f"
)
_SUM = m.Sum(3, _TAG, 0, _SHARES, Ranges.of((1, 2)), _RECORD, 6.0, 2.5, b"notes")
MESSAGES = [
    m.Part(3, _TAG, 0, WHOLE, 6.0, m.SelfReport(5, (m.Newcomer(9, 1),), b"f", b"s", b"x", b"u")),
    m.Part(3, _TAG, 1, EMPTY),
    _SUM,
    m.Status(_CUT, 3, b"c", b"p", NO_VIEW, _TAG, b"\x05", EMPTY, m.NO_TAG, True, WHOLE, EMPTY, 5),
    m.Fill(_CUT, _SUM),
    m.Fill(None, _SUM),
    m.Ask(1),
    m.Snapshot(1, 4, b"c", _RECORD),
    m.Want(3),
    m.RoundGone(3),
    m.Taken(_CUT, 5),
]


def test_there_is_one_of_every_message():
    assert {type(message) for message in MESSAGES} == set(m.Message.__subclasses__())


def test_which_messages_bring_a_record():
    bring = {type(message) for message in MESSAGES if m.record_of(message) is not None}
    assert bring == {m.Sum, m.Fill, m.Snapshot}


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_the_wire(message):
    assert m.decode(m.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        m.Part(-1, _TAG, 1, EMPTY),
        m.Part(1, m.Tag(_CUT, -1), 1, EMPTY),
        m.Part(1, _TAG, m.MAX_PARTS, EMPTY),
        m.Part(1, _TAG, 1, EMPTY, weight=float("nan")),
        m.Part(1, _TAG, 1, EMPTY, weight=-1.0),
        m.Part(1, _TAG, 0, EMPTY, report=m.SelfReport(-1)),
        m.Sum(1, _TAG, 1, (m.Share(0),)),
        m.Ask(-1),
    ],
)
def test_values_out_of_range_are_malformed(message):
    with pytest.raises(Malformed):
        m.decode(m.encode(message))


def test_only_part_0_has_a_report_and_a_record():
    for wrong in (
        lambda: m.Part(1, _TAG, 0, EMPTY),
        lambda: m.Part(1, _TAG, 1, EMPTY, report=m.SelfReport(1)),
        lambda: m.Sum(1, _TAG, 0, ()),
        lambda: m.Sum(1, _TAG, 1, (), record=_RECORD),
    ):
        with pytest.raises(ValueError, match="part 0"):
            wrong()


def test_a_message_fits_into_a_link_or_is_refused():
    many = tuple(m.Share((1 << 62) + n, Ranges.of((n, n + 1))) for n in range(400))
    full = m.Record(b"c" * 64, _CUT, _CUT, many, speeds=(m.MAX_SPEED,) * 400)
    assert len(m.encode(m.Sum(1, _TAG, 0, many, record=full))) < MESSAGE_BYTES
    torn = Ranges.of(*((n, n + 1) for n in range(0, 2000, 2)))
    with pytest.raises(Oversized):
        m.encode(m.Sum(1, _TAG, 1, tuple(m.Share(n + 1, torn) for n in range(20))))
    with pytest.raises(Malformed):
        m.decode(bytes(MESSAGE_BYTES + 1))


def test_hostile_bytes_are_malformed_and_nothing_else():
    dice = random.Random(5)
    good = [m.encode(message) for message in MESSAGES]
    outcomes = {True: 0, False: 0}
    for _ in range(20_000):
        data = bytearray(dice.choice(good))
        for _ in range(dice.randint(1, 4)):
            at = dice.randrange(len(data))
            match dice.randrange(4):
                case 0:
                    data[at] = dice.randrange(256)
                case 1:
                    del data[at:]
                case 2:
                    data[at:at] = dice.randbytes(dice.randint(1, 9))
                case _:
                    data[at] ^= 1 << dice.randrange(8)
            if not data:
                break
        try:
            m.decode(bytes(data))
            outcomes[True] += 1
        except Malformed:
            outcomes[False] += 1
    assert min(outcomes.values()) > 100
    for deep in (b"\x91" * 30_000, b"", b"\xc1", b"\x92\x01" * 20_000):
        with pytest.raises(Malformed):
            m.decode(deep)
