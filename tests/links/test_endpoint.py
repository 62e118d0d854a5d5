"""The half of a link that is the same for all, over a carrier that the test is."""

from __future__ import annotations

import threading
import time

import msgspec
import pytest
import torch

from manyhands.core.errors import (
    Excluded,
    LinkBroken,
    LinkClosed,
    LinkTimeout,
    Malformed,
    Oversized,
    SettingsError,
)
from manyhands.core.peers import NO_VIEW, Member, PeerId, PeerState, View, ViewNumber
from manyhands.links.base import Delivery, Gap
from manyhands.links.endpoint import Endpoint
from manyhands.links.messages import (
    BeatBack,
    Credit,
    Data,
    Dismissal,
    Hello,
    Leaving,
    Lost,
    NewView,
    Ready,
    Terms,
)
from manyhands.links.messages import Gap as GapNotice

ME, YOU = PeerId("me", 1), PeerId("you", 2)
TERMS = Terms(beat_s=0.02, lease_s=5.0, window_bytes=1000, part_bytes=1000, watch_bytes=4000)


class Hand:
    """A carrier that keeps what it is given."""

    def __init__(self) -> None:
        self.carried: list = []
        self.beats: list[tuple[int, int]] = []
        self.closed = 0

    def start(self, sink) -> None:
        self.sink = sink
        sink.handle(NewView(view_of(1, ME=PeerState.WATCHING)))

    def carry(self, header, buffers=()) -> None:
        self.carried.append(header)

    def beat(self, n, consumed) -> None:
        self.beats.append((n, consumed))

    def flush(self, timeout_s) -> None:
        pass

    def close(self) -> None:
        self.closed += 1

    def bring(self, sender: PeerId, seq: int, data: bytes = b"", *, fanout: bool = False) -> None:
        """What a reader thread does with a message."""
        to = None if fanout else ME.incarnation
        header = Data(sender.incarnation, to, seq, (len(data),), b"")
        targets = self.sink.targets(header)
        if targets is not None:
            targets[0][:] = data
            self.sink.delivered(header, targets)


def view_of(n: int, cut: int = 0, **states: PeerState) -> View:
    peers = {"ME": ME, "YOU": YOU, "LATE": PeerId("late", 3)}
    number = ViewNumber(1, n)
    roster = tuple(Member(peers[name], state, number) for name, state in states.items())
    return View(number, roster, ViewNumber(1, cut) if cut else NO_VIEW)


@pytest.fixture
def hand():
    return Hand()


@pytest.fixture
def link(hand):
    with Endpoint(ME, TERMS, hand, None).start(5.0) as opened:
        yield opened


def both(hand, *, me=PeerState.ACTIVE, n: int = 2, cut: int = 2) -> None:
    hand.sink.handle(NewView(view_of(n, cut, ME=me, YOU=PeerState.ACTIVE)))


def events(link) -> list:
    found = []
    while True:
        try:
            found.append(link.receive(0.0))
        except LinkTimeout:
            return found


def kinds(link) -> list[str]:
    return [type(event).__name__ for event in events(link)]


def wait_until(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def test_it_opens_when_a_view_shows_it():
    class Silent(Hand):
        def start(self, sink) -> None:
            self.sink = sink
            sink.handle(NewView(view_of(1, YOU=PeerState.WATCHING)))

    hand = Silent()
    with pytest.raises(LinkTimeout, match="view"):
        Endpoint(ME, TERMS, hand, None).start(0.05)
    assert hand.closed


def test_it_does_not_open_when_it_is_turned_away():
    class Unkind(Hand):
        def start(self, sink) -> None:
            sink.handle(Dismissal("no room"))

    with pytest.raises(Excluded, match="no room"):
        Endpoint(ME, TERMS, Unkind(), None).start(5.0)


def test_older_views_are_not_shown(link, hand):
    both(hand, n=5)
    both(hand, n=5)
    both(hand, n=4)
    assert [view.number.n for view in events(link)] == [1, 5]


def test_messages_are_numbered_per_stream(link, hand):
    both(hand)
    link.send(YOU, b"a")
    link.send(None, b"b")
    link.send(YOU, b"c", [b"12", b"345"])
    sent = [h for h in hand.carried if isinstance(h, Data)]
    assert [(h.to, h.seq, h.sizes) for h in sent] == [(2, 1, ()), (None, 1, ()), (2, 2, (2, 3))]


def test_a_full_window_holds_a_sender_until_credit_comes(link, hand):
    both(hand)
    link.send(YOU, b"", [bytes(1000)])
    with pytest.raises(LinkTimeout, match="credit from you#0002"):
        link.send(YOU, b"", timeout_s=0.05)
    sender = threading.Thread(target=lambda: link.send(YOU, b"more"))
    sender.start()
    hand.sink.handle(Credit(YOU.incarnation, ME.incarnation, 1, 0))
    sender.join(30)
    assert not sender.is_alive()


def test_a_cut_lets_blocked_senders_go(link, hand):
    both(hand)
    link.send(YOU, b"", [bytes(1000)])
    sender = threading.Thread(target=lambda: link.send(YOU, b"more"))
    sender.start()
    both(hand, n=3)
    sender.join(0.1)
    assert sender.is_alive(), "a view that is no cut changes nothing"
    both(hand, n=4, cut=4)
    sender.join(30)
    assert not sender.is_alive()


def test_a_view_without_the_reader_lets_its_sender_go(link, hand):
    both(hand)
    link.send(YOU, b"", [bytes(1000)])
    failed: list = []

    def send() -> None:
        try:
            link.send(YOU, b"more")
        except Exception as error:  # noqa: BLE001
            failed.append(type(error).__name__)

    sender = threading.Thread(target=send)
    sender.start()
    hand.sink.handle(NewView(view_of(3, 2, ME=PeerState.ACTIVE)))
    sender.join(30)
    assert failed == ["PeerGone"]


def test_credit_is_returned_when_messages_are_taken_not_when_they_come(link, hand):
    both(hand)
    for seq in (1, 2, 3):
        hand.bring(YOU, seq, bytes(300))
    assert not [h for h in hand.carried if isinstance(h, Credit)]
    events(link)
    (credit,) = [h for h in hand.carried if isinstance(h, Credit)]
    assert (credit.to, credit.direct_seq, credit.fanout_seq) == (2, 2, 0)


def test_doubles_disappear(link, hand):
    both(hand)
    for seq in (1, 1, 2, 1, 2, 3):
        hand.bring(YOU, seq)
    assert kinds(link).count("Delivery") == 3


def test_a_hole_is_told_to_the_arbiter_by_an_active_peer(link, hand):
    both(hand)
    hand.bring(YOU, 1)
    hand.bring(YOU, 3)
    hand.bring(YOU, 4)
    assert [h for h in hand.carried if isinstance(h, Lost)] == [Lost(2)]
    assert "Gap" not in kinds(link)


def test_a_hole_is_a_gap_for_a_watching_peer(link, hand):
    both(hand, me=PeerState.WATCHING)
    hand.bring(YOU, 5, fanout=True)
    hand.bring(YOU, 7, fanout=True)
    assert [type(event) for event in events(link)] == [View, View, Delivery, Gap, Delivery]
    assert not [h for h in hand.carried if isinstance(h, Lost)]


def test_ready_names_the_gaps_that_the_user_has_seen(link, hand):
    def said() -> int:
        link.tell(Ready(gaps=99))
        return hand.carried[-1].gaps

    both(hand, me=PeerState.WATCHING)
    assert said() == 0
    hand.sink.handle(GapNotice(1))
    assert said() == 0, "it has come, and nobody has looked"
    assert kinds(link).count("Gap") == 1
    assert said() == 1
    for _ in range(3):
        hand.sink.handle(GapNotice(1))
    assert kinds(link).count("Gap") == 1, "one is as good as many"
    assert said() == 4
    hand.sink.handle(GapNotice(1))
    hand.sink.renewed()
    events(link)
    assert said() == 0, "a new meeting point has told of none"
    hand.sink.handle(GapNotice(1))
    events(link)
    assert said() == 1


def test_gaps_do_not_pile_up_for_a_user_that_does_not_read(link, hand):
    both(hand, me=PeerState.WATCHING)
    for _ in range(1000):
        hand.sink.handle(GapNotice(1))
    assert kinds(link) == ["View", "View", "Gap"]


def test_a_message_may_come_before_the_view_that_shows_its_sender(link, hand):
    both(hand)
    late = PeerId("late", 3)
    hand.bring(late, 1)
    both(hand, n=3)  # a view that does not know it yet
    hand.bring(late, 2)
    hand.sink.handle(NewView(view_of(4, 2, ME=PeerState.ACTIVE, LATE=PeerState.ACTIVE)))
    hand.bring(late, 3)
    assert not [h for h in hand.carried if isinstance(h, Lost)]
    senders = [e.sender for e in events(link) if isinstance(e, Delivery)]
    assert [s.incarnation for s in senders] == [3, 3, 3]
    assert senders[-1] == late


def test_what_the_gone_still_send_is_dropped(link, hand):
    both(hand)
    hand.bring(YOU, 1)
    hand.sink.handle(NewView(view_of(3, 3, ME=PeerState.ACTIVE)))
    hand.bring(YOU, 2)
    hand.bring(YOU, 3, fanout=True)
    assert kinds(link).count("Delivery") == 1


def test_beats_tell_what_was_consumed_and_renew_the_lease(link, hand):
    assert link.lease_start_s() == float("-inf")
    wait_until(lambda: len(hand.beats) > 2)
    hand.sink.handle(BeatBack(2))
    assert time.monotonic() - link.lease_start_s() < 5
    both(hand)
    hand.bring(YOU, 1, bytes(500))
    events(link)
    wait_until(lambda: hand.beats[-1][1] == 628)
    hand.sink.heard(time.monotonic() + 1)
    assert link.lease_start_s() > time.monotonic()


def test_a_beat_does_not_wait_its_time_when_much_was_consumed(hand):
    """A watching peer that reads fast would miss what comes until then."""
    terms = msgspec.structs.replace(TERMS, beat_s=60.0, lease_s=120.0)
    with Endpoint(ME, terms, hand, None).start(5.0) as link:
        both(hand)
        wait_until(lambda: hand.beats)
        for seq in range(1, 7):
            hand.bring(YOU, seq, bytes(500))
        assert kinds(link).count("Delivery") == 6
        wait_until(lambda: hand.beats[-1][1] >= TERMS.watch_bytes // 4)


def test_an_excluded_peer_has_no_lease_and_stops_beating(link, hand):
    wait_until(lambda: hand.beats)
    hand.sink.handle(BeatBack(1))
    hand.sink.handle(Dismissal("too slow"))
    hand.sink.handle(BeatBack(2))
    hand.sink.heard(time.monotonic())
    assert link.lease_start_s() == float("-inf")
    for call in (lambda: link.send(None, b""), lambda: link.tell(Leaving()), link.flush):
        with pytest.raises(Excluded, match="too slow"):
            call()
    assert isinstance(link.receive(0), View), "what came before is still there"
    with pytest.raises(Excluded):
        link.receive(0)
    wait_until(lambda: not link._beater.is_alive())


def test_a_view_without_this_peer_excludes_it(link, hand):
    both(hand)
    hand.sink.handle(NewView(view_of(3, 3, YOU=PeerState.ACTIVE)))
    events_before_the_end = [link.receive(0) for _ in range(3)]
    assert events_before_the_end[-1].peers() == (YOU,)
    with pytest.raises(Excluded):
        link.receive(0)


def test_the_first_error_stays(link, hand):
    hand.sink.failed(LinkBroken("gone"))
    hand.sink.handle(Dismissal("late news"))
    link.close()
    with pytest.raises(LinkBroken, match="gone"):
        link.send(None, b"")


def test_close_wakes_a_receiver(link, hand):
    events(link)
    ended: list = []

    def receive() -> None:
        try:
            link.receive(30)
        except LinkClosed:
            ended.append("closed")

    thread = threading.Thread(target=receive)
    thread.start()
    link.close()
    thread.join(30)
    assert ended == ["closed"]


def test_a_send_that_outlasts_the_link_is_an_error(link, hand):
    """The network was slow, and the link was closed in between."""
    both(hand)
    hand.carry = lambda header, buffers=(): link.close()
    with pytest.raises(LinkClosed):
        link.send(YOU, b"")


def test_sizes_that_were_not_agreed_on_are_errors(link, hand):
    both(hand)
    with pytest.raises(Oversized):
        hand.sink.targets(Data(2, 1, 1, (600, 401), b""))
    with pytest.raises(Malformed):
        hand.sink.handle(Hello("run", ME, "", TERMS, ""))


def test_a_place_of_another_size_is_an_error(hand):
    def place(sender, message, sizes):
        return [memoryview(bytearray(3))]

    with Endpoint(ME, TERMS, hand, place).start(5.0):
        both(hand)
        with pytest.raises(ValueError, match=r"`place` gave room for \(3,\).*\(4,\)"):
            hand.sink.targets(Data(2, 1, 1, (4,), b""))


def test_backlog_counts_what_nobody_has_taken(link, hand):
    both(hand)
    hand.bring(YOU, 1, bytes(100))
    assert hand.sink.backlog_bytes() == 228
    events(link)
    assert hand.sink.backlog_bytes() == 0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda link: link.send(None, "text"), "message must be bytes, not str"),
        (lambda link: link.send("bob", b""), "to must be a PeerId"),
        (lambda link: link.send(None, b"", b"not a list"), "write [buffer]"),
        (lambda link: link.send(None, b"", [1]), "bytes-like, not int"),
        (lambda link: link.send(None, b"", [torch.ones(3)]), "bytes_of(tensor)"),
        (lambda link: link.send(None, b"", timeout_s=None), "every wait has an end"),
        (lambda link: link.receive(None), "every wait has an end"),
    ],
)
def test_slips_of_the_hand_are_named(link, hand, call, words):
    both(hand)
    with pytest.raises(TypeError) as caught:
        call(link)
    assert words in str(caught.value)


def test_what_a_link_looks_like(link, hand):
    both(hand)
    assert repr(link) == "<Link of me#0001, open, view 1.2>"
    link.close()
    assert "LinkClosed" in repr(link)


@pytest.mark.parametrize(
    "terms",
    [
        {"part_bytes": 64 << 20},
        {"lease_s": 0},
        {"window_bytes": -1},
        {"beat_s": 6.0},
    ],
)
def test_terms_that_cannot_be(terms):
    with pytest.raises(SettingsError) as caught:
        Terms(**terms)
    assert "hint:" in str(caught.value)


def test_only_what_can_be_received_wakes_whoever_waits_for_it(link, hand):
    """Not what is for those who send: with every message come a credit and an answer."""
    both(hand)
    events(link)
    received = []
    thread = threading.Thread(target=lambda: received.append(link.receive(30.0)))
    thread.start()
    asleep = link._came._waiters
    deadline = time.monotonic() + 30
    while not asleep:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    waiter = asleep[0]
    hand.sink.handle(Credit(YOU.incarnation, ME.incarnation, 1, 1))
    hand.sink.handle(BeatBack(1, 0))
    hand.sink.heard(time.monotonic())
    assert list(asleep) == [waiter]  # who is woken is no longer among them
    hand.bring(YOU, 1, b"data")
    thread.join(30)
    assert bytes(received[0].buffers[0]) == b"data"
