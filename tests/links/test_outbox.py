"""What a room still has to say to one peer."""

from __future__ import annotations

import threading

import pytest

from manyhands.links.messages import BeatBack, Data, Dismissal, Ready
from manyhands.links.outbox import Budget, Outbox
from manyhands.links.room import Frame


def data(seq: int, size: int = 0, message: bytes = b"") -> Frame:
    frame = Frame(Data(1, None, seq, (size,), message), memoryview(bytes(size)))
    assert frame.cost == 128 + len(message) + size
    return frame


def taken(outbox: Outbox, count: int) -> list:
    """What leaves next: sequence numbers, or names of other frames."""
    headers = [outbox.take()[0].header for _ in range(count)]
    return [h.seq if isinstance(h, Data) else type(h).__name__ for h in headers]


@pytest.fixture
def outbox():
    opened = Outbox(10_000)
    assert opened.resume("first", 0)
    return opened


def test_frames_leave_in_order_and_beats_first(outbox):
    outbox.put(data(1))
    outbox.put(data(2))
    outbox.put_now(BeatBack(1))
    assert taken(outbox, 3) == ["BeatBack", 1, 2]


def test_a_new_connection_goes_on_after_what_the_peer_holds(outbox):
    for seq in range(1, 6):
        outbox.put(data(seq))
    assert taken(outbox, 4) == [1, 2, 3, 4]
    outbox.put_now(BeatBack(1))  # of the old connection
    assert outbox.resume("second", 2, Ready())
    frame, via, _ = outbox.take()
    assert (frame.header, via) == (Ready(), "second")
    assert taken(outbox, 3) == [3, 4, 5]
    assert outbox.resume("third", 2)
    assert taken(outbox, 3) == [3, 4, 5]


def test_what_is_acknowledged_cannot_be_resumed(outbox):
    for seq in range(1, 4):
        outbox.put(data(seq))
    taken(outbox, 3)
    outbox.acked(2)
    assert not outbox.resume("second", 1)
    assert not outbox.resume("second", 4), "more than was ever sent"
    assert outbox.resume("second", 3)
    outbox.put(data(4))
    assert taken(outbox, 1) == [4]


def test_a_broken_connection_is_not_used_and_only_the_newest_can_break(outbox):
    outbox.put(data(1))
    assert outbox.resume("second", 0)
    assert not outbox.pause("first")
    assert outbox.pause("second")
    got: list = []
    thread = threading.Thread(target=lambda: got.append(outbox.take()))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    outbox.resume("third", 0)
    thread.join(30)
    assert got[0][1] == "third"


def test_the_end_drops_all_but_the_last_word(outbox):
    outbox.put(data(1))
    outbox.put_now(BeatBack(1))
    outbox.end(Dismissal("why"))
    outbox.end()
    outbox.put(data(2))
    outbox.put_now(BeatBack(2))
    assert taken(outbox, 1) == ["Dismissal"]
    assert outbox.take() is None


def test_the_end_wakes_the_taker_of_a_broken_connection():
    outbox = Outbox(100)
    got: list = []
    thread = threading.Thread(target=lambda: got.append(outbox.take()))
    thread.start()
    outbox.end(Dismissal("why"))
    thread.join(30)
    assert got == [None]


class TestGaps:
    def test_a_peer_that_is_behind_misses_fan_outs_and_is_told_once(self, outbox):
        for seq in range(1, 8):
            outbox.put(data(seq, 3000), droppable=True)
        outbox.put(data(100))  # not a fan-out: never dropped
        assert taken(outbox, 5) == [1, 2, 3, "Gap", 100]
        assert outbox.num_gaps == 1

    def test_a_loss_after_a_gap_that_may_have_been_read_is_told_again(self, outbox):
        for seq in range(1, 5):
            outbox.put(data(seq, 3000), droppable=True)
        assert taken(outbox, 4) == [1, 2, 3, "Gap"]
        outbox.put(data(5, 3000), droppable=True)
        outbox.put(data(6, 3000), droppable=True)
        assert taken(outbox, 1) == ["Gap"]
        assert outbox.num_gaps == 2
        outbox.put(data(7, 3000), droppable=True)
        outbox.put(Frame(Ready()))
        outbox.put(data(8, 3000), droppable=True)
        assert taken(outbox, 3) == ["Gap", "Ready", "Gap"]
        assert outbox.num_gaps == 4

    def test_a_peer_that_has_read_gets_all_again(self, outbox):
        for seq in range(1, 5):
            outbox.put(data(seq, 3000), droppable=True)
        outbox.consumed(3 * 3128)
        outbox.consumed(5)  # old news
        outbox.put(data(5, 3000), droppable=True)
        assert taken(outbox, 5) == [1, 2, 3, "Gap", 5]

    def test_messages_without_buffers_count_too(self, outbox):
        for seq in range(1, 5):
            outbox.put(data(seq, message=b"x" * 4000), droppable=True)
        assert taken(outbox, 3) == [1, 2, "Gap"]

    def test_a_gap_survives_a_reconnect(self, outbox):
        for seq in range(1, 5):
            outbox.put(data(seq, 3000), droppable=True)
        taken(outbox, 4)
        assert outbox.resume("second", 2)
        assert taken(outbox, 2) == [3, "Gap"]


class TestBudget:
    def test_what_waits_counts_until_it_leaves(self):
        budget = Budget(1000)
        outbox: Outbox[str] = Outbox(1 << 20, budget)
        outbox.resume("first", 0)
        outbox.put(data(1, 2000))
        assert _blocks(budget)
        outbox.take()
        assert not _blocks(budget)
        outbox.resume("second", 0)  # it waits again
        assert _blocks(budget)
        outbox.end()
        assert not _blocks(budget)

    def test_it_wakes_who_waits(self):
        budget = Budget(1000)
        budget.add(2000)
        woken = threading.Thread(target=lambda: budget.wait(lambda: False))
        woken.start()
        budget.add(-1500)
        woken.join(30)
        assert not woken.is_alive()

    def test_a_waiter_can_give_up(self):
        budget = Budget(1000)
        budget.add(2000)
        stop = threading.Event()
        waiter = threading.Thread(target=lambda: budget.wait(stop.is_set))
        waiter.start()
        budget.wake()
        waiter.join(0.05)
        assert waiter.is_alive()
        stop.set()
        budget.wake()
        waiter.join(30)
        assert not waiter.is_alive()


def _blocks(budget: Budget) -> bool:
    """Whether a reader would have to wait now."""
    asked: list[bool] = []
    budget.wait(lambda: asked.append(True) or True)
    return bool(asked)


# -- sending without waiting -----------------------------------------------------------------------


def test_there_is_one_sender_at_a_time(outbox):
    outbox.put(data(1), wake=False)
    outbox.put(data(2), wake=False)
    pushed = outbox.take_now()
    assert pushed.frame.header.seq == 1
    assert outbox.take_now() is None
    got: list = []
    thread = threading.Thread(target=lambda: got.append(outbox.take()))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive(), "two frames would be written into each other"
    outbox.sent()
    outbox.wake()
    thread.join(30)
    assert got[0].frame.header.seq == 2
    assert outbox.take_now() is None, "it is being written"
    outbox.put(data(3))
    assert outbox.take_now() is None
    assert taken(outbox, 1) == [3]  # who takes again has sent the one before


def test_the_rest_of_a_frame_goes_before_anything_else(outbox):
    outbox.put(data(1))
    pushed = outbox.take_now()
    outbox.put_now(BeatBack(1))
    outbox.leave(pushed, [b"rest"])
    assert outbox.take_now() is None
    assert outbox.take() == (pushed.frame, "first", [b"rest"])
    assert taken(outbox, 1) == ["BeatBack"]


def test_a_rest_is_not_sent_by_another_connection(outbox):
    outbox.put(data(1))
    late = outbox.take_now()
    assert outbox.resume("second", 0)
    outbox.leave(late, [b"rest"])
    pushed = outbox.take_now()
    assert pushed == (late.frame, "second", None)  # the whole frame, again
    outbox.leave(pushed, [b"rest"])
    assert outbox.pause("second")
    assert outbox.resume("third", 0)
    assert outbox.take() == (late.frame, "third", None)


def test_the_last_word_does_not_cut_a_frame_in_two(outbox):
    outbox.put(data(1))
    pushed = outbox.take_now()
    outbox.end(Dismissal("why"))
    got: list = []
    thread = threading.Thread(target=lambda: got.append(outbox.take()))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    outbox.leave(pushed, [b"rest"])
    thread.join(30)
    assert got[0].rest == [b"rest"]
    assert taken(outbox, 1) == ["Dismissal"]
    assert outbox.take() is None


def test_the_end_waits_for_who_is_sending():
    outbox: Outbox[str] = Outbox(100)
    outbox.resume("first", 0)
    outbox.put(data(1))
    outbox.take_now()
    outbox.end()
    got: list = []
    thread = threading.Thread(target=lambda: got.append(outbox.take()))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    outbox.sent()
    thread.join(30)
    assert got == [None]
