"""Leases, alone: the time is a parameter."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from manyhands.links.lease import HeldLease, LeaseBook


class TestHeldLease:
    def test_it_counts_from_the_sending_of_the_beat_that_was_answered(self):
        lease = HeldLease(10.0)
        assert lease.left_s(0.0) == 0.0
        lease.sent(1, 100.0)
        lease.sent(2, 101.0)
        assert lease.left_s(101.0) == 0.0
        lease.answered(1)
        assert lease.start_s == 100.0
        assert lease.left_s(104.0) == 6.0
        assert lease.left_s(110.0) == 0.0
        lease.answered(2)
        assert lease.start_s == 101.0

    def test_an_answer_covers_the_beats_before_it(self):
        lease = HeldLease(10.0)
        for n in range(1, 6):
            lease.sent(n, float(n))
        lease.answered(4)
        assert lease.start_s == 4.0
        lease.answered(2)
        assert lease.start_s == 4.0
        lease.answered(5)
        assert lease.start_s == 5.0

    def test_other_frames_renew_it_too_but_never_backwards(self):
        lease = HeldLease(10.0)
        lease.renew(7.0)
        lease.renew(3.0)
        assert lease.start_s == 7.0

    def test_an_ended_lease_is_over(self):
        lease = HeldLease(10.0)
        lease.sent(1, 5.0)
        lease.end()
        lease.answered(1)
        assert lease.left_s(5.0) == 0.0


def judged(book: LeaseBook, start_s: float, end_s: float) -> dict[int, str]:
    """Ticks as a hub does; the first judgement that is not empty."""
    now = start_s
    while now < end_s:
        now += book.tick_s
        if out := book.expired(now):
            return out
    return {}


class TestLeaseBook:
    def test_silence_for_longer_than_the_lease(self):
        book = LeaseBook(10.0, 1.0)
        book.heard(1, 0.0)
        book.heard(2, 5.0)
        assert judged(book, 0.0, 9.9) == {}
        assert list(judged(book, 9.9, 11.0)) == [1]

    def test_a_closed_connection_has_the_grace_only(self):
        book = LeaseBook(10.0, 1.0)
        book.heard(1, 0.0)
        book.heard(2, 0.0)
        book.closed(1, 0.5)
        assert judged(book, 0.0, 1.4) == {}
        assert list(judged(book, 1.4, 2.0)) == [1]

    def test_news_from_before_the_end_does_not_undo_it(self):
        """A hub learns of the last byte and of the end at the same time, and tells both."""
        book = LeaseBook(10.0, 1.0)
        book.heard(1, 0.0)
        book.closed(1, 0.5)
        book.heard(1, 0.4)
        book.heard(1, 0.5)
        assert list(judged(book, 0.5, 3.0)) == [1]

    def test_a_peer_that_is_heard_again_is_back(self):
        book = LeaseBook(10.0, 1.0)
        book.heard(1, 0.0)
        book.closed(1, 0.5)
        book.heard(1, 0.6)
        assert judged(book, 0.6, 9.0) == {}
        book.closed(1, 9.0)
        book.closed(1, 9.5)  # the first end counts
        assert list(judged(book, 9.0, 10.3)) == [1]

    def test_a_pause_of_the_arbiter_is_nobodys_silence(self):
        book = LeaseBook(10.0, 1.0)
        book.heard(1, 0.0)
        book.heard(2, 0.0)
        book.closed(2, 0.0)
        assert book.expired(0.2) == {}
        assert book.expired(100.0) == {}
        assert list(judged(book, 100.0, 101.5)) == [2]
        book.forget(2)
        assert judged(book, 101.4, 109.5) == {}
        assert list(judged(book, 109.9, 111.0)) == [1]

    def test_the_forgotten_are_not_judged(self):
        book = LeaseBook(10.0, 1.0)
        book.heard(1, 0.0)
        book.closed(1, 0.0)
        book.forget(1)
        book.closed(1, 0.0)  # a late word from its connection
        assert judged(book, 0.0, 30.0) == {}

    @given(
        st.lists(st.floats(0.0, 3.0), min_size=1, max_size=20),
        st.lists(st.floats(0.0, 2.0), min_size=20, max_size=20),
    )
    def test_a_peers_own_lease_ends_first(self, pauses, delays):
        """Whatever the beats' delays: when the arbiter lets others go on, the peer has stopped."""
        lease, book = HeldLease(10.0), LeaseBook(10.0, 1.0)
        now, arrived = 0.0, 0.0
        for n, (pause, delay) in enumerate(zip(pauses, delays, strict=False), 1):
            now += pause
            lease.sent(n, now)
            arrived = max(arrived, now + delay)  # in order
            book.heard(1, arrived)
            lease.answered(n)
        end = arrived
        while not book.expired(end):
            end += book.tick_s
        assert lease.left_s(end) == 0.0
