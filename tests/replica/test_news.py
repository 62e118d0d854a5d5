"""What peers tell comes to all of them, once and in order, however often a round is tried."""

from __future__ import annotations

import pytest

from manyhands.collectives.messages import NO_TAG, NOTES_BYTES, Part, SelfReport
from manyhands.collectives.ranges import Ranges
from manyhands.core.peers import PeerId
from manyhands.replica.news import MOST_WAITING, News, gather
from manyhands.replica.scalars import Scalars

UNITS = Ranges.of((0, 4))


def peers(*names):
    made = []
    for name in names:
        news = News()
        news.peer = name
        made.append(news)
    return made


def commit(*news):
    """A round of these, in roster order."""
    said = [bulletin for one in news if (bulletin := one.report()) is not None]
    taken = gather(said)
    for one in news:
        one.hear(taken)


def texts(news):
    return [(told.peer, told.item.text) for told in news.take()]


def test_all_hear_it_in_one_order():
    a, b, c = peers("a", "b", "c")
    c.tell("test", "first")
    a.tell("test", "second")
    commit(a, b, c)
    expected = [("a", "second"), ("c", "first")]  # as the roster is
    assert [texts(one) for one in (a, b, c)] == [expected] * 3
    commit(a, b, c)
    assert [texts(one) for one in (a, b, c)] == [[]] * 3
    assert a.waiting == []


def test_a_round_that_is_tried_again_loses_and_doubles_nothing():
    a, b = peers("a", "b")
    a.tell("test", "x")
    lost = gather([a.report()])  # its lead dies, and nobody hears of it
    assert lost
    assert [told.item.text for told in a.waiting] == ["x"]
    a.tell("test", "y")
    commit(a, b)
    b.hear(lost)  # of a round that came twice
    assert texts(a) == texts(b) == [("a", "x"), ("a", "y")]


def test_what_has_no_room_waits():
    news = peers(*"abcdef")
    for one in news:
        for number in range(6):
            one.tell("test", str(number))
    for _ in range(4):
        commit(*news)
    heard = texts(news[0])
    for one in news:
        mine = [text for peer, text in heard if peer == one.peer]
        assert mine == [str(number) for number in range(6)]
        assert one.waiting == []
    assert len(heard) == 36


def test_an_endless_queue_there_is_not(caplog):
    (a,) = peers("a")
    for number in range(MOST_WAITING + 5):
        a.tell("test", str(number))
    assert len(a.waiting) == MOST_WAITING
    assert sum("some are lost" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("text", ["x" * 1000, "é" * 1000, "\ud800"])
def test_what_is_too_long_is_cut(text):
    a, b = peers("a", "b")
    a.tell(text, text)
    commit(a, b)
    ((_, heard),) = texts(b)
    assert len(heard.encode()) <= 240


def test_with_the_scalars_of_a_round():
    scalars = Scalars()
    scalars.news.peer = "a"
    for number in range(5):
        scalars.news.tell("test", "x" * 240)
        scalars.give_word(f"{'w' * 60}{number}", 1.0)
    scalars.begin_pass(0)
    report = scalars.report(0, SelfReport(0))
    assert len(report.scalars) < NOTES_BYTES
    scalars.committed(0, scalars.note([Part(0, NO_TAG, 0, UNITS, report=report)]), 0)
    assert len(scalars.news.take()) == 4
    assert len(scalars.agreed) == 5
    # Without samples, and in a round that no loop knows of.
    report = scalars.report(3, SelfReport(0))
    scalars.pass_by(3, scalars.note([Part(3, NO_TAG, 0, UNITS, report=report)]))
    assert len(scalars.news.take()) == 1
    assert scalars.news.waiting == []


def test_scalars_go_before_news():
    scalars = Scalars()
    scalars.begin_pass(0)
    for number in range(64):
        name = f"{number:02}" + "é" * 31
        scalars.give_word(name, 0.1)
        scalars.say_after(name, 0.1, 0.3, closed=True)
        scalars.say_after(name, 0.1, 0.3, closed=False)
    for _ in range(4):
        scalars.news.tell("é" * 16, "é" * 120)
    report = scalars.report(0, SelfReport(0))
    assert len(report.scalars) <= NOTES_BYTES
    scalars.committed(0, scalars.note([Part(0, NO_TAG, 0, UNITS, report=report)]), 0)
    assert len(scalars.agreed) == 64
    assert len(scalars.news.waiting) == 4


def test_a_peer_may_have_the_longest_of_names():
    name = str(PeerId("n" * 100, 0x1F3A))
    scalars = Scalars()
    scalars.news.peer = name
    scalars.news.tell("test", "x")
    scalars.begin_pass(0)
    report = scalars.report(0, SelfReport(0))
    scalars.committed(0, scalars.note([Part(0, NO_TAG, 0, UNITS, report=report)]), 0)
    assert texts(scalars.news) == [(name, "x")]
