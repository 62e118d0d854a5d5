"""Faults on demand: the endpoint's own checks meet them."""

from __future__ import annotations

import time
from contextlib import ExitStack

import msgspec
import pytest

from manyhands.core.peers import PeerState
from manyhands.links.base import LinkSettings, open_link
from manyhands.links.hub import Hub
from manyhands.links.messages import Leaving, Ready
from manyhands.testing.contract import PATIENT, STEADY, Reader, activate, number_of, sealed
from manyhands.testing.faulty import Cut, Delay, Drop, Duplicate, Reorder, open_faulty
from manyhands.testing.peer import PeerProcess
from manyhands.testing.proxy import Proxy


@pytest.fixture(params=["local", "hub"])
def room(request):
    """open(name, script) -> Reader, over a local link and over a hub."""
    with ExitStack() as stack:
        if request.param == "hub":
            hub = stack.enter_context(Hub("127.0.0.1:0", insecure=True))
            url = f"hub://127.0.0.1:{hub.address.port}/run?insecure=1"
        else:
            url = "local:///run"

        def open_one(name, script=()):
            settings = LinkSettings(terms=STEADY)
            link = open_faulty(url, script, name=name, settings=settings)
            return Reader(stack.enter_context(link))

        yield open_one


def send(reader: Reader, to, count: int, start: int = 0) -> None:
    for i in range(start, start + count):
        message, data = sealed(i, 100)
        reader.link.send(to, message, [data])


def numbers(reader: Reader, count: int) -> list[int]:
    return [number_of(delivery) for delivery in reader.until_deliveries(count)]


@pytest.mark.parametrize("direct", [False, True])
def test_duplicates_are_dropped(room, direct):
    one, two = room("one", [Duplicate(1), Duplicate(3, extra=4)]), room("two")
    activate(one, two)
    send(one, two.link.me if direct else None, 5)
    assert numbers(two, 5) == [0, 1, 2, 3, 4]
    one.link.send(two.link.me, b"end")
    two.until_message(b"end")
    assert len(two.deliveries) == 6


@pytest.mark.parametrize("direct", [False, True])
def test_a_loss_is_followed_by_a_cut_for_an_active_peer(room, direct):
    one, two = room("one", [Drop(3, count=2)]), room("two")
    before = activate(one, two)
    send(one, two.link.me if direct else None, 5)
    assert numbers(two, 3) == [0, 1, 4]
    for reader in (one, two):
        view = reader.until_view(lambda view: view.cut != before.cut)
        assert view.peers() == before.peers()
    assert two.num_gaps == 0
    send(one, two.link.me if direct else None, 3, start=5)
    assert numbers(two, 6) == [0, 1, 4, 5, 6, 7]
    one.link.tell(Leaving())
    view = two.until_view(lambda view: view.roster[0].state is PeerState.LEAVING)
    assert view.number.n == before.number.n + 2, "one cut for one loss"


@pytest.mark.parametrize("direct", [False, True])
def test_a_loss_is_a_gap_for_a_watching_peer(room, direct):
    one, two = room("one", [Drop(3)]), room("two")
    before = activate(one)
    one.settle(lambda view: two.link.me in view.peers())
    send(one, two.link.me if direct else None, 5)
    assert numbers(two, 4) == [0, 1, 3, 4]
    assert two.num_gaps == 1
    events = [event for event in two.events if event not in two.views]
    assert events.index(next(e for e in events if e not in two.deliveries)) == 2
    assert two.views[-1].cut == before.cut
    two.link.tell(Ready())  # a loss that the room knows nothing of does not lock it out
    two.until_view(lambda view: two.link.me in view.peers(PeerState.ACTIVE))


def test_a_delay_keeps_the_order(room):
    one, two = room("one", [Delay(2, 0.2), Delay(4, 0.1)]), room("two")
    activate(one, two)
    start_s = time.monotonic()
    for i in range(6):
        send(one, two.link.me if i % 2 else None, 1, start=i)
    assert numbers(two, 6) == list(range(6))
    assert time.monotonic() - start_s >= 0.3


def test_senders_overtake_each_other_and_nobody_itself(room):
    """Both wait to be read; the reader's link lets the first one wait for three of the other."""
    one, two, reader = room("one"), room("two"), room("reader", [Reorder(2, behind=3)])
    before = activate(one, two, reader)
    send(one, reader.link.me, 1)
    reader.until_deliveries(1)
    send(one, reader.link.me, 2, start=1)
    one.link.flush()
    send(two, reader.link.me, 3, start=10)
    reader.until_deliveries(6)
    assert [number_of(d) for d in reader.deliveries] == [0, 10, 11, 12, 1, 2]
    one.link.tell(Leaving())
    view = reader.until_view(lambda view: view.roster[0].state is PeerState.LEAVING)
    assert view.cut == before.cut, "nothing was lost"


def test_a_cut_connection_is_resumed():
    with ExitStack() as stack:
        hub = stack.enter_context(Hub("127.0.0.1:0", insecure=True))
        proxy = stack.enter_context(Proxy("127.0.0.1", hub.address.port))
        settings = LinkSettings(terms=PATIENT)
        urls = [f"hub://127.0.0.1:{port}/run?insecure=1" for port in (hub.address.port, proxy.port)]
        two = Reader(stack.enter_context(open_link(urls[0], name="two", settings=settings)))
        script = [Cut(3), Cut(6), Cut(7)]
        link = open_faulty(urls[1], script, name="one", settings=settings, cut=proxy.cut)
        one = Reader(stack.enter_context(link))
        before = activate(one, two)
        send(one, None, 10)
        assert numbers(two, 10) == list(range(10))
        assert proxy.num_cuts == 3
        assert two.views[-1].number == before.number


def test_a_kill_at_message_n_is_a_kill():
    with ExitStack() as stack:
        hub = stack.enter_context(Hub("127.0.0.1:0", insecure=True))
        url = f"hub://127.0.0.1:{hub.address.port}?insecure=1"
        one = Reader(
            stack.enter_context(open_link(url, run="run", settings=LinkSettings(terms=STEADY)))
        )
        activate(one)
        victim = stack.enter_context(PeerProcess())
        victim.open(url, run="run", name="victim", terms=STEADY, kill_at=3)
        victim.do("ready")
        one.until_view(lambda view: victim.me in view.peers(PeerState.ACTIVE))
        for _ in range(2):
            victim.do("send", size=100)
            victim.do("flush")
        start_s = time.monotonic()
        victim.begin("send", size=100)
        view = one.until_without(victim.me)
        assert view.cut == view.number
        assert time.monotonic() - start_s < STEADY.lease_s / 2
        assert len(one.deliveries) == 2


def test_a_script_is_plain_values():
    assert msgspec.to_builtins(Drop(3)) == {"at": 3, "count": 1}
