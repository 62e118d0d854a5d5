"""The contract of links: bad networks: cuts, stalls, restarts."""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING

import msgspec
import pytest

from manyhands.core.errors import (
    Excluded,
)
from manyhands.core.peers import PeerId
from manyhands.links.base import Link
from manyhands.testing.proxy import Proxy

if TYPE_CHECKING:
    pass
from manyhands.testing.contract.kit import (
    PATIENCE_S,
    PATIENT,
    QUICK,
    STEADY,
    Meeting,
    Reader,
    activate,
    is_cut,
    need,
    number_of,
    numbered,
    sealed,
    states_of,
    together,
    wait_until,
)


class NetworksContract:
    """Bad networks: cuts, stalls, restarts."""

    def test_a_silent_partition_ends_a_lease(self, meeting: Meeting) -> None:
        """The peer behind it learns so when the network is back."""
        need(meeting.proxies, "network")
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
        need(meeting.proxies, "network")
        one = Reader(meeting.open("one"))
        link, proxy = meeting.open_proxied("far")
        far = Reader(link)
        activate(one, far)
        num_views = len(one.views)
        proxy.stall()
        for i in range(10):
            one.link.send(far.link.me, *numbered(i))
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
        need(meeting.proxies, "network")
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
                wait_until(lambda i=i: proxy.num_connections > i and proxy.num_cuts >= i)
                if mid_frame:
                    proxy.cut_after(dice.randrange(1, 300_000))
                    wait_until(lambda i=i: proxy.num_cuts > i)
                else:
                    time.sleep(dice.random() * 0.05)  # any moment is a good one
                    proxy.cut()
            wait_until(lambda: proxy.num_connections > num_cuts)
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
                near.link.send(far.link.me, *numbered(0), timeout_s=PATIENCE_S)
                far.link.send(near.link.me, *numbered(0), timeout_s=PATIENCE_S)
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
        need(meeting.proxies, "network")
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
        need(meeting.restarts, "meeting point that can restart")
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
            assert states_of(view.roster) == states_of(before.roster)
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
