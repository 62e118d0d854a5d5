"""The courier: urgent letters first, nothing lost, nothing waited for at the end."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import pytest

from manyhands.collectives.courier import Courier, Letter
from manyhands.core.errors import LinkBroken, LinkTimeout, ManyhandsError, PeerGone
from manyhands.core.peers import PeerId

PATIENCE_S = 10.0
OTHER = PeerId("other", 9)


class SlowLink:
    """Writes down what is sent; can be made to wait, or to fail."""

    me = PeerId("me", 1)

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.flushed: list[int] = []
        self.open = threading.Event()
        self.open.set()
        self.begun = threading.Event()
        self.deaf: set[PeerId] = set()  # they take nothing
        self.errors: dict[bytes, Exception] = {}

    def send(self, to, message, buffers=(), *, timeout_s=600.0) -> None:
        self.begun.set()
        if to in self.deaf:
            time.sleep(timeout_s)
        if to in self.deaf or not self.open.wait(timeout_s):
            raise LinkTimeout("credit from other", timeout_s)
        if message in self.errors:
            raise self.errors[message]
        self.sent.append(message)

    def flush(self, timeout_s=600.0) -> None:
        self.flushed.append(len(self.sent))


@contextmanager
def courier_on(link, **options):
    failures: list[ManyhandsError] = []
    made = Courier(link, failures.append, **options)
    made.failures = failures
    try:
        yield made
    finally:
        link.open.set()
        made.close()


def test_urgent_letters_overtake_and_each_kind_keeps_its_order():
    link = SlowLink()
    link.open.clear()
    with courier_on(link) as courier:
        courier.post(Letter(None, b"first"))
        assert link.begun.wait(PATIENCE_S)
        for name in (b"1", b"2", b"3"):
            courier.post(Letter(None, b"part" + name))
            courier.post(Letter(None, b"sum" + name), urgent=True)
        link.open.set()
        assert courier.drain(PATIENCE_S)
    assert link.sent == [b"first", b"sum1", b"sum2", b"sum3", b"part1", b"part2", b"part3"]


def test_buffers_are_made_when_their_turn_has_come():
    link, made = SlowLink(), []
    link.open.clear()
    with courier_on(link) as courier:
        courier.post(Letter(None, b"first"))
        assert link.begun.wait(PATIENCE_S)
        courier.post(Letter(None, b"second", lambda: made.append(1) or (b"x",)))
        assert not made
        link.open.set()
        assert courier.drain(PATIENCE_S)
        assert made == [1]


def test_a_letter_that_nobody_wants_any_more():
    link, left = SlowLink(), []
    with courier_on(link) as courier:
        courier.post(Letter(None, b"void", lambda: None, lambda: left.append(1)))
        courier.post(Letter(None, b"next"))
        assert courier.drain(PATIENCE_S)
    assert link.sent == [b"next"]
    assert left == [1]  # whatever it held is free all the same


def test_sent_is_called_when_the_meeting_point_has_it():
    link, seen = SlowLink(), []
    done = threading.Event()

    def sent() -> None:
        seen.append((list(link.sent), list(link.flushed)))
        done.set()

    with courier_on(link) as courier:
        courier.post(Letter(None, b"a", (), sent))
        assert done.wait(PATIENCE_S)
    assert seen == [([b"a"], [1])]


def test_letters_without_hurry_are_confirmed_together():
    link, left = SlowLink(), []
    with courier_on(link) as courier:
        for k in range(40):
            courier.post(Letter(None, b"%d" % k, (), lambda k=k: left.append(k), hurry=False))
        assert courier.drain(PATIENCE_S)
        assert left == list(range(40))
        assert len(link.flushed) < 20


def test_closing_while_letters_without_hurry_wait_for_a_word():
    for _ in range(50):
        with courier_on(SlowLink()) as courier:
            courier.post(Letter(None, b"a", (), lambda: None, hurry=False))
        assert courier.failures == []


def test_a_peer_that_is_gone_changes_nothing():
    link = SlowLink()
    link.errors[b"gone"] = PeerGone(OTHER)
    with courier_on(link) as courier:
        courier.post(Letter(OTHER, b"gone"))
        courier.post(Letter(None, b"next"))
        assert courier.drain(PATIENCE_S)
        assert courier.failures == []
    assert link.sent == [b"next"]


def test_a_link_that_ends_is_told_once_and_wakes_whoever_drains():
    link = SlowLink()
    link.open.clear()
    link.errors = {b"a": LinkBroken("it broke"), b"b": LinkBroken("again")}
    with courier_on(link) as courier:
        courier.post(Letter(None, b"a"))
        courier.post(Letter(None, b"b"))
        threading.Timer(0.05, link.open.set).start()
        begun = time.monotonic()
        assert not courier.drain(PATIENCE_S)
        assert time.monotonic() - begun < PATIENCE_S / 2
        assert [str(error) for error in courier.failures] == ["it broke"]
        courier.post(Letter(None, b"c"))  # dropped
        assert not courier.drain(PATIENCE_S)
    assert link.sent == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("where", ["buffers", "sent"])
def test_a_bug_in_what_a_letter_calls_is_told_too(where):
    with courier_on(SlowLink()) as courier:
        courier.post(Letter(None, b"a", **{where: lambda: 1 / 0}))
        assert not courier.drain(PATIENCE_S)
        assert "failed" in str(courier.failures[0])


def test_draining_has_an_end():
    link = SlowLink()
    link.open.clear()
    with courier_on(link) as courier:
        courier.post(Letter(None, b"a"))
        assert not courier.drain(0.05)


def test_draining_ends_with_the_hope():
    link = SlowLink()
    link.open.clear()
    with courier_on(link) as courier:
        courier.post(Letter(None, b"a"))
        begun = time.monotonic()
        assert not courier.drain(PATIENCE_S, lambda: False)
        assert time.monotonic() - begun < PATIENCE_S / 2


def test_closing_does_not_wait_for_a_reader_that_takes_nothing():
    link = SlowLink()
    link.open.clear()
    courier = Courier(link, lambda error: None)
    courier.post(Letter(OTHER, b"a"))
    assert link.begun.wait(PATIENCE_S)
    begun = time.monotonic()
    courier.close()
    assert time.monotonic() - begun < PATIENCE_S / 2
    courier.close()


def test_a_reader_that_takes_nothing_is_passed_by():
    """Where letters may be dropped; elsewhere it ends the courier, and says for whom it waited."""
    link = SlowLink()
    link.deaf.add(OTHER)
    with courier_on(link, skip_s=0.3) as courier:
        courier.post(Letter(OTHER, b"stuck"))
        assert link.begun.wait(PATIENCE_S)
        courier.post(Letter(None, b"next"))
        assert courier.drain(PATIENCE_S)
        assert courier.failures == []
    assert link.sent == [b"next"]
