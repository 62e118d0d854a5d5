"""The contract of links: the order of messages, and of views."""

from __future__ import annotations

import os
import random
import time
from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec
import pytest

from manyhands.core.errors import (
    Excluded,
    LinkTimeout,
    PeerGone,
)
from manyhands.core.peers import PeerId, PeerState, View, ViewNumber
from manyhands.links.base import Delivery, Link
from manyhands.links.messages import Gone, Leaving, Ready, Resign

if TYPE_CHECKING:
    pass
from manyhands.testing.contract.kit import (
    PATIENCE_S,
    STEADY,
    Meeting,
    Reader,
    activate,
    is_cut,
    need,
    state_of,
    together,
)


class OrderContract:
    """Order and completeness: nothing twice, nothing out of turn."""

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


class MembershipContract:
    """Who takes part, in one order for everybody."""

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

    def test_fan_out_is_uploaded_once(self, meeting: Meeting) -> None:
        """However many receive it."""
        readers = [Reader(meeting.open(f"p{i}")) for i in range(6)]
        activate(*readers)
        sender = readers[0].link
        sender.flush(PATIENCE_S)
        before, size, count = sender.bytes_sent, 60_000, 10
        for _ in range(count):
            sender.send(None, b"to all", [os.urandom(size)])
            for reader in readers[1:]:
                reader.until_message(b"to all")
        sender.flush(PATIENCE_S)
        # Headers and beats are little beside it; a second copy would be as much again.
        assert count * size <= sender.bytes_sent - before < 1.5 * count * size

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
        # All watch, and all send at once: with less memory a broker's queue may drop some.
        roomy = msgspec.structs.replace(STEADY, watch_bytes=64 << 20)
        links = together(*(lambda i=i: meeting.open(f"p{i:02}", terms=roomy) for i in range(64)))
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
        need(meeting.spawns, "peers of other processes")
        one = Reader(meeting.open("one"))
        cut = activate(one).cut
        joiner = meeting.spawn("joiner")
        one.until_view(lambda view: joiner.me in view.peers())
        joiner.kill()
        assert one.until_without(joiner.me).cut == cut
