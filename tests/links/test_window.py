"""Credit windows and stream numbers, alone."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from manyhands.links.window import ReceiveWindows, SendWindows, StreamCheck


class TestSendWindows:
    def test_a_window_is_full_at_its_size_and_not_before(self):
        out = SendWindows(100)
        assert out.debit(1, [1], 99) == 1
        assert out.waiting_for([1, 2]) == []
        assert out.debit(1, [1], 500) == 2  # a message larger than the window goes, alone
        assert out.waiting_for([1, 2]) == [1]

    def test_credit_is_a_number_and_may_come_twice(self):
        out = SendWindows(100)
        for _ in range(4):
            out.debit(1, [1], 50)
        for _ in range(3):
            out.credit(1, 3, 0)
        assert out.waiting_for([1]) == []
        out.debit(1, [1], 50)
        assert out.waiting_for([1]) == [1]
        out.credit(1, 2, 0)  # an old one
        assert out.waiting_for([1]) == [1]
        out.credit(7, 1, 1)  # from somebody who was never sent to

    def test_fan_outs_and_direct_messages_share_a_window_not_numbers(self):
        out = SendWindows(100)
        assert out.debit(None, [1, 2], 60) == 1
        assert out.debit(1, [1], 60) == 1
        assert out.debit(2, [2], 10) == 1
        assert out.debit(None, [], 60) == 2
        assert out.waiting_for([1, 2]) == [1]
        out.credit(1, 0, 1)
        assert out.waiting_for([1]) == []

    def test_after_a_cut_nobody_waits(self):
        out = SendWindows(100)
        out.debit(1, [1], 200)
        out.reset()
        assert out.waiting_for([1]) == []
        assert out.debit(1, [1], 50) == 2, "the numbers go on"

    def test_the_gone_are_forgotten(self):
        out = SendWindows(100)
        out.debit(1, [1], 200)
        out.debit(2, [2], 200)
        out.forget({1})
        assert out.waiting_for([1, 2]) == [2]
        assert out.debit(2, [2], 1) == 2


class TestReceiveWindows:
    def test_credit_is_due_after_half_a_window(self):
        back = ReceiveWindows(100)
        assert back.take(1, fanout=False, seq=1, num_bytes=30) is None
        assert back.take(2, fanout=False, seq=1, num_bytes=30) is None
        assert back.take(1, fanout=True, seq=9, num_bytes=30) == (1, 9)
        assert back.take(1, fanout=False, seq=2, num_bytes=10) is None
        assert back.take(1, fanout=False, seq=3, num_bytes=40) == (3, 9)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 120)), max_size=60), st.integers(1, 100))
def test_two_who_use_it_never_get_stuck(messages, window):
    """When the reader has taken all, the sender may send; and what is under way is bounded."""
    out, back = SendWindows(window), ReceiveWindows(window)
    under_way: deque[tuple[bool, int, int]] = deque()

    def read_one() -> None:
        fanout, seq, size = under_way.popleft()
        credit = back.take(9, fanout=fanout, seq=seq, num_bytes=size)
        if credit is not None:
            out.credit(1, *credit)

    for fanout, size in messages:
        while out.waiting_for([1]):
            assert under_way, "the sender waits for a reader that has nothing left to read"
            read_one()
        assert sum(s for _, _, s in under_way) < window + 120
        under_way.append((fanout, out.debit(None if fanout else 1, [1], size), size))
    while under_way:
        read_one()
    assert out.waiting_for([1]) == []


def arrives(check: StreamCheck, sender: int, seq: int, *, fanout: bool = False) -> str:
    if not check.is_new(sender, fanout=fanout, seq=seq):
        return "double"
    return "hole" if check.arrived(sender, fanout=fanout, seq=seq) else "ok"


class TestStreamCheck:
    def test_direct_messages_start_at_one(self):
        check = StreamCheck()
        assert [arrives(check, 1, seq) for seq in (1, 2, 2, 1, 4, 5)] == [
            "ok", "ok", "double", "double", "hole", "ok",
        ]  # fmt: skip
        assert arrives(check, 2, 2) == "hole"

    def test_fan_outs_start_where_the_reader_came_in(self):
        check = StreamCheck()
        assert [arrives(check, 1, seq, fanout=True) for seq in (7, 8, 8, 10)] == [
            "ok", "ok", "double", "hole",
        ]  # fmt: skip
        assert arrives(check, 1, 1) == "ok", "another stream of the same sender"

    def test_a_known_loss_is_no_hole_and_a_double_stays_one(self):
        check = StreamCheck()
        arrives(check, 1, 1)
        arrives(check, 1, 5, fanout=True)
        check.forgive()
        assert arrives(check, 1, 1) == "double"
        assert arrives(check, 1, 4) == "ok"
        assert arrives(check, 1, 9, fanout=True) == "ok"
        assert arrives(check, 1, 6) == "hole", "forgiven once"

    def test_a_message_that_is_only_asked_about_has_not_arrived(self):
        check = StreamCheck()
        assert check.is_new(1, fanout=False, seq=1)
        assert check.is_new(1, fanout=False, seq=1), "the connection broke within it"

    def test_a_sender_that_no_view_has_shown_yet_is_not_forgotten(self):
        check = StreamCheck()
        arrives(check, 1, 1)
        check.forget({2})
        assert arrives(check, 1, 2) == "ok"
        check.forget({1})
        assert arrives(check, 1, 1) == "ok"
