"""What every link owes its users, as tests: one suite for local, hub and AMQP.

    class TestMyLink(LinkContract):
        @pytest.fixture
        def meeting(self):
            with MyMeeting(...) as meeting:
                yield meeting

A `Meeting` is a meeting point under test and what was opened there. Nothing here knows a kind of
link: where they differ, the meeting says so (`resumes`, `spawns`, ...).
"""

from __future__ import annotations

import os
import random
import threading
import time
import uuid
import zlib
from collections import defaultdict
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from itertools import pairwise
from typing import TYPE_CHECKING, Self, TypeVar

import msgspec
import pytest

from manyhands.core.errors import (
    Excluded,
    LinkClosed,
    LinkError,
    LinkTimeout,
    Oversized,
    PeerGone,
)
from manyhands.core.peers import Member, PeerId, PeerState, View, ViewNumber
from manyhands.links.base import Delivery, Event, Gap, Link, LinkSettings, Place, open_link
from manyhands.links.messages import MAX_BUFFERS, MESSAGE_BYTES, Gone, Leaving, Ready, Resign, Terms
from manyhands.testing.peer import PeerProcess
from manyhands.testing.proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

__all__ = ["PATIENCE_S", "QUICK", "STEADY", "LinkContract", "Meeting", "Reader", "together"]

T = TypeVar("T")
PATIENCE_S = 30.0  # for what must happen; nothing here waits this long unless it is broken

# Where leases are not the matter they must not decide a test on a machine that is busy.
STEADY = Terms(
    beat_s=0.1,
    lease_s=20.0,
    grace_s=0.3,
    window_bytes=256 << 10,
    part_bytes=64 << 10,
    watch_bytes=1 << 20,
)
QUICK = msgspec.structs.replace(STEADY, lease_s=1.5)  # for tests of the lease itself
PATIENT = msgspec.structs.replace(STEADY, grace_s=10.0)  # for tests of reconnecting


class Meeting:
    """A meeting point under test. Closing it closes all that was opened through it."""

    resumes = True  # a reconnect in time is invisible; else it is a cut with the same roster
    spawns = True  # peers of other processes can come
    proxies = True  # it is reached by TCP
    restarts = True  # it can die and come back

    def __init__(self, url: str) -> None:
        self.url = url
        self.run = f"contract-{uuid.uuid4().hex[:8]}"
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def target(self) -> tuple[str, int]:
        """Where the meeting point listens."""
        raise NotImplementedError

    def via(self, port: int) -> str:
        """The URL by which it is found behind a proxy on that loopback port."""
        raise NotImplementedError

    def restart(self) -> None:
        """The meeting point dies and comes back."""
        raise NotImplementedError

    def open(
        self,
        name: str,
        *,
        run: str | None = None,
        terms: Terms = STEADY,
        place: Place | None = None,
        url: str | None = None,
    ) -> Link:
        """A link of this process."""
        return self._stack.enter_context(
            open_link(
                url or self.url,
                run=run or self.run,
                name=name,
                settings=LinkSettings(terms=terms, connect_s=PATIENCE_S),
                place=place,
            )
        )

    def open_proxied(self, name: str, *, terms: Terms = STEADY) -> tuple[Link, Proxy]:
        """A link of this process whose network can be spoiled."""
        proxy = self._stack.enter_context(Proxy(*self.target()))
        return self.open(name, terms=terms, url=self.via(proxy.port)), proxy

    def spawn(self, name: str, *, terms: Terms = STEADY) -> PeerProcess:
        """A peer of another process, in the run."""
        process = self._stack.enter_context(PeerProcess())
        return process.open(self.url, run=self.run, name=name, terms=terms)


class Reader:
    """Reads a link on the calling thread and remembers all that came."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.events: list[Event] = []

    @property
    def views(self) -> list[View]:
        """All views so far."""
        return [event for event in self.events if isinstance(event, View)]

    @property
    def deliveries(self) -> list[Delivery]:
        """All messages so far."""
        return [event for event in self.events if isinstance(event, Delivery)]

    @property
    def num_gaps(self) -> int:
        """How many gaps there were so far."""
        return sum(isinstance(event, Gap) for event in self.events)

    def until(self, wanted: Callable[[Event], bool], patience_s: float = PATIENCE_S) -> Event:
        """Read on to the first event that is wanted. Raises LinkTimeout when none comes."""
        deadline = time.monotonic() + patience_s
        while True:
            event = self.link.receive(max(0.0, deadline - time.monotonic()))
            self.events.append(event)
            if wanted(event):
                return event

    def until_view(self, wanted: Callable[[View], bool]) -> View:
        """Read on to the first view that is wanted."""
        view = self.until(lambda event: isinstance(event, View) and wanted(event))
        assert isinstance(view, View)
        return view

    def settle(self, wanted: Callable[[View], bool]) -> View:
        """Read on until the newest view is wanted; it may be so already."""
        if self.views and wanted(self.views[-1]):
            return self.views[-1]
        return self.until_view(wanted)

    def until_roster(self, **states: PeerState) -> View:
        """Read on until the roster is exactly these names in these states."""
        return self.until_view(lambda view: {m.peer.name: m.state for m in view.roster} == states)

    def until_without(self, peer: PeerId) -> View:
        """Read on until that peer is out."""
        return self.until_view(lambda view: peer not in view.peers())

    def until_deliveries(self, count: int) -> list[Delivery]:
        """Read on until that many messages have come in all."""
        while len(self.deliveries) < count:
            self.until(lambda event: isinstance(event, Delivery))
        return self.deliveries

    def until_message(self, message: bytes) -> Delivery:
        """Read on to that message."""
        found = self.until(lambda event: isinstance(event, Delivery) and event.message == message)
        assert isinstance(found, Delivery)
        return found

    def until_error(self, patience_s: float = PATIENCE_S) -> LinkError:
        """Read on until the link says why it cannot."""
        try:
            self.until(lambda event: False, patience_s)
        except LinkTimeout:
            raise
        except LinkError as error:
            return error
        raise AssertionError


def together(*works: Callable[[], T], patience_s: float = 90.0) -> list[T]:
    """Run these at the same time and return what they return; the first error is raised."""
    pool = ThreadPoolExecutor(len(works))
    try:
        futures = [pool.submit(work) for work in works]
        done, late = wait(futures, patience_s, FIRST_EXCEPTION)
        for future in done:
            future.result()
        assert not late, f"{len(late)} of {len(works)} threads hang"
        return [future.result() for future in futures]
    finally:
        pool.shutdown(wait=False)  # a thread that hangs ends when the links are closed


def sealed(count: int, size: int) -> tuple[bytes, bytes]:
    """A message with a running number and a checksum of the fresh random data beside it."""
    data = os.urandom(size)
    return f"{count}:{zlib.crc32(data)}".encode(), data


def number_of(delivery: Delivery) -> int:
    """The running number of a sealed message. Raises AssertionError when its data is damaged."""
    count, crc = delivery.message.split(b":")
    assert zlib.crc32(b"".join(delivery.buffers)) == int(crc), "the data is not what was sent"
    return int(count)


def activate(*readers: Reader) -> View:
    """Everybody says Ready and reads on until all are active; returns the last one's view."""
    for reader in readers:
        reader.link.tell(Ready())
    wanted = {reader.link.me for reader in readers}
    views = [
        reader.until_view(lambda view: wanted <= set(view.peers(PeerState.ACTIVE)))
        for reader in readers
    ]
    return views[-1]


def fill(link: Link, to: PeerId | None, timeout_s: float = 0.5) -> tuple[int, LinkTimeout]:
    """Send until nothing more goes; returns the bytes that went, and the error."""
    size = link.terms.part_bytes
    for i in range(10_000):
        try:
            link.send(to, *_part(size), timeout_s=timeout_s)
        except LinkTimeout as error:
            return i * size, error
    raise AssertionError("nothing holds this sender back")


def state_of(view: View, peer: PeerId) -> PeerState | None:
    """How far the peer takes part, if it does."""
    member = view.member(peer.incarnation)
    return None if member is None else member.state


def is_cut(view: View) -> bool:
    """Whether this very view is a cut."""
    return view.cut == view.number


class LinkContract:
    """The suite. A subclass supplies the fixture `meeting`."""

    @pytest.fixture
    def meeting(self) -> Meeting:
        """The meeting point under test."""
        raise NotImplementedError

    # -- order and completeness -----------------------------------------------------------------

    def test_messages_of_a_pair_arrive_in_order_and_once(self, meeting: Meeting) -> None:
        """Direct messages and fan-outs, from several threads a peer."""
        readers = [Reader(meeting.open(f"p{i}")) for i in range(3)]
        activate(*readers)
        links = [reader.link for reader in readers]
        num_threads, num_messages = 3, 60

        def send(link: Link, thread: int) -> None:
            dice = random.Random(thread)  # noqa: S311
            for i in range(num_messages):
                others = [None, *(other.me for other in links if other is not link)]
                message = f"{thread}:{i}".encode()
                for to in [None] if dice.random() < 0.5 else others[1:]:
                    link.send(to, message, [os.urandom(dice.randrange(3000))])

        def read(reader: Reader) -> None:
            reader.until_deliveries(2 * num_threads * num_messages)

        together(
            *(lambda link=link, t=t: send(link, t) for link in links for t in range(num_threads)),
            *(lambda reader=reader: read(reader) for reader in readers),
        )
        for reader in readers:
            streams: dict[tuple[PeerId, bytes], list[int]] = defaultdict(list)
            for delivery in reader.deliveries:
                thread, i = delivery.message.split(b":")
                streams[delivery.sender, thread].append(int(i))
            assert len(streams) == 2 * num_threads
            assert all(numbers == list(range(num_messages)) for numbers in streams.values())
            with pytest.raises(LinkTimeout):
                reader.until(lambda event: isinstance(event, Delivery), 0.2)

    def test_everybody_sees_the_same_views_in_one_order(self, meeting: Meeting) -> None:
        """While peers come and go from several threads at once."""
        readers = [Reader(meeting.open(f"steady{i}")) for i in range(3)]
        activate(*readers)
        names = {reader.link.me.name for reader in readers}

        def come_and_go(thread: int) -> None:
            for i in range(4):
                with meeting.open(f"guest{thread}-{i}") as guest:
                    guest.tell(Ready())
                    reader = Reader(guest)
                    reader.until_view(lambda v: state_of(v, guest.me) is PeerState.ACTIVE)

        together(*(lambda t=t: come_and_go(t) for t in range(3)))
        readers[0].link.send(None, b"end")
        readers[1].link.send(readers[0].link.me, b"end")
        for reader in readers:
            if not any(d.message == b"end" for d in reader.deliveries):
                reader.until_message(b"end")
            reader.settle(lambda view: {p.name for p in view.peers()} == names)
        last = max(reader.views[-1].number for reader in readers)
        seen: dict[ViewNumber, View] = {}
        for reader in readers:
            reader.settle(lambda view: view.number == last)
            numbers = [view.number for view in reader.views]
            assert all(a < b for a, b in pairwise(numbers))
            for view in reader.views:
                assert seen.setdefault(view.number, view) == view
        assert len(seen) > 20
        # Whoever came last has missed some of the first views, and none after that.
        for reader in readers:
            first = reader.views[0].number
            assert {v.number for v in reader.views} == {n for n in seen if n >= first}

    # -- membership -----------------------------------------------------------------------------

    def test_states_and_cuts(self, meeting: Meeting) -> None:
        """Ready, Leaving, Gone, Resign and the end, as the arbiter's views tell them."""
        one = Reader(meeting.open("one"))
        view = one.until_roster(one=PeerState.WATCHING)
        assert (view.founder, view.over) == (one.link.me, False)
        one.link.tell(Ready())
        view = one.until_roster(one=PeerState.ACTIVE)
        assert is_cut(view), "the first active peer is a cut"
        assert view.founder is None
        first_cut = view.cut

        two = Reader(meeting.open("two"))
        two.link.tell(Ready())
        view = one.until_roster(one=PeerState.ACTIVE, two=PeerState.ACTIVE)
        assert view.cut == first_cut, "joining and Ready are no cuts"
        two.link.tell(Leaving())
        view = one.until_roster(one=PeerState.ACTIVE, two=PeerState.LEAVING)
        assert view.cut == first_cut, "Leaving is no cut"
        two.link.tell(Gone(first_cut))
        view = one.until_roster(one=PeerState.ACTIVE)
        assert view.cut == first_cut, "this Gone is quiet"
        assert isinstance(two.until_error(), Excluded)

        three = Reader(meeting.open("three"))
        activate(three)
        three.link.tell(Leaving())
        one.until_view(lambda v: state_of(v, three.link.me) is PeerState.LEAVING)
        three.link.tell(Gone(first_cut._replace(n=first_cut.n + 10_000)))
        view = one.until_without(three.link.me)
        assert is_cut(view), "a Gone of another cut is a cut"
        assert view.cut_roster == view.roster

        four = Reader(meeting.open("four"))
        activate(four)
        four.link.tell(Resign(False, "for a test"))
        assert is_cut(one.until_without(four.link.me))
        assert isinstance(four.until_error(), Excluded)

        one.link.tell(Resign(True, "all done"))
        assert isinstance(one.until_error(), Excluded)

    def test_a_finished_run_takes_nobody_in(self, meeting: Meeting) -> None:
        """`over` stays, and Ready is answered with the door."""
        one, two = Reader(meeting.open("one")), Reader(meeting.open("two"))
        activate(one, two)
        late = Reader(meeting.open("late"))
        one.link.tell(Resign(True, "all done"))
        assert two.until_without(one.link.me).over
        assert late.until_without(one.link.me).over
        late.link.tell(Ready())
        assert isinstance(late.until_error(), Excluded)
        assert two.until_without(late.link.me).over

    def test_closing_a_link_is_seen_at_once(self, meeting: Meeting) -> None:
        """A cut for an active peer, none for a watching one."""
        one, two = Reader(meeting.open("one")), Reader(meeting.open("two"))
        activate(one, two)
        third = meeting.open("third")
        one.until_view(lambda view: third.me in view.peers())
        start_s = time.monotonic()
        third.close()
        view = one.until_without(third.me)
        assert not is_cut(view)
        two.link.close()
        assert is_cut(one.until_without(two.link.me))
        assert time.monotonic() - start_s < STEADY.lease_s / 2

    def test_fan_out_reaches_all_others_once(self, meeting: Meeting) -> None:
        """Watching peers too, and never the sender."""
        readers = [Reader(meeting.open(f"p{i}")) for i in range(4)]
        activate(*readers[:2])
        for reader in readers:
            reader.settle(lambda view: len(view.roster) == 4)
        data = os.urandom(5000)
        readers[0].link.send(None, b"to all", [data[:10], data[10:]])
        readers[0].link.send(None, b"end")
        readers[1].link.send(readers[0].link.me, b"end")
        for reader in readers[1:]:
            reader.until_message(b"end")
            (delivery,) = [d for d in reader.deliveries if d.message == b"to all"]
            assert delivery.sender == readers[0].link.me
            assert delivery.fanout
            assert b"".join(delivery.buffers) == data
            assert [len(buffer) for buffer in delivery.buffers] == [10, 4990]
        readers[0].until_message(b"end")
        assert [d.message for d in readers[0].deliveries] == [b"end"]

    def test_two_runs_do_not_see_each_other(self, meeting: Meeting) -> None:
        """Same names, same meeting point, other run."""
        runs = [f"{meeting.run}-{i}" for i in range(2)]
        readers = [[Reader(meeting.open(f"p{i}", run=run)) for i in range(2)] for run in runs]
        for i, pair in enumerate(readers):
            activate(*pair)
            pair[0].link.send(None, f"run {i}".encode())
        for i, pair in enumerate(readers):
            assert pair[1].until_deliveries(1)[0].message == f"run {i}".encode()
            assert {m.peer for m in pair[1].views[-1].roster} == {r.link.me for r in pair}
            other = readers[1 - i][0].link.me
            with pytest.raises(PeerGone):
                pair[0].link.send(other, b"hello")
            with pytest.raises(LinkTimeout):
                pair[1].until(lambda event: isinstance(event, Delivery), 0.1)

    def test_64_peers_in_one_room(self, meeting: Meeting) -> None:
        """Each fans out, each hears all others."""
        links = together(*(lambda i=i: meeting.open(f"p{i:02}") for i in range(64)))
        readers = [Reader(link) for link in links]
        together(*(lambda r=r: r.until_view(lambda v: len(v.roster) == 64) for r in readers))
        for link in links:
            link.send(None, link.me.name.encode(), [os.urandom(100)])
        everybody = {link.me for link in links}
        for reader in readers:
            senders = [d.sender for d in reader.until_deliveries(63)]
            assert len(senders) == 63
            assert set(senders) == everybody - {reader.link.me}

    def test_a_joiner_that_dies_before_ready_is_no_cut(self, meeting: Meeting) -> None:
        """It disturbs nobody."""
        _need(meeting.spawns, "peers of other processes")
        one = Reader(meeting.open("one"))
        cut = activate(one).cut
        joiner = meeting.spawn("joiner")
        one.until_view(lambda view: joiner.me in view.peers())
        joiner.kill()
        assert one.until_without(joiner.me).cut == cut

    # -- buffers --------------------------------------------------------------------------------

    def test_buffers_arrive_in_the_place_named_for_them(self, meeting: Meeting) -> None:
        """Exactly that memory, and fresh memory where no place is named."""
        memory = bytearray(3000)
        asked: list[tuple[PeerId, bytes, tuple[int, ...]]] = []

        def place(
            sender: PeerId, message: bytes, sizes: tuple[int, ...]
        ) -> Sequence[memoryview] | None:
            asked.append((sender, message, sizes))
            if message != b"placed":
                return None
            return [memoryview(memory)[:1000], memoryview(memory)[1000:]]

        one, two = meeting.open("one"), Reader(meeting.open("two", place=place))
        Reader(one).until_view(lambda view: two.link.me in view.peers())
        data = os.urandom(3000)
        one.send(two.link.me, b"placed", [data[:1000], data[1000:]])
        one.send(two.link.me, b"fresh", [b"x" * 10])
        placed, fresh = two.until_deliveries(2)
        assert memory == data
        assert all(buffer.obj is memory for buffer in placed.buffers)
        assert bytes(fresh.buffers[0]) == b"x" * 10
        fresh.buffers[0][:] = b"y" * 10  # it is the receiver's own
        assert asked == [(one.me, b"placed", (1000, 2000)), (one.me, b"fresh", (10,))]

    def test_sizes(self, meeting: Meeting) -> None:
        """Nothing, many buffers, the largest part, and more than that."""
        one, two = meeting.open("one"), Reader(meeting.open("two"))
        Reader(one).until_view(lambda view: two.link.me in view.peers())
        part = one.terms.part_bytes
        cases: list[tuple[bytes, list[bytes]]] = [
            (b"", []),
            (b"empty buffer", [b""]),
            (b"some empty", [b"", b"ab", b"", b"c"]),
            (b"many", [os.urandom(i % 50) for i in range(1000)]),
            (b"part", [os.urandom(part)]),
            (b"part in two", [os.urandom(part - 1), os.urandom(1)]),
            (b"m" * MESSAGE_BYTES, []),
            (b"m" * (MESSAGE_BYTES - 5 * MAX_BUFFERS), [b"12345678"] * MAX_BUFFERS),
        ]
        for message, buffers in cases:
            one.send(two.link.me, message, buffers)
        for (message, buffers), delivery in zip(
            cases, two.until_deliveries(len(cases)), strict=True
        ):
            assert delivery.message == message
            assert [bytes(buffer) for buffer in delivery.buffers] == buffers
            assert not delivery.fanout
        for message, buffers in (
            (b"", [b"x" * (part + 1)]),
            (b"m" * (MESSAGE_BYTES + 1), []),
            (b"", [b""] * (MAX_BUFFERS + 1)),
            (b"m" * MESSAGE_BYTES, [b""]),
        ):
            with pytest.raises(Oversized):
                one.send(two.link.me, message, buffers)
            with pytest.raises(Oversized):
                one.send(None, message, buffers)
        one.send(two.link.me, b"still here")
        assert two.until_deliveries(len(cases) + 1)[-1].message == b"still here"

    def test_nobody_sends_to_itself_or_to_the_gone(self, meeting: Meeting) -> None:
        """PeerGone names whom."""
        one, two = Reader(meeting.open("one")), meeting.open("two")
        one.until_view(lambda view: two.me in view.peers())
        with pytest.raises(PeerGone, match="one"):
            one.link.send(one.link.me, b"hello")
        two.close()
        one.until_without(two.me)
        with pytest.raises(PeerGone, match="two"):
            one.link.send(two.me, b"hello")

    # -- flow control ---------------------------------------------------------------------------

    def test_all_to_all_with_a_window_of_one_part(self, meeting: Meeting) -> None:
        """No deadlock, and every byte is right."""
        terms = msgspec.structs.replace(STEADY, window_bytes=32 << 10, part_bytes=32 << 10)
        readers = [Reader(meeting.open(f"p{i}", terms=terms)) for i in range(4)]
        activate(*readers)
        count = 25

        def send(link: Link, others: list[PeerId]) -> None:
            for i in range(count):
                for to in others:
                    message, data = sealed(i, 32 << 10)
                    link.send(to, message, [data], timeout_s=PATIENCE_S)
                message, data = sealed(i, 32 << 10)
                link.send(None, message, [data], timeout_s=PATIENCE_S)

        everybody = [reader.link.me for reader in readers]
        together(
            *(
                lambda r=r: send(r.link, [peer for peer in everybody if peer != r.link.me])
                for r in readers
            ),
            *(lambda r=r: r.until_deliveries(3 * 2 * count) for r in readers),
        )
        for reader in readers:
            streams: dict[tuple[PeerId, bool], list[int]] = defaultdict(list)
            for delivery in reader.deliveries:
                streams[delivery.sender, delivery.fanout].append(number_of(delivery))
            assert len(streams) == 6
            assert all(numbers == list(range(count)) for numbers in streams.values())

    def test_a_slow_reader_holds_back_those_who_send_to_it(self, meeting: Meeting) -> None:
        """And nobody else; what is under way to it is bounded."""
        one, slow, other = (Reader(meeting.open(name)) for name in ("one", "slow", "other"))
        activate(one, slow, other)
        part = STEADY.part_bytes
        sent, error = fill(one.link, slow.link.me)
        assert str(slow.link.me) in str(error)
        assert STEADY.window_bytes - part <= sent <= STEADY.window_bytes + part
        blocked = threading.Event()

        def send_more() -> None:
            blocked.set()
            one.link.send(slow.link.me, *_part(part), timeout_s=PATIENCE_S)

        def others_go_on() -> None:
            blocked.wait()
            for _ in range(20):
                one.link.send(other.link.me, *_part(part), timeout_s=PATIENCE_S)
                other.link.send(one.link.me, *_part(part), timeout_s=PATIENCE_S)
                other.until_deliveries(len(other.deliveries) + 1)
                one.until_deliveries(len(one.deliveries) + 1)
            slow.until_deliveries(sent // part + 1)  # now it reads, and the sender goes on

        together(send_more, others_go_on)
        assert slow.link.me in one.views[-1].peers()

    def test_fan_out_waits_for_active_readers_only(self, meeting: Meeting) -> None:
        """A slow active reader holds it back, a watching one never does."""
        one, slow = Reader(meeting.open("one")), Reader(meeting.open("slow"))
        meeting.open("idle")
        activate(one, slow)
        part = STEADY.part_bytes
        sent, error = fill(one.link, None)
        assert "slow" in str(error)
        assert "idle" not in str(error)
        assert STEADY.window_bytes - part <= sent <= STEADY.window_bytes + part
        slow.link.close()
        one.until_without(slow.link.me)
        for _ in range(100):  # many windows, and nobody but a watching peer there
            one.link.send(None, *_part(part), timeout_s=PATIENCE_S)

    @pytest.mark.parametrize("in_message", [False, True])
    def test_a_watching_peer_that_does_not_read_gets_a_gap(
        self, meeting: Meeting, in_message: bool
    ) -> None:
        """And takes no more than the agreed memory; whatever part of a message is large."""
        one, idle = Reader(meeting.open("one")), Reader(meeting.open("idle"))
        activate(one)
        size = 32 << 10
        count = 5 * STEADY.watch_bytes // size
        for i in range(count):
            head = f"{i}:".encode()
            message, buffers = (
                (head + b"x" * size, []) if in_message else (head, [os.urandom(size)])
            )
            one.link.send(None, message, buffers, timeout_s=PATIENCE_S)
        one.link.send(idle.link.me, b"end")
        idle.until_message(b"end")
        # To a watching peer, direct messages and fan-outs may come by different queues.
        if not idle.num_gaps:
            idle.until(lambda event: isinstance(event, Gap))
        got = [int(d.message.split(b":")[0]) for d in idle.deliveries if d.message != b"end"]
        assert idle.num_gaps >= 1
        assert len(got) * size <= 2 * STEADY.watch_bytes
        assert got == sorted(set(got))
        # What it has is whole up to the gap.
        first_gap = next(i for i, event in enumerate(idle.events) if isinstance(event, Gap))
        before = [e for e in idle.events[:first_gap] if isinstance(e, Delivery) and e.fanout]
        assert len(before) == len(got[: len(before)])
        assert got[: len(before)] == list(range(len(before)))
        # It can still become active: it has seen all its gaps.
        idle.link.tell(Ready())
        idle.until_view(lambda view: state_of(view, idle.link.me) is PeerState.ACTIVE)

    def test_a_watching_peer_that_reads_gets_all(self, meeting: Meeting) -> None:
        """However much is fanned out."""
        one, fast = Reader(meeting.open("one")), Reader(meeting.open("fast"))
        activate(one)
        size = STEADY.watch_bytes // 32
        count = 200
        taken = threading.Semaphore(8)  # a reader as fast as the sender, on any machine

        def send() -> None:
            for i in range(count):
                taken.acquire()
                message, data = sealed(i, size)
                one.link.send(None, message, [data], timeout_s=PATIENCE_S)

        def read() -> None:
            for i in range(count):
                fast.until_deliveries(i + 1)
                taken.release()

        together(send, read)
        assert [number_of(d) for d in fast.deliveries] == list(range(count))
        assert fast.num_gaps == 0

    # -- leases ---------------------------------------------------------------------------------

    def test_a_peer_stays_while_its_thread_sleeps(self, meeting: Meeting) -> None:
        """For three leases; its lease goes on."""
        one, two = Reader(meeting.open("one", terms=QUICK)), meeting.open("two", terms=QUICK)
        one.until_view(lambda view: two.me in view.peers())
        start_s = two.lease_start_s()
        time.sleep(3 * QUICK.lease_s)  # the point of this test: neither of the two does anything
        assert two.lease_start_s() > start_s + 2 * QUICK.lease_s
        assert time.monotonic() - two.lease_start_s() < QUICK.lease_s
        two.send(one.link.me, b"here")
        one.until_message(b"here")
        assert two.me in one.views[-1].peers()

    def test_beats_go_on_while_data_waits_for_a_slow_reader(self, meeting: Meeting) -> None:
        """Neither the sender nor the reader falls out."""
        one, slow = (
            Reader(meeting.open("one", terms=QUICK)),
            Reader(meeting.open("slow", terms=QUICK)),
        )
        activate(one, slow)
        start_s = one.link.lease_start_s()
        fill(one.link, slow.link.me, timeout_s=2 * QUICK.lease_s)
        assert one.link.lease_start_s() > start_s + QUICK.lease_s
        one.link.tell(Leaving())
        view = one.until_view(lambda v: state_of(v, one.link.me) is PeerState.LEAVING)
        assert slow.link.me in view.peers()

    def test_a_killed_process_is_out_long_before_its_lease(self, meeting: Meeting) -> None:
        """Its connection closes: only the grace is left."""
        _need(meeting.spawns, "peers of other processes")
        one = Reader(meeting.open("one"))
        victim = meeting.spawn("victim")
        victim.do("ready")
        activate(one)
        one.settle(lambda v: state_of(v, victim.me) is PeerState.ACTIVE)
        start_s = time.monotonic()
        victim.kill()
        assert is_cut(one.until_without(victim.me))
        assert time.monotonic() - start_s < STEADY.lease_s / 2

    def test_a_stopped_process_is_out_after_its_lease(self, meeting: Meeting) -> None:
        """Its own lease has ended by then; when it goes on it learns that it is excluded."""
        _need(meeting.spawns, "peers of other processes")
        one = Reader(meeting.open("one", terms=QUICK))
        victim = meeting.spawn("victim", terms=QUICK)
        victim.do("ready")
        activate(one)
        one.settle(lambda v: state_of(v, victim.me) is PeerState.ACTIVE)
        victim.do("lease")
        victim.stop()
        view = one.until_without(victim.me)
        seen_s = time.monotonic()
        assert is_cut(view)
        victim.go_on()
        victim.begin("until_error")
        assert victim.answer()["error"] == "Excluded"
        assert victim.do("lease")["last_start_s"] + QUICK.lease_s <= seen_s

    def test_a_paused_predecessor_is_fenced(self, meeting: Meeting) -> None:
        """When its name joins anew: at once, and what it still sends reaches nobody."""
        _need(meeting.spawns, "peers of other processes")
        one = Reader(meeting.open("one"))
        activate(one)
        old = meeting.spawn("twin")
        old.do("ready")
        one.until_view(lambda v: state_of(v, old.me) is PeerState.ACTIVE)
        old.stop()
        start_s = time.monotonic()
        new = meeting.open("twin")
        view = one.until_without(old.me)
        assert time.monotonic() - start_s < STEADY.lease_s / 2
        assert is_cut(view)
        assert new.me in view.peers()
        for _ in range(3):
            old.begin("send", message="from the grave", size=1000)
        old.go_on()
        for _ in range(3):
            old.answer()  # it may or may not know yet
        old.begin("until_error")
        assert old.answer()["error"] == "Excluded"
        new.send(one.link.me, b"end")
        one.until_message(b"end")
        assert {d.sender for d in one.deliveries} == {new.me}

    # -- bad networks ---------------------------------------------------------------------------

    def test_a_silent_partition_ends_a_lease(self, meeting: Meeting) -> None:
        """The peer behind it learns so when the network is back."""
        _need(meeting.proxies, "network")
        one = Reader(meeting.open("one", terms=QUICK))
        link, proxy = meeting.open_proxied("far", terms=QUICK)
        far = Reader(link)
        activate(one, far)
        start_s = far.link.lease_start_s()
        proxy.stall()
        view = one.until_without(far.link.me)
        assert is_cut(view)
        assert time.monotonic() >= start_s + QUICK.lease_s
        assert time.monotonic() - far.link.lease_start_s() >= QUICK.lease_s
        proxy.go()
        assert isinstance(far.until_error(), Excluded)

    def test_a_short_stall_is_nothing(self, meeting: Meeting) -> None:
        """Shorter than the lease: no view changes, nothing is lost."""
        _need(meeting.proxies, "network")
        one = Reader(meeting.open("one"))
        link, proxy = meeting.open_proxied("far")
        far = Reader(link)
        activate(one, far)
        num_views = len(one.views)
        proxy.stall()
        for i in range(10):
            one.link.send(far.link.me, *_named(i))
            if i == 5:
                time.sleep(0.5)  # the stall has to last for the data to wait in it
        proxy.go()
        assert [number_of(d) for d in far.until_deliveries(10)] == list(range(10))
        far.link.send(one.link.me, b"end")
        one.until_message(b"end")
        assert len(one.views) == num_views

    @pytest.mark.parametrize("mid_frame", [False, True])
    def test_a_cut_connection(self, meeting: Meeting, mid_frame: bool) -> None:
        """Again and again while data streams both ways, between frames or within one."""
        _need(meeting.proxies, "network")
        near = Reader(meeting.open("near", terms=PATIENT))
        link, proxy = meeting.open_proxied("far", terms=PATIENT)
        far = Reader(link)
        first = activate(near, far)
        if meeting.resumes:
            self._cuts_are_invisible(near, far, proxy, mid_frame)
            assert max(view.number for view in near.views + far.views) == first.number
        else:
            for _ in range(3):
                self._a_cut_with_the_same_roster(near, far, proxy, mid_frame)

    def _cuts_are_invisible(self, near: Reader, far: Reader, proxy: Proxy, mid_frame: bool) -> None:
        num_cuts = 25 if mid_frame else 10
        done = threading.Event()
        sent: dict[PeerId, int] = {}

        def send(link: Link, to: PeerId) -> None:
            dice = random.Random(to.name)  # noqa: S311
            i = 0
            while not done.is_set():
                message, data = sealed(i, dice.randrange(64 << 10))
                link.send(to, message, [data], timeout_s=PATIENCE_S)
                i += 1
            sent[link.me] = i
            link.send(to, b"end")

        def spoil() -> None:
            dice = random.Random(num_cuts)  # noqa: S311
            for i in range(num_cuts):
                _await(lambda i=i: proxy.num_connections > i and proxy.num_cuts >= i)
                if mid_frame:
                    proxy.cut_after(dice.randrange(1, 300_000))
                    _await(lambda i=i: proxy.num_cuts > i)
                else:
                    time.sleep(dice.random() * 0.05)  # any moment is a good one
                    proxy.cut()
            _await(lambda: proxy.num_connections > num_cuts)
            done.set()

        together(
            spoil,
            lambda: send(near.link, far.link.me),
            lambda: send(far.link, near.link.me),
            lambda: near.until_message(b"end"),
            lambda: far.until_message(b"end"),
        )
        for reader, sender in ((near, far.link.me), (far, near.link.me)):
            numbers = [number_of(d) for d in reader.deliveries[:-1]]
            assert numbers == list(range(sent[sender]))

    def _a_cut_with_the_same_roster(
        self, near: Reader, far: Reader, proxy: Proxy, mid_frame: bool
    ) -> None:
        cut, roster = near.views[-1].cut, set(near.views[-1].peers())
        if mid_frame:
            before = proxy.num_cuts
            proxy.cut_after(random.randrange(1, 200_000))  # noqa: S311
            while proxy.num_cuts == before:
                near.link.send(far.link.me, *_named(0), timeout_s=PATIENCE_S)
                far.link.send(near.link.me, *_named(0), timeout_s=PATIENCE_S)
        else:
            proxy.cut()
        for reader in (near, far):
            view = reader.until_view(lambda view: view.cut != cut)
            assert set(view.peers()) == roster
        near.link.send(far.link.me, b"after the cut", timeout_s=PATIENCE_S)
        far.link.send(near.link.me, b"after the cut", timeout_s=PATIENCE_S)
        near.until_message(b"after the cut")
        far.until_message(b"after the cut")

    def test_a_peer_that_stays_away_is_out_after_the_grace(self, meeting: Meeting) -> None:
        """And is told so when it is back."""
        _need(meeting.proxies, "network")
        one = Reader(meeting.open("one"))
        link, proxy = meeting.open_proxied("far")
        far = Reader(link)
        activate(one, far)
        start_s = time.monotonic()
        proxy.refuse()
        proxy.cut()
        assert is_cut(one.until_without(far.link.me))
        assert time.monotonic() - start_s < STEADY.lease_s / 2
        proxy.accept()
        assert isinstance(far.until_error(), Excluded)

    def test_a_meeting_point_that_restarts(self, meeting: Meeting) -> None:
        """Its peers come back as what they were; one cut tells that messages may be missing."""
        _need(meeting.restarts, "meeting point that can restart")
        # Whoever decides may have to wait for one lease before it knows that all are back.
        terms = msgspec.structs.replace(STEADY, lease_s=8.0)
        readers = [Reader(meeting.open(f"p{i}", terms=terms)) for i in range(3)]
        before = activate(*readers[:2])
        readers[2].until_view(lambda view: view.number >= before.number)
        together(meeting.restart)
        views = [
            reader.until_view(lambda view: view.cut > before.cut and len(view.roster) == 3)
            for reader in readers
        ]
        for view in views:
            assert view.number > before.number
            assert _states(view.roster) == _states(before.roster)
            assert view.founder is None
        assert len({view.cut for view in views}) == 1
        assert readers[2].num_gaps == 1, "a watching peer learns of it by a Gap"
        everybody = [reader.link for reader in readers]
        for link in everybody:
            link.send(None, b"again", [b"x" * 1000])
            for other in everybody:
                if other is not link:
                    link.send(other.me, b"and direct")
            link.flush(PATIENCE_S)
        for reader in readers:
            together(lambda r=reader: r.until_deliveries(4))
        activate(readers[2])

    # -- closing --------------------------------------------------------------------------------

    def test_close_wakes_whoever_waits(self, meeting: Meeting) -> None:
        """In send and in receive, at once; the others stay as they are."""
        one, slow, third = (Reader(meeting.open(name)) for name in ("one", "slow", "third"))
        activate(one, slow, third)
        fill(one.link, slow.link.me)
        waiting = threading.Barrier(4)

        def blocked(wait: Callable[[], object]) -> float:
            waiting.wait()
            with pytest.raises(LinkClosed):
                wait()
            return time.monotonic()

        def close() -> float:
            waiting.wait()
            time.sleep(0.1)  # so that the others are inside
            start_s = time.monotonic()
            one.link.close()
            return start_s

        *ended, start_s = together(
            lambda: blocked(lambda: one.link.send(slow.link.me, *_part(1000))),
            lambda: blocked(lambda: one.link.send(None, *_part(1000))),
            lambda: blocked(lambda: one.until(lambda event: False)),
            close,
        )
        assert max(ended) - start_s < 5
        for call in (
            lambda: one.link.send(None, b""),
            lambda: one.link.tell(Ready()),
            one.link.flush,
            one.link.receive,
        ):
            with pytest.raises(LinkClosed):
                call()
        assert one.link.lease_start_s() == float("-inf")
        third.until_without(one.link.me)
        slow.link.send(third.link.me, b"unaffected")
        third.until_message(b"unaffected")

    def test_close_is_idempotent_from_any_thread(self, meeting: Meeting) -> None:
        """Also while data comes in."""
        for i in range(3):
            sender, link = meeting.open(f"sender{i}"), meeting.open(f"closer{i}")
            Reader(sender).until_view(lambda view, link=link: link.me in view.peers())

            def send(sender: Link = sender, to: PeerId = link.me) -> None:
                try:
                    for _ in range(200):
                        sender.send(to, *_part(10_000), timeout_s=0.2)
                except (PeerGone, LinkTimeout):
                    return

            together(send, *(link.close for _ in range(8)))
            link.close()
            sender.close()


def _states(roster: tuple[Member, ...]) -> list[tuple[PeerId, PeerState]]:
    return [(member.peer, member.state) for member in roster]


def _part(size: int) -> tuple[bytes, list[bytes]]:
    return b"part", [os.urandom(size)]


def _named(i: int) -> tuple[bytes, list[bytes]]:
    message, data = sealed(i, 10_000)
    return message, [data]


def _need(supported: bool, what: str) -> None:
    if not supported:
        pytest.skip(f"this link has no {what}")


def _await(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)
