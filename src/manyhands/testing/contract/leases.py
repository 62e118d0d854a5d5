"""The contract of links: beats and leases: who is silent for too long is out; closing a link."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from manyhands.core.errors import (
    LinkClosed,
    LinkTimeout,
    PeerGone,
)
from manyhands.core.peers import PeerId, PeerState
from manyhands.links.base import Link
from manyhands.links.messages import Leaving, Ready

if TYPE_CHECKING:
    from collections.abc import Callable
from manyhands.testing.contract.kit import (
    PATIENCE_S,
    QUICK,
    STEADY,
    Meeting,
    Reader,
    activate,
    fill,
    is_cut,
    need,
    part_of,
    state_of,
    together,
)


class LeasesContract:
    """Beats and leases: who is silent for too long is out."""

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
        need(meeting.spawns, "peers of other processes")
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
        need(meeting.spawns, "peers of other processes")
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
        need(meeting.spawns, "peers of other processes")
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


class ClosingContract:
    """Closing a link."""

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
            lambda: blocked(lambda: one.link.send(slow.link.me, *part_of(1000))),
            lambda: blocked(lambda: one.link.send(None, *part_of(1000))),
            lambda: blocked(lambda: one.until(lambda event: False)),
            close,
        )
        assert max(ended) - start_s < PATIENCE_S / 2  # and not when their time is up
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
                        sender.send(to, *part_of(10_000), timeout_s=0.2)
                except (PeerGone, LinkTimeout):
                    return

            together(send, *(link.close for _ in range(8)))
            link.close()
            sender.close()
