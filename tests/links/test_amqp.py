"""The AMQP link keeps the contract of every link, over a real RabbitMQ, and more."""

from __future__ import annotations

import dataclasses
import threading
import time
from urllib.parse import quote

import msgspec
import pytest
import trustme

from manyhands.core.address import parse_address
from manyhands.core.errors import LinkBroken, Refused
from manyhands.core.peers import PeerState
from manyhands.links.base import LinkSettings, open_link
from manyhands.testing.broker import Broker, TlsFiles
from manyhands.testing.contract import (
    PATIENCE_S,
    QUICK,
    STEADY,
    LinkContract,
    Meeting,
    Reader,
    activate,
    state_of,
)


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
    for sender, receiver in ((one, other), (other, one)):
        sender.link.send(receiver.link.me, b"direct", [b"d" * 1000], timeout_s=PATIENCE_S)
        receiver.until_message(b"direct")
        sender.link.send(None, b"to all", [b"a" * 1000], timeout_s=PATIENCE_S)
        receiver.until_message(b"to all")


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

    def test_the_last_one_leaves_nothing_behind(self, broker):
        with AmqpMeeting(broker) as meeting:
            one, two = meeting.open("one"), meeting.open("two")
            activate(Reader(one), Reader(two))
            two.close()
            Reader(one).until_without(two.me)
            one.close()
            for what in ("list_queues", "list_exchanges"):
                assert meeting.run not in broker.ctl(what, "name")

    def test_a_run_whose_peers_all_died_waits_before_it_starts_afresh(self, broker):
        """Some of them might only be cut off; a newcomer must not found the run anew at once."""
        with AmqpMeeting(broker) as meeting:
            victim = meeting.spawn("victim", terms=QUICK)
            victim.do("ready")
            victim.kill()
            start_s = time.monotonic()
            late = meeting.open("late", terms=QUICK)
            assert time.monotonic() - start_s > QUICK.lease_s / 2
            late.close()


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
