"""What becomes of a round at a cut, case by case."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from manyhands.collectives.messages import NO_TAG, Record, Share, Status, Tag
from manyhands.collectives.ranges import EMPTY, Ranges
from manyhands.collectives.verdict import decide, settle
from manyhands.core.peers import NO_VIEW, ViewNumber

CUT = ViewNumber(1, 8)
TAG = Tag(ViewNumber(1, 5), 0)
PARTS = 3
ALL = 0b111


def status(applied=4, held=0, **fields):
    plain = Status(
        cut=CUT,
        applied=applied,
        chain=b"chain%d" % applied,
        previous=b"chain%d" % (applied - 1),
        generation=NO_VIEW,
        newest=TAG if held else NO_TAG,
        held=bytes([held]),
        refused=EMPTY,
        kept=NO_TAG,
        member=True,
        claims=EMPTY,
        quarantine=EMPTY,
        speed=1,
    )
    return msgspec.structs.replace(plain, **fields)


def test_a_round_stands_if_all_parts_are_held_somewhere():
    verdict = decide({1: status(held=0b011), 2: status(held=0b110), 3: status()}, PARTS)
    assert (verdict.stands, verdict.target, verdict.stay) == (True, 5, (1, 2, 3))
    assert verdict.attempt == TAG
    # Of the holders of part k, the k-th fills it in.
    assert verdict.fillers == {0: 1, 1: 2, 2: 2}


def test_it_does_not_if_one_part_is_missing_or_something_was_refused():
    bad = Ranges.of((1, 2))
    assert not decide({1: status(held=0b011), 2: status(held=0b001)}, PARTS).stands
    refusing = {1: status(held=ALL, refused=bad), 2: status(quarantine=Ranges.of((4, 5)))}
    verdict = decide(refusing, PARTS)
    assert (verdict.stands, verdict.target) == (False, 4)
    assert verdict.quarantine == Ranges.of((1, 2), (4, 5))
    assert not verdict.fillers


def test_parts_of_an_older_attempt_do_not_count():
    newer = Tag(TAG.cut, 1)
    verdict = decide({1: status(held=ALL), 2: status(held=0b001, newest=newer)}, PARTS)
    assert not verdict.stands


def test_who_is_one_round_behind_is_filled_in_from_the_kept_result():
    kept = {1: status(kept=TAG), 2: status(applied=3), 3: status(kept=TAG), 4: status()}
    verdict = decide(kept, PARTS)
    assert (verdict.target, verdict.stay, verdict.sent_back) == (4, (1, 2, 3, 4), ())
    assert verdict.attempt == TAG
    assert verdict.fillers == {0: 1, 1: 3, 2: 1}


def test_who_cannot_be_filled_in_is_sent_back():
    nobody_keeps = decide({1: status(), 2: status(applied=3)}, PARTS)
    other_history = decide({1: status(kept=TAG), 2: status(applied=3, chain=b"other")}, PARTS)
    stands = decide({1: status(held=ALL), 2: status(applied=3)}, PARTS)
    too_far = decide({1: status(kept=TAG), 2: status(applied=2)}, PARTS)
    for verdict in (nobody_keeps, other_history, stands, too_far):
        assert verdict.sent_back == (2,)


def test_of_two_chains_that_of_a_member_counts():
    verdict = decide({1: status(chain=b"foreign", member=False), 2: status()}, PARTS)
    assert (verdict.stay, verdict.sent_back) == ((2,), (1,))


def test_a_history_from_before_a_take_over_is_not_ahead():
    statuses = {1: status(applied=9, member=False), 2: status(generation=ViewNumber(1, 4))}
    verdict = decide(statuses, PARTS)
    assert (verdict.target, verdict.stay, verdict.sent_back) == (4, (2,), (1,))
    assert verdict.generation == ViewNumber(1, 4)


def settled(statuses, *, active, shares=(), count=12):
    record = Record(b"", NO_VIEW, NO_VIEW, tuple(Share(p, Ranges.of(r)) for p, r in shares))
    whole = Ranges.whole(count)
    return settle(decide(statuses, PARTS), statuses, record, active, whole)


def test_claims_stay_and_only_the_rest_is_shared_out():
    statuses = {
        1: status(claims=Ranges.of((0, 4))),
        2: status(claims=Ranges.of((4, 6)), speed=2),
        3: status(claims=Ranges.of((6, 7))),
    }
    found = settled(statuses, active={1, 2})  # 3 is leaving: what it had is redone
    assert found.members == (1, 2)
    assert found.inherited
    assert found.claims_of(1) == Ranges.of((0, 4), (6, 8))
    assert found.claims_of(2) == Ranges.of((4, 6), (8, 12))
    assert found.claims_of(3) == EMPTY


def test_after_a_round_that_stood_the_record_says_who_computes_what():
    statuses = {1: status(held=ALL), 2: status(), 3: status(member=False)}
    shares = ((1, (0, 4)), (2, (4, 8)), (9, (8, 12)))
    found = settled(statuses, active={1, 2, 3}, shares=shares)
    assert found.members == (1, 2, 3)
    # What peer 9 had, which is gone, is shared out over all of them.
    assert found.claims_of(1) == Ranges.of((0, 4), (8, 10))
    assert found.claims_of(2) == Ranges.of((4, 8), (10, 11))
    assert found.claims_of(3) == Ranges.of((11, 12))


def test_followers_alone_begin_a_new_generation():
    assert not settled({1: status(member=False)}, active={1}).inherited
    assert settled({1: status(member=False)}, active=set()).members == ()


@given(st.data())
def test_claims_and_quarantine_always_partition_the_round(data):
    owners = data.draw(st.lists(st.integers(0, 5), min_size=12, max_size=12))
    bad = {i for i, owner in enumerate(owners) if owner == 5}
    quarantine = Ranges.of(*((i, i + 1) for i in bad))
    statuses = {
        p: status(
            claims=Ranges.of(*((i, i + 1) for i, owner in enumerate(owners) if owner == p)),
            quarantine=quarantine,
            speed=data.draw(st.integers(1, 9)),
        )
        for p in (1, 2, 3)
    }
    found = settled(statuses, active={1, 3})
    everything = [p for share in found.claims for p in share.ranges] + sorted(bad)
    assert sorted(everything) == list(range(12))
    for p in found.members:
        assert not statuses[p].claims - found.claims_of(p)


# -- deaths --------------------------------------------------------------------------------------

ROUND = Ranges.whole(6)
CUTS = [Tag(ViewNumber(1, n), 0) for n in (5, 6, 7, 8)]


def deaths(claims, losses=(), begun=CUTS[0], **fields):
    """What the survivors settle on, who have these claims and know of these losses."""
    statuses = {
        p: status(claims=Ranges.of(span), losses=losses, begun=begun, **fields)
        for p, span in claims.items()
    }
    verdict = decide(statuses, PARTS)
    record = Record(b"", NO_VIEW, NO_VIEW, ())
    return settle(verdict, statuses, record, tuple(claims), ROUND)


def test_the_third_death_over_a_sample_is_one_too_many():
    first = deaths({1: (0, 2), 2: (2, 4)})
    assert (first.losses, first.deadly) == ((Ranges.of((4, 6)), EMPTY), EMPTY)
    # 2 has taken on 5, and dies with it.
    second = deaths({1: (0, 2), 3: (4, 5)}, first.losses)
    assert second.losses == (Ranges.of((2, 6)), Ranges.of((5, 6)))
    assert not second.deadly
    third = deaths({1: (0, 4)}, second.losses)
    assert third.deadly == Ranges.of((5, 6))


def test_one_that_answers_has_not_died():
    one, leaver = status(claims=Ranges.of((0, 2))), status(claims=Ranges.of((2, 6)))
    verdict = decide({1: one, 2: leaver}, PARTS)
    found = settle(verdict, {1: one, 2: leaver}, Record(b"", NO_VIEW, NO_VIEW, ()), (1,), ROUND)
    assert found.claims_of(1) == ROUND
    assert found.losses == (EMPTY, EMPTY)


def test_one_that_has_not_heard_of_its_claim_has_not_died():
    told = status(claims=Ranges.of((0, 3)), begun=CUTS[1])
    untold = status(claims=EMPTY, begun=CUTS[0])
    verdict = decide({1: told, 2: untold}, PARTS)
    found = settle(verdict, {1: told, 2: untold}, Record(b"", NO_VIEW, NO_VIEW, ()), (1, 2), ROUND)
    assert found.losses == (EMPTY, EMPTY)


def test_one_that_just_follows_has_been_given_nothing():
    """It came after the last cut, which the members had no time to settle: somebody had died."""
    member = status(claims=Ranges.of((0, 3)), begun=CUTS[0])
    for applied in (3, 4):
        follower = status(applied, member=False, begun=CUTS[1])
        statuses = {1: msgspec.structs.replace(member, kept=TAG), 2: follower}
        verdict = decide(statuses, PARTS)
        assert verdict.stay == (1, 2)
        found = settle(verdict, statuses, Record(b"", NO_VIEW, NO_VIEW, ()), (1, 2), ROUND)
        assert found.losses == (Ranges.of((3, 6)), EMPTY)


def test_one_that_leaves_may_have_settled_what_the_others_have_not_heard_of():
    for left_by_then in (True, False):
        leaver = status(member=not left_by_then, begun=CUTS[1])
        statuses = {1: status(claims=Ranges.of((0, 3)), begun=CUTS[0]), 2: leaver}
        verdict = decide(statuses, PARTS)
        found = settle(verdict, statuses, Record(b"", NO_VIEW, NO_VIEW, ()), (1,), ROUND)
        assert found.losses == (EMPTY, EMPTY)


# -- claims that have moved ----------------------------------------------------------------------


def test_what_was_refused_stays_with_whom_it_has_moved_to():
    refused = Ranges.of((0, 3))
    told = status(claims=ROUND, doubted=refused)
    untold = status(held=0b001, claims=refused, refused=refused)
    statuses = {1: told, 2: untold}
    verdict = decide(statuses, PARTS)
    assert verdict.refused == verdict.doubted == refused
    assert not verdict.quarantine
    found = settle(verdict, statuses, Record(b"", NO_VIEW, NO_VIEW, ()), (1, 2), ROUND)
    assert (found.claims_of(1), found.claims_of(2)) == (ROUND, EMPTY)


def test_whoever_was_to_give_in_a_resync_has_died():
    """The next anchor does, the first of the roster if there is none; no sample has killed."""
    one = Ranges.whole(1)
    record = Record(b"", NO_VIEW, NO_VIEW, (), anchors=(9, 5, 1), resync=True, num_resyncs=1)
    for alive, chosen in (((1, 5, 7), 5), ((1, 7), 1), ((3, 7), 3)):
        statuses = {peer: status(speed=peer) for peer in alive}
        verdict = decide(statuses, PARTS)
        found = settle(verdict, statuses, record, alive, one)
        assert {share.peer: share.ranges for share in found.claims if share.ranges} == {chosen: one}
        assert not any(found.losses)


def test_whoever_has_its_claim_still_gives_in_a_resync():
    record = Record(b"", NO_VIEW, NO_VIEW, (), anchors=(1,), resync=True, num_resyncs=1)
    statuses = {1: status(), 2: status(claims=Ranges.whole(1))}
    found = settle(decide(statuses, PARTS), statuses, record, (1, 2), Ranges.whole(1))
    assert found.claims_of(2) == Ranges.whole(1)
    assert found.claims_of(1) == EMPTY
