"""The AMQP link keeps the contract of every link, over a real RabbitMQ, and more."""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
from contextlib import ExitStack
from unittest.mock import MagicMock
from urllib.parse import quote

import msgspec
import pytest
import trustme

from manyhands.core.address import parse_address
from manyhands.core.errors import (
    Excluded,
    LinkBroken,
    LinkClosed,
    LinkTimeout,
    Malformed,
    Refused,
)
from manyhands.core.peers import NO_VIEW, PeerId, PeerState, View, ViewNumber
from manyhands.links.amqp import login_of, open_amqp
from manyhands.links.amqp.channel import AmqpChannel
from manyhands.links.amqp.inbox import Inbox
from manyhands.links.amqp.line import Deaf, Line
from manyhands.links.amqp.login import run_errand
from manyhands.links.amqp.names import BEGUN, Names, declare_control, declare_exchange
from manyhands.links.amqp.out import Out
from manyhands.links.base import LinkSettings, new_peer, open_link
from manyhands.links.messages import (
    SCHEMA,
    Bye,
    Call,
    Data,
    Fence,
    Gap,
    Gone,
    Header,
    Leaving,
    Lost,
    Marker,
    Missing,
    NewView,
    Ready,
    Resign,
    decode_head,
)
from manyhands.testing.broker import Broker, TlsFiles
from manyhands.testing.contract import (
    PATIENCE_S,
    PATIENT,
    QUICK,
    STEADY,
    LinkContract,
    Meeting,
    Reader,
    activate,
    number_of,
    sealed,
    state_of,
)
from manyhands.testing.faulty import Drop, Duplicate, FaultyCarrier
from manyhands.wire.frames import Limits


class AmqpMeeting(Meeting):
    """A virtual host of a RabbitMQ node of our own."""

    resumes = False

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        super().__init__(broker.url())

    def target(self):
        address = parse_address(self.url)
        return address.host, address.port

    def via(self, port):
        address = dataclasses.replace(parse_address(self.url), port=port)
        login = f"{quote(address.user)}:{quote(address.password)}"
        return f"amqp://{login}@127.0.0.1:{port}/{quote(address.vhost, safe='')}"

    def restart(self):
        self.broker.restart()


class TestAmqp(LinkContract):
    @pytest.fixture
    def meeting(self, broker):
        with AmqpMeeting(broker) as meeting:
            yield meeting

    def test_a_meeting_point_that_restarts(self, fresh_broker):
        with AmqpMeeting(fresh_broker()) as meeting:
            super().test_a_meeting_point_that_restarts(meeting)


def settings(**terms) -> LinkSettings:
    return LinkSettings(terms=msgspec.structs.replace(STEADY, **terms), connect_s=PATIENCE_S)


def exchange(one: Reader, other: Reader) -> None:
    """Messages still go both ways, direct and fanned out."""
    # The newer of them is in its own view before it is in the other's.
    one.settle(lambda view: other.link.me in view.peers())
    other.settle(lambda view: one.link.me in view.peers())
    for sender, receiver in ((one, other), (other, one)):
        sender.link.send(receiver.link.me, b"direct", [b"d" * 1000], timeout_s=PATIENCE_S)
        receiver.until_message(b"direct")
        sender.link.send(None, b"to all", [b"a" * 1000], timeout_s=PATIENCE_S)
        receiver.until_message(b"to all")


@pytest.fixture
def patient_farewells(monkeypatch):
    """Whoever leaves waits for its last answers, which a busy broker may not give in a second."""
    for module in ("channel", "control"):
        monkeypatch.setattr(f"manyhands.links.amqp.{module}._FAREWELL_S", PATIENCE_S)


class TestArbiter:
    """The seat moves to another peer; views go on as if nothing had happened."""

    def test_a_killed_arbiter_is_replaced(self, broker):
        with AmqpMeeting(broker) as meeting:
            first = meeting.spawn("first")  # takes the seat: nobody else is there
            first.do("ready")
            one, two = Reader(meeting.open("one")), Reader(meeting.open("two"))
            activate(one, two)
            one.settle(lambda v: state_of(v, first.me) is PeerState.ACTIVE)
            number = one.views[-1].number
            first.kill()
            views = [reader.until_without(first.me) for reader in (one, two)]
            assert views[0] == views[1]
            assert views[0].cut == views[0].number > number
            three = Reader(meeting.open("three"))
            activate(three)
            exchange(one, three)

    def test_a_stopped_arbiter_is_replaced_and_fenced(self, broker):
        with AmqpMeeting(broker) as meeting:
            first = meeting.spawn("first", terms=QUICK)
            first.do("ready")
            one, two = (Reader(meeting.open(name, terms=QUICK)) for name in ("one", "two"))
            activate(one, two)
            one.settle(lambda v: state_of(v, first.me) is PeerState.ACTIVE)
            first.stop()  # the broker notices by its heartbeats and gives the queue to another
            without = one.until_without(first.me)
            assert two.until_without(first.me) == without
            first.go_on()
            first.begin("until_error")
            assert first.answer()["error"] == "Excluded"
            exchange(one, two)
            assert all(
                first.me not in view.peers() for view in one.views if view.number >= without.number
            )

    @pytest.mark.usefixtures("patient_farewells")
    def test_the_last_one_leaves_nothing_behind(self, broker):
        with AmqpMeeting(broker) as meeting:
            one, two = meeting.open("one"), meeting.open("two")
            activate(Reader(one), Reader(two))
            two.close()
            Reader(one).until_without(two.me)
            one.close()
            for what in ("list_queues", "list_exchanges"):
                assert meeting.run not in broker.ctl(what, "name")

    @pytest.mark.parametrize("restarts", [False, True])
    def test_a_run_whose_peers_all_died_waits_before_it_starts_afresh(
        self, fresh_broker, restarts, caplog
    ):
        """Some of them might only be cut off; a newcomer must not found the run anew at once."""
        broker = fresh_broker()
        with AmqpMeeting(broker) as meeting:
            victim = meeting.spawn("victim", terms=QUICK)
            victim.do("ready")
            victim.kill()
            if restarts:
                broker.restart()
            start_s = time.monotonic()
            late = meeting.open("late", terms=QUICK)
            assert time.monotonic() - start_s > QUICK.lease_s / 2
            wait = f"waiting up to {QUICK.lease_s:g} s: run {meeting.run!r} had peers"
            assert any(wait in message for message in caplog.messages)
            late.close()

    def test_whoever_made_the_queue_anybody_may_begin_the_run(self, broker, caplog):
        """The one who made it is slow, or gone before it ever had the seat."""
        with AmqpMeeting(broker) as meeting:
            names = Names(meeting.run)

            def make(channel):
                declare_exchange(channel, names)
                declare_control(channel, names, 1800, 10_000)

            run_errand(login_of(parse_address(meeting.url)), make, timeout_s=PATIENCE_S)
            one = Reader(meeting.open("one"))
            assert one.until_view(lambda v: v.founder is not None).founder == one.link.me
            assert not any("waiting up to" in message for message in caplog.messages)
            two = Reader(meeting.open("two"))
            activate(one, two)
            exchange(one, two)

    def test_a_run_without_its_queue_is_marked_again(self, broker):
        """By whoever has the seat next: a newcomer then knows that it has begun."""
        with AmqpMeeting(broker) as meeting:
            names = Names(meeting.run)

            def is_marked():
                lines = broker.ctl("list_bindings", "source_name", "routing_key").splitlines()
                return [names.begun, BEGUN] in [line.split() for line in lines]

            one = Reader(meeting.open("one"))
            assert is_marked()
            broker.ctl("delete_queue", names.control)
            start_s = time.monotonic()  # who answers a later beat has the seat of another queue
            _await(lambda: one.link.lease_start_s() > start_s)
            assert is_marked()


class TestSeat:
    """Whoever goes, in whatever way, the run has one arbiter that judges."""

    def test_an_arbiter_that_is_out_gives_up_the_seat(self, broker):
        """Its own beats have ended, so it would judge nobody until its user closes the link."""
        with AmqpMeeting(broker) as meeting:
            first, one = Reader(meeting.open("first")), Reader(meeting.open("one"))
            activate(first, one)
            first.link.tell(Resign(False, "for a test"))
            one.until_without(first.link.me)
            assert isinstance(first.until_error(), Excluded)
            queue = f"mh.{meeting.run}.control"
            start_s = time.monotonic()
            while f"{queue}\t1" not in broker.ctl("list_queues", "name", "consumers"):
                # Else it has it until its user closes the link. Each look takes seconds.
                assert time.monotonic() - start_s < PATIENCE_S

    def test_an_arbiter_that_is_out_leaves_the_queue_to_the_last_one(self, broker):
        with AmqpMeeting(broker) as meeting:
            first, one = Reader(meeting.open("first")), Reader(meeting.open("one"))
            activate(first, one)
            first.link.tell(Resign(False, "for a test"))
            one.until_without(first.link.me)
            first.link.close()
            start_s = time.monotonic()
            _await(lambda: one.link.lease_start_s() > start_s)
            two = Reader(meeting.open("two"))
            activate(two)
            exchange(one, two)

    def test_a_control_queue_that_somebody_deletes(self, broker):
        with AmqpMeeting(broker) as meeting:
            one, two = Reader(meeting.open("one")), Reader(meeting.open("two"))
            activate(one, two)
            broker.ctl("delete_queue", f"mh.{meeting.run}.control")
            start_s = time.monotonic()
            for reader in (one, two):
                _await(lambda reader=reader: reader.link.lease_start_s() > start_s)
            activate(Reader(meeting.open("three")))
            exchange(one, two)

    @pytest.mark.usefixtures("patient_farewells")
    def test_those_who_close_one_after_another_leave_nothing_behind(self, broker):
        """Without waiting for each other's views; the next run of that name starts at once."""
        with AmqpMeeting(broker) as meeting:
            links = [meeting.open(f"p{i}") for i in range(4)]
            activate(*map(Reader, links))
            for link in reversed(links):
                link.close()
            assert f"{meeting.run}.control" not in broker.ctl("list_queues", "name")

    @pytest.mark.usefixtures("patient_farewells")
    def test_those_who_close_at_once_leave_nothing_behind(self, broker):
        """The arbiter is out before the others: one of them takes the seat to decide their end."""
        with AmqpMeeting(broker) as meeting:
            for _ in range(3):
                links = [meeting.open(f"p{i}") for i in range(4)]
                activate(*map(Reader, links))
                threads = [threading.Thread(target=link.close) for link in links]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                for what in ("list_queues", "list_exchanges"):
                    assert meeting.run not in broker.ctl(what, "name")

    def test_ready_and_leaving_at_once(self, broker):
        with AmqpMeeting(broker) as meeting:
            one = Reader(meeting.open("one"))
            activate(one)
            hasty = meeting.open("hasty")
            hasty.tell(Leaving())  # means nothing to one who watches
            hasty.tell(Ready())
            hasty.tell(Leaving())
            one.until_view(lambda v: state_of(v, hasty.me) is PeerState.LEAVING)


class TestAway:
    """What happens while a peer's lines are down is made good when they are up."""

    def test_a_cut_in_the_meantime_does_not_count(self, broker):
        """It was made before the new inbox was there, so more may be lost after it."""
        with AmqpMeeting(broker) as meeting:
            one, third, far, proxy = self._three(meeting)
            proxy.refuse()
            proxy.cut()
            third.link.close()
            cut = one.until_without(third.link.me).cut
            proxy.accept()
            for reader in (one, far):
                view = reader.until_view(lambda view: view.cut > cut)
                assert set(view.peers()) == {one.link.me, far.link.me}
            exchange(one, far)

    def test_a_newcomer_in_the_meantime_is_heard(self, broker):
        with AmqpMeeting(broker) as meeting:
            one, third, far, proxy = self._three(meeting)
            proxy.refuse()
            proxy.cut()
            new = Reader(meeting.open("new", terms=PATIENT))
            activate(new)
            proxy.accept()
            cut = far.until_view(lambda view: new.link.me in view.peers()).cut
            new.settle(lambda view: view.cut >= cut)
            for reader in (one, third):
                reader.settle(lambda view: new.link.me in view.peers())
            exchange(new, far)

    def test_a_watching_peer_gets_the_views_it_missed(self, broker):
        with AmqpMeeting(broker) as meeting:
            one = Reader(meeting.open("one", terms=PATIENT))
            link, proxy = meeting.open_proxied("far", terms=PATIENT)
            far = Reader(link)
            cut = activate(one).cut
            far.settle(lambda view: view.cut == cut)
            proxy.refuse()
            proxy.cut()
            new = meeting.open("new", terms=PATIENT)
            one.until_view(lambda view: new.me in view.peers())
            proxy.accept()
            view = far.until_view(lambda view: new.me in view.peers())
            assert view.cut == cut, "a loss of a watching peer is nobody else's business"
            assert far.num_gaps == 1
            activate(far)
            assert far.views[-1].cut == cut

    @pytest.mark.parametrize("word", [Resign(False, "for a test"), Gone(ViewNumber(1, 1))])
    def test_a_word_said_in_the_meantime_is_heard(self, broker, word):
        with AmqpMeeting(broker) as meeting:
            one, _third, far, proxy = self._three(meeting)
            proxy.refuse()
            proxy.cut()
            _await(lambda: far.link._carrier.control.line.channel is None)
            far.link.tell(word)
            proxy.accept()
            one.until_without(far.link.me)
            assert isinstance(far.until_error(), Excluded)

    def test_a_run_that_ended_in_the_meantime(self, broker):
        """It was put out before: it must not go on alone with what it remembers."""
        with AmqpMeeting(broker) as meeting:
            one = Reader(meeting.open("one"))
            link, proxy = meeting.open_proxied("far")
            far = Reader(link)
            activate(one, far)
            proxy.refuse()
            proxy.cut()
            one.until_without(far.link.me)
            one.link.close()
            proxy.accept()
            error = far.until_error()
            assert isinstance(error, Excluded)
            assert "ended while" in str(error)
            far.link.close()
            assert f"mh.{meeting.run}" not in broker.ctl("list_queues", "name")
            new = Reader(meeting.open("new"))  # and the name is free
            activate(new)
            assert [member.peer for member in new.views[-1].roster] == [new.link.me]

    def _three(self, meeting):
        one, third = (Reader(meeting.open(name, terms=PATIENT)) for name in ("one", "third"))
        link, proxy = meeting.open_proxied("far", terms=PATIENT)
        far = Reader(link)
        activate(one, third, far)
        return one, third, far, proxy


class TestBroker:
    """What brokers do to their clients."""

    def test_memory_alarm(self, fresh_broker):
        """Publishing waits, nobody is judged, and all goes on when the alarm is over."""
        broker = fresh_broker()
        with AmqpMeeting(broker) as meeting:
            one, two = (Reader(meeting.open(name, terms=QUICK)) for name in ("one", "two"))
            activate(one, two)
            exchange(one, two)
            number = one.views[-1].number
            broker.set_memory_watermark(1)
            try:
                sent = threading.Thread(
                    target=lambda: one.link.send(two.link.me, b"late", [b"x" * 60000], timeout_s=60)
                )
                sent.start()
                _await(lambda: one.link._carrier.control.blocked)
                time.sleep(3 * QUICK.lease_s)  # longer than anybody's lease
                assert time.monotonic() - one.link.lease_start_s() > QUICK.lease_s, (
                    "without an arbiter that can speak nobody has a lease"
                )
            finally:
                broker.set_memory_watermark(0.4)
            two.until_message(b"late")
            sent.join()
            exchange(one, two)
            assert {v.number for v in one.views + two.views if v.number > number} == set()
            _await(lambda: time.monotonic() - one.link.lease_start_s() < QUICK.lease_s)

    def test_close_in_a_memory_alarm(self, fresh_broker):
        """Whoever waits for the broker to read is woken, and nothing is left."""
        broker = fresh_broker()
        with AmqpMeeting(broker) as meeting:
            one, two = Reader(meeting.open("one")), Reader(meeting.open("two"))
            activate(one, two)
            broker.set_memory_watermark(1)
            try:
                ended = []

                def send():
                    try:
                        while True:
                            one.link.send(None, b"part", [bytes(STEADY.part_bytes)])
                    except LinkClosed as error:
                        ended.append(error)

                sender = threading.Thread(target=send)
                sender.start()
                _await(lambda: one.link._carrier.control.blocked)
                start_s = time.monotonic()
                one.link.close()
                sender.join(PATIENCE_S)
                assert ended
                assert time.monotonic() - start_s < 10
            finally:
                broker.set_memory_watermark(0.4)
            two.until_without(one.link.me)

    def test_a_user_that_may_only_touch_its_own_names(self, broker):
        """As on a shared host: one vhost, no admin rights, names under one prefix."""
        broker.add_vhost("hosted")
        broker.add_user("tenant", "s3cret", "^mh\\.", "^mh\\.", "^mh\\.", vhost="hosted")
        with AmqpMeeting(broker) as meeting:
            meeting.url = broker.url("tenant", "s3cret", "hosted")
            one, two = Reader(meeting.open("one")), Reader(meeting.open("two"))
            activate(one, two)
            exchange(one, two)

    @pytest.mark.parametrize(
        ("rights", "missing"),
        [
            (("^$", ".*", ".*"), "configure"),
            ((".*", "^$", ".*"), "write"),
            ((".*", ".*", "^$"), "read"),
        ],
    )
    def test_a_user_that_may_not(self, broker, rights, missing):
        user = f"limited-{missing}"
        broker.add_user(user, "s3cret", *rights)
        with pytest.raises(Refused, match=r"403.*refused") as caught:
            open_link(broker.url(user, "s3cret"), run="any", settings=settings())
        assert caught.value.code == "permission"
        assert "set_permissions" in str(caught.value)
        assert "s3cret" not in str(caught.value)

    def test_a_user_that_may_bind_but_not_consume(self, broker):
        """A refusal of what is asked after the login: an error too, not another try for ever."""
        broker.add_user("deaf", "s3cret", ".*", ".*", "^mh\\.any(\\.fan.*|\\.begun)?$")
        start_s = time.monotonic()
        with pytest.raises(Refused, match="403") as caught:
            open_link(broker.url("deaf", "s3cret"), run="any", settings=settings())
        assert caught.value.code == "permission"
        assert time.monotonic() - start_s < PATIENCE_S / 2

    @pytest.mark.parametrize("user", ["guest", "nobody"])
    def test_wrong_password(self, broker, user):
        with pytest.raises(Refused) as caught:
            open_link(broker.url(user, "wr0ng-pass"), run="any", settings=settings())
        assert caught.value.code == "credentials"
        assert "wr0ng-pass" not in str(caught.value) + repr(caught.value)

    def test_no_such_vhost(self, broker):
        with pytest.raises(Refused) as caught:
            open_link(broker.url(vhost="nowhere"), run="any", settings=settings())
        assert caught.value.code == "vhost"

    def test_a_queue_deleted_under_its_reader_is_a_cut(self, broker):
        with AmqpMeeting(broker) as meeting:
            one, two = Reader(meeting.open("one")), Reader(meeting.open("two"))
            cut = activate(one, two).cut
            inbox = next(
                name
                for name in broker.ctl("list_queues", "name").split()
                if meeting.run in name and f"inbox.{two.link.me.incarnation:x}" in name
            )
            broker.ctl("delete_queue", inbox)
            for reader in (one, two):
                view = reader.until_view(lambda view: view.cut > cut)
                assert set(view.peers()) == {one.link.me, two.link.me}
            exchange(one, two)

    def test_a_reader_that_is_far_behind_can_become_active(self, broker):
        """The switch to its inbox does not wait until it reads, and what it has is in order."""
        with AmqpMeeting(broker) as meeting:
            one, idle = Reader(meeting.open("one")), Reader(meeting.open("idle"))
            activate(one)
            size = STEADY.watch_bytes // 64
            for i in range(60):
                one.link.send(None, *_sealed(i, size), timeout_s=PATIENCE_S)
                if i < 32:  # then its link takes no more, and the rest waits in the watch queue
                    _await(lambda i=i: idle.link.backlog_bytes() > i * size)
            idle.link.tell(Ready())
            one.until_view(lambda v: state_of(v, idle.link.me) is PeerState.ACTIVE)
            for i in range(60, 65):
                one.link.send(None, *_sealed(i, size), timeout_s=PATIENCE_S)
            assert [number_of(d) for d in idle.until_deliveries(65)] == list(range(65))
            assert idle.num_gaps == 0

    def test_a_broker_that_does_not_come_back(self, fresh_broker):
        broker = fresh_broker()
        link = open_link(
            broker.url(), run="any", settings=dataclasses.replace(settings(), outage_s=1.0)
        )
        with link:
            broker.kill()
            error = Reader(link).until_error()
            assert isinstance(error, LinkBroken)
            assert "not found again within 1 s" in str(error)

    def test_amqps(self, fresh_broker, tmp_path):
        authority = trustme.CA()
        certificate = authority.issue_cert("localhost", "127.0.0.1")
        ca, chain, key = (tmp_path / name for name in ("ca.pem", "cert.pem", "key.pem"))
        authority.cert_pem.write_to_path(str(ca))
        certificate.cert_chain_pems[0].write_to_path(str(chain))
        certificate.private_key_pem.write_to_path(str(key))
        broker = fresh_broker(tls=TlsFiles(authority=ca, certificate=chain, key=key))
        with AmqpMeeting(broker) as meeting:
            meeting.url = f"{broker.amqps_url()}?ca_file={ca}"
            one, two = Reader(meeting.open("one")), Reader(meeting.open("two"))
            activate(one, two)
            exchange(one, two)
            with pytest.raises(LinkBroken, match="certificate verify failed"):
                open_link(broker.amqps_url(), run="any", settings=settings())


class TestPlace:
    """The user's own code on the link's thread."""

    @pytest.mark.parametrize(
        ("place", "message"),
        [
            (lambda *_: 1 // 0, "ZeroDivisionError"),
            (lambda *_: [memoryview(bytearray(3))], "`place` gave room"),
        ],
    )
    def test_a_place_that_fails_ends_the_link(self, broker, place, message, caplog):
        with AmqpMeeting(broker) as meeting:
            one, two = Reader(meeting.open("one")), Reader(meeting.open("two", place=place))
            activate(one, two)
            one.link.send(two.link.me, b"hello", [b"12345678"])
            error = two.until_error()
            assert isinstance(error, LinkBroken)
            assert message in str(error)
            start_s = time.monotonic()
            one.until_without(two.link.me)  # it says good-bye, though its user has not closed it
            assert time.monotonic() - start_s < STEADY.lease_s / 2


class TestFaulty:
    """The endpoint's checks over this link."""

    @pytest.fixture
    def pair(self, broker):
        with AmqpMeeting(broker) as meeting, ExitStack() as stack:

            def open_pair(script):
                address = parse_address(meeting.url, run=meeting.run)
                link = open_amqp(
                    address,
                    new_peer("one"),
                    settings(),
                    None,
                    wrap=lambda carrier: FaultyCarrier(carrier, script, None),
                )
                return Reader(stack.enter_context(link)), Reader(meeting.open("two"))

            yield open_pair

    @pytest.mark.parametrize("direct", [False, True])
    def test_duplicates_are_dropped(self, pair, direct):
        one, two = pair([Duplicate(1), Duplicate(3, extra=4)])
        activate(one, two)
        for i in range(5):
            one.link.send(two.link.me if direct else None, *_sealed(i, 100))
        one.link.send(two.link.me, b"end")
        two.until_message(b"end")
        assert [number_of(d) for d in two.deliveries[:-1]] == [0, 1, 2, 3, 4]

    @pytest.mark.parametrize("direct", [False, True])
    def test_a_loss_is_a_cut_for_an_active_peer(self, pair, direct):
        one, two = pair([Drop(3, count=2)])
        before = activate(one, two)
        for i in range(5):
            one.link.send(two.link.me if direct else None, *_sealed(i, 100))
        assert [number_of(d) for d in two.until_deliveries(3)] == [0, 1, 4]
        for reader in (one, two):
            view = reader.until_view(lambda view: view.cut != before.cut)
            assert view.peers() == before.peers()
        assert two.num_gaps == 0
        one.link.tell(Leaving())
        view = two.until_view(lambda view: view.roster[0].state is PeerState.LEAVING)
        assert view.number.n == before.number.n + 2, "one cut for one loss"

    @pytest.mark.parametrize("direct", [False, True])
    def test_a_loss_is_a_gap_for_a_watching_peer(self, pair, direct):
        one, two = pair([Drop(3)])
        before = activate(one)
        one.settle(lambda view: two.link.me in view.peers())
        for i in range(5):
            one.link.send(two.link.me if direct else None, *_sealed(i, 100))
        assert [number_of(d) for d in two.until_deliveries(4)] == [0, 1, 3, 4]
        assert two.num_gaps == 1
        two.link.tell(Ready())
        view = two.until_view(lambda view: two.link.me in view.peers(PeerState.ACTIVE))
        assert view.cut == before.cut


class Stranger(Deaf):
    """Somebody with a login at the broker who sends what comes to their mind."""

    def __init__(self, broker, run):
        self.names = Names(run)
        self._channel = AmqpChannel.open(
            login_of(parse_address(broker.url())), self, setup=lambda channel: None
        )
        self._thread = threading.Thread(target=self._channel.serve)
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._channel.close()
        self._thread.join()

    def send(self, key, header: bytes, body=b""):
        self._channel.publish(self.names.exchange, key, header, [body] if body else [])


class TestStranger:
    """What comes amiss is dropped: no crash, no cut, no room taken."""

    @pytest.fixture
    def run(self, broker):
        with AmqpMeeting(broker) as meeting, Stranger(broker, meeting.run) as stranger:
            one, two = Reader(meeting.open("one")), Reader(meeting.open("two"))
            view = activate(one, two)
            yield stranger, one, two
            start_s = time.monotonic()
            for reader in (one, two):
                _await(lambda reader=reader: reader.link.lease_start_s() > start_s)
            exchange(one, two)
            assert one.views[-1].number == two.views[-1].number == view.number

    def test_in_the_control_queue(self, run):
        stranger, _one, two = run
        known, new = two.link.me, PeerId("new", 12345)
        view, state = two.views[-1].number, PeerState.ACTIVE
        calls = [
            Call(known, 1, view, state, state, None, b"no frame"),
            Call(known, 1, view, state, state, None, b"x" * 50_000),
            Call(known, 1, view, state, state, None, SCHEMA.encode(Leaving())),
            Call(known, 1, view, state, state, None, SCHEMA.encode(Data(1, None, 1, (), b""))),
            Call(known, 1, ViewNumber((1 << 64) - 1, 0), state, state, None),
            Call(known, 1, view, state, state, ViewNumber(0, (1 << 64) - 1)),
            Call(PeerId("n" * 60_000, 5), 0, NO_VIEW, state, state),
            Call(PeerId("two\n", 5), 0, NO_VIEW, state, state),
            Call(PeerId("new", -1), 0, NO_VIEW, state, state),
            Call(new, 0, NO_VIEW, state, state, None, SCHEMA.encode(Bye())),
            Call(new, 0, view, state, state),
        ]
        for call in calls:
            stranger.send("control", SCHEMA.encode(call))
            stranger.send("control", SCHEMA.encode(call, 3), b"abc")
        for header in (b"", b"MH", SCHEMA.encode(Leaving()), b"\xff" * 100_000):
            stranger.send("control", header, b"x" * 1000)

    def test_in_an_inbox(self, run):
        stranger, one, two = run
        me, other = two.link.me.incarnation, one.link.me.incarnation
        view = two.views[-1]
        big = View(ViewNumber((1 << 64) - 1, 0), view.roster)
        heads: list[Header] = [
            Leaving(),
            Bye(),
            Lost(other),
            Gap(1),
            Call(two.link.me, 1, view.number, PeerState.ACTIVE, PeerState.ACTIVE),
            NewView(big),
            NewView(View(view.number._replace(n=view.number.n + 1), view.roster, cut=big.number)),
            Fence(1),
            Marker(1),
            Data(me, me, 1, (), b"from itself"),
            Data(other, other, 1, (), b"to another"),
            Data(other, me, 100, (1 << 40,), b"large"),
            Data(other, None, 100, (3, 4), b"too little"),
        ]
        for key in (f"to.{me:x}", "view"):
            for head in heads:
                stranger.send(key, SCHEMA.encode(head))
                stranger.send(key, SCHEMA.encode(head, 3), b"abc")
                stranger.send(key, SCHEMA.encode(head, 1 << 40), b"abc")
            stranger.send(key, b"", b"x" * (4 << 20))
            stranger.send(key, b"\xff" * 100_000)


class TestInbox:
    """The line that everything arrives by, without a broker."""

    @pytest.fixture
    def carrier(self):
        carrier = MagicMock()
        carrier.me, carrier.terms, carrier.names = PeerId("me", 5), STEADY, Names("run")
        carrier.following, carrier.joined = False, True
        carrier.newest.return_value = View(NO_VIEW, ())
        carrier.sink.backlog_bytes.return_value = 0
        # Real ones where threads ask at once: a mock makes its own truth on the first question.
        carrier.sink_set = threading.Event()
        carrier.sink_set.set()
        return carrier

    def test_a_tag_is_acknowledged_once_and_in_order(self, carrier):
        """By the reader and by beats at the same time; the broker ends the channel otherwise."""
        inbox, acks = Inbox(carrier, None), []
        inbox.line.channel.ack = lambda tag, multiple: acks.append(tag)
        done = threading.Event()

        def beat():
            while not done.is_set():
                inbox.allow_more()

        beats = [threading.Thread(target=beat) for _ in range(3)]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            for thread in beats:
                thread.start()
            for tag in range(1, 3000):
                inbox.on_bad_delivery("watch", tag, Malformed("for a test"))
        finally:
            sys.setswitchinterval(interval)
            done.set()
            for thread in beats:
                thread.join()
        assert acks == sorted(set(acks))

    def test_ready_in_the_middle_of_a_reconnect(self, carrier):
        """The queues that were declared are the ones that are read."""
        inbox, channel = Inbox(carrier, None), MagicMock()
        inbox._setup(MagicMock())
        carrier.following = True
        inbox._start(channel)
        assert [call.args[1] for call in channel.consume.call_args_list] == ["inbox", "watch"]
        assert not inbox.switched

    def test_unsure_before_anything_arrives(self, carrier):
        """A fence that came back before would let an arbiter go on from an old view."""
        inbox, channel = Inbox(carrier, None), MagicMock()
        for _ in range(2):
            inbox._setup(MagicMock())
        channel.consume.side_effect = lambda *_, **__: carrier.renewed.assert_called_once()
        inbox._start(channel)
        assert channel.consume.called

    def test_what_is_held_for_a_switch_is_bounded(self, carrier):
        inbox = Inbox(carrier, None)
        inbox.switch()
        size, num_held = STEADY.part_bytes, 0
        while not inbox.line.channel.abort.called:
            data = Data(9, None, num_held + 1, (size,), b"")
            (target,) = inbox.on_delivery("inbox", 1, False, SCHEMA.encode(data, size), size)
            assert len(target) == size
            inbox.on_body()
            num_held += 1
            assert num_held * size <= 3 * STEADY.watch_bytes
        assert not carrier.sink.delivered.called

    def test_a_switch_of_an_earlier_life_holds_nothing(self, carrier):
        inbox = Inbox(carrier, None)
        inbox.switch()
        inbox.line.channel = MagicMock()  # the line broke and is up again
        carrier.await_sink.return_value.targets.return_value = []
        inbox.on_delivery("inbox", 1, False, SCHEMA.encode(Data(9, None, 1, (), b"")), 0)
        inbox.on_body()
        assert carrier.sink.delivered.called


class TestOpening:
    """Of a line, while the last one of an earlier run takes along what all of them declare."""

    @pytest.mark.parametrize(
        ("code", "refusals", "opens"),
        [("missing", 2, True), ("missing", 99, False), ("permission", 1, False)],
    )
    def test_a_race_with_one_who_leaves(self, monkeypatch, code, refusals, opens):
        dials = []

        def dial(*_args, **_how):
            dials.append(1)
            if len(dials) <= refusals:
                raise Refused(code, "for a test")
            return MagicMock()

        monkeypatch.setattr(AmqpChannel, "open", dial)
        how = dict.fromkeys(("setup", "up", "down", "failed"), MagicMock())
        line = Line("a", MagicMock(), Deaf(), **how, connect_s=1, outage_s=1, heartbeat_s=1)
        if opens:
            line.open()
            line.close()
        else:
            with pytest.raises(Refused, match="for a test"):
                line.open()
            assert len(dials) == (4 if code == "missing" else 1)


class TestOut:
    """The data line, without a broker."""

    def test_order_over_reconnects(self):
        carrier = _OutCarrier()
        out, channel = carrier.out, carrier.connect()
        for seq in (1, 2, 3):
            out.publish("to.5", _data(seq), [b"x"])
        out.on_confirm(1, multiple=False, ok=True)
        channel.broken = True
        out.publish("to.5", _data(4), [b"x"])
        carrier.disconnect()
        out.publish("to.5", _data(5), [b"x"])
        again = carrier.connect(fail_at=3)
        out.publish("to.5", _data(6), [b"x"])
        carrier.disconnect()
        last = carrier.connect()
        assert channel.seqs == [1, 2, 3]
        assert again.seqs == [2, 3]
        assert last.seqs == [2, 3, 4, 5, 6]
        out.on_confirm(5, multiple=True, ok=True)
        out.flush(0)

    def test_flush_waits_for_what_came_before_it_only(self):
        carrier = _OutCarrier()
        out = carrier.out
        out.publish("to.5", _data(1))
        with pytest.raises(LinkTimeout):
            out.flush(0)
        carrier.connect()
        done = threading.Thread(target=lambda: out.flush(PATIENCE_S))
        done.start()
        _await(lambda: out._changed._waiters)
        out.publish("to.5", _data(2))
        out.on_confirm(1, multiple=False, ok=True)
        done.join(PATIENCE_S)
        assert not done.is_alive()
        with pytest.raises(LinkTimeout):
            out.flush(0)
        out.close()
        with pytest.raises(LinkClosed):
            out.flush(0)

    def test_what_waits_is_bounded(self):
        """Also where no window is: a fan-out with nobody but watching peers."""
        carrier = _OutCarrier()
        out, num_sent = carrier.out, 0

        def send():
            nonlocal num_sent
            for seq in range(1, 1000):
                out.publish("from.5", Data(9, None, seq, (1 << 16,), b""), [bytes(1 << 16)])
                num_sent = seq

        sender = threading.Thread(target=send)
        sender.start()
        _await(lambda: out._changed._waiters)
        assert num_sent <= STEADY.watch_bytes / (1 << 16)
        carrier.connect()
        while sender.is_alive():
            out.on_confirm(num_sent + 1, multiple=True, ok=True)
            sender.join(0.001)
        assert num_sent == 999

    def test_close_wakes_a_sender(self):
        out = _OutCarrier().out
        data = Data(9, None, 1, (STEADY.watch_bytes,), b"")
        out.publish("from.5", data)
        sender = threading.Thread(target=lambda: out.publish("from.5", data))
        sender.start()
        _await(lambda: out._changed._waiters)
        out.close()
        sender.join(PATIENCE_S)
        assert not sender.is_alive()

    def test_a_nack_is_a_loss(self):
        carrier = _OutCarrier()
        carrier.connect()
        carrier.out.publish("to.5", _data(1))
        carrier.out.on_confirm(1, multiple=False, ok=False)
        assert carrier.control.said == [Lost(9)]

    def test_a_window_that_comes_back_is_told_once(self):
        carrier = _OutCarrier()
        for _ in range(100):
            carrier.out.on_return(312, "NO_ROUTE", "to.a", b"")
        carrier.out.on_return(312, "NO_ROUTE", "to.b", b"")
        assert carrier.control.said == [Missing(10), Missing(11)]


def _data(seq: int) -> Data:
    return Data(9, 5, seq, (1,), b"")


class _OutChannel:
    """Takes messages until it breaks; the one it breaks at may have got through."""

    def __init__(self, fail_at: int | None) -> None:
        self.seqs: list[int] = []
        self.broken = False
        self._fail_at = fail_at

    def publish(self, exchange, key, header, buffers, *, mandatory, on_tag):
        if self.broken:
            raise LinkBroken("broken before")
        on_tag(len(self.seqs) + 1)
        if len(self.seqs) + 1 == self._fail_at:
            self.broken = True
            raise LinkBroken("broken in the middle")
        head, _ = decode_head(header, Limits())
        self.seqs.append(head.seq)


class _OutCarrier:
    """All that `Out` needs of a carrier."""

    def __init__(self):
        self.me, self.names, self.terms = PeerId("nine", 9), Names("run"), STEADY
        self.said: list[Header] = []
        self.control = self
        self.out = Out(self, None)

    def line(self, name, login, handler, *, setup, up, down):
        self._up, self._down, self.channel = up, down, None
        return self

    def connect(self, fail_at: int | None = None):
        self.channel = _OutChannel(fail_at)
        self._up(self.channel)
        return self.channel

    def disconnect(self):
        self.channel = None
        self._down()

    def say(self, word):
        self.said.append(word)

    def call(self, n, word):
        self.said.append(word)


def _sealed(i: int, size: int) -> tuple[bytes, list[bytes]]:
    message, data = sealed(i, size)
    return message, [data]


def test_secrets_stay_out_of_sight(broker, caplog):
    broker.add_user("modest", "s3cret-pass", ".*", ".*", ".*")
    caplog.set_level("DEBUG")
    with AmqpMeeting(broker) as meeting:
        meeting.url = broker.url("modest", "s3cret-pass")
        link = meeting.open("one")
        shown = repr(link) + repr(vars(link)) + repr(parse_address(meeting.url)) + caplog.text
    assert "s3cret-pass" not in shown


def _await(condition) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
