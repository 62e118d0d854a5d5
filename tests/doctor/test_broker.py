"""A RabbitMQ broker, examined: each failure provoked for real."""

from __future__ import annotations

import datetime
import ssl
import time
import uuid

import pytest
import trustme

from manyhands.core.address import parse_address
from manyhands.doctor import limits
from manyhands.doctor.broker import (
    Server,
    check_broker_address,
    examine_broker,
    judge_server,
    private_run,
)
from manyhands.doctor.certificate import check_certificate
from manyhands.doctor.limits import Budget
from manyhands.doctor.report import Status
from manyhands.testing.broker import TlsFiles
from tests.doctor.conftest import Found

SECONDS = 0.1
MH = "^mh\\."


def examine(url):
    return Found(examine_broker(parse_address(url), seconds=SECONDS, budget=Budget(60.0)))


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture
def user(broker):
    """Adds a user with these rights; gives its URL."""

    def add(configure=MH, write=MH, read=MH):
        name = f"user-{uuid.uuid4().hex[:8]}"
        broker.add_user(name, "s3cret-w0rd", configure=configure, write=write, read=read)
        return broker.url(name, "s3cret-w0rd")

    return add


def names_at(broker):
    listed = broker.ctl("list_exchanges", "name") + broker.ctl("list_queues", "name")
    return [line for line in listed.splitlines() if "doctor-" in line]


def is_left_as_it_was(broker):
    """Soon: a broker may take its time to see that somebody has hung up."""
    deadline = time.monotonic() + 30
    while names_at(broker):
        if time.monotonic() > deadline:
            return False
    return True


def test_a_broker_that_works(broker, user):
    found = examine(user())
    assert found.problems == []
    assert found.skipped == ["tls", "clock offset"]
    assert found["server"].data["product"] == "RabbitMQ"
    assert found["limits"].data["frame_max"] == 131072
    assert found["bandwidth"].data["up_mb_per_s"] > 0
    assert found["bandwidth"].data["down_mb_per_s"] > 0
    assert found["latency"].data["messages"] == 50
    assert is_left_as_it_was(broker)


def test_rights_for_one_run_are_enough_with_its_name(user):
    url = user(*[r"^mh\.mine(\.|$)"] * 3)
    assert examine(url).problems == ["permissions"]
    found = examine(f"{url}?run=mine")
    assert found.problems == []
    assert found["join"].data["run"].startswith("mine.doctor-")


def test_wrong_password(broker):
    found = examine(broker.url("guest", "wr0ng-password"))
    assert found.problems == ["credentials"]
    assert "wr0ng-password" not in repr(found)


def test_missing_vhost(broker):
    found = examine(broker.url(vhost="nowhere"))
    assert found.problems == ["vhost"]
    assert found["credentials"].status is Status.OK
    assert "add_vhost nowhere" in found["vhost"].remedy


@pytest.mark.parametrize(
    ("rights", "cannot"),
    [
        ({"configure": "^$"}, ["declare exchanges", "declare queues"]),
        ({"write": "^$"}, ["bind queues", "bind exchanges", "publish"]),
        ({"read": "^$"}, ["bind queues", "bind exchanges", "consume"]),
        (
            {"configure": "^$", "write": "^$", "read": "^$"},
            ["declare exchanges", "declare queues", "bind queues", "bind exchanges", "consume"],
        ),
    ],
)
def test_missing_permissions_are_all_named(broker, user, rights, cannot):
    found = examine(user(**rights))
    assert found.problems == ["permissions"]
    finding = found["permissions"]
    missing = finding.data["missing"]
    assert {m["permission"] for m in missing} == set(rights)
    assert set(cannot) <= {m["step"] for m in missing}
    assert all(m["name"].startswith("mh.doctor-") for m in missing)
    assert "rabbitmqctl set_permissions -p / user-" in finding.remedy
    assert is_left_as_it_was(broker)


def test_nothing_listens(closed_port):
    assert examine(f"amqp://127.0.0.1:{closed_port}").problems == ["tcp"]


def test_a_port_that_says_nothing(silent_port, monkeypatch):
    monkeypatch.setattr(limits, "LOGIN_S", 0.3)
    found = examine(f"amqp://127.0.0.1:{silent_port}")
    assert found.problems == ["credentials"]
    assert "says nothing" in found["credentials"].remedy


def test_a_web_server(http_port):
    plain = examine(f"amqp://127.0.0.1:{http_port}")
    assert plain.problems == ["credentials"]
    assert "a web server" in plain["credentials"].remedy
    tls = examine(f"amqps://127.0.0.1:{http_port}")
    assert tls.problems == ["tls"]
    assert "a web server" in tls["tls"].remedy


def test_tls_and_alarm(fresh_broker, authority, tmp_path):
    files = {"key": tmp_path / "key.pem", "certificate": tmp_path / "cert.pem"}
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(files["key"])
    issued.cert_chain_pems[0].write_to_path(files["certificate"])
    ca = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(ca)
    broker = fresh_broker(tls=TlsFiles(**files, authority=ca))
    good = examine(f"{broker.amqps_url()}?ca_file={ca}")
    assert good.problems == []
    assert good["tls"].data["version"].startswith("TLS")
    unknown = examine(broker.amqps_url())
    assert unknown.problems == ["tls"]
    assert "ca_file=" in unknown["tls"].remedy
    assert {"credentials", "join"} <= set(unknown.skipped)  # no password to a stranger
    plain = examine(f"amqps://127.0.0.1:{broker.ports.amqp}")
    assert plain.problems == ["tls"]
    broker.set_memory_watermark(1)
    alarm = examine(broker.url())
    assert alarm.problems == ["alarm"]
    assert "memory" in alarm["alarm"].summary
    broker.set_memory_watermark(0.4)  # a broker in an alarm does not even see who hangs up
    assert is_left_as_it_was(broker)


@pytest.fixture
def tls_port(listen):
    """Starts a TLS server with this certificate; gives its port."""

    def start(issued):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        issued.configure_cert(context)

        def serve(sock):
            sock.settimeout(10.0)
            context.wrap_socket(sock, server_side=True).close()

        return listen(serve)

    return start


def test_a_certificate_for_another_host(authority, tls_port, tmp_path):
    ca = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(ca)
    port = tls_port(authority.issue_cert("rabbit.example.org"))
    address = parse_address(f"amqps://localhost:{port}/?ca_file={ca}")
    (finding,) = check_certificate(address, 10.0).findings
    assert finding.status is Status.PROBLEM
    assert "rabbit.example.org" in finding.summary


def test_an_expired_certificate(authority, tls_port, tmp_path):
    ca = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(ca)
    past = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
    port = tls_port(authority.issue_cert("localhost", not_after=past))
    address = parse_address(f"amqps://localhost:{port}/?ca_file={ca}")
    (finding,) = check_certificate(address, 10.0).findings
    assert finding.summary == "the certificate has expired on 2024-01-01"


def test_a_certificate_that_ends_soon(authority, tls_port, tmp_path):
    ca = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(ca)
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=3)
    port = tls_port(authority.issue_cert("localhost", not_after=soon))
    address = parse_address(f"amqps://localhost:{port}/?ca_file={ca}")
    outcome = check_certificate(address, 10.0)
    assert outcome.findings[0].status is Status.WARNING
    assert outcome.value is not None


@pytest.mark.parametrize("text", [None, "this is no certificate"])
def test_a_ca_file_that_cannot_be_read(tmp_path, text):
    ca = tmp_path / "ca.pem"
    if text is not None:
        ca.write_text(text)
    (finding,) = check_certificate(parse_address(f"amqps://h/?ca_file={ca}"), 1.0).findings
    assert finding.status is Status.PROBLEM
    assert "PEM" in finding.remedy


@pytest.mark.parametrize(
    ("url", "status"),
    [
        ("amqp://guest:guest@127.0.0.1", Status.OK),
        ("amqps://guest:guest@far.example", Status.WARNING),  # guest is let in locally only
        ("amqp://ann:pw@far.example/?insecure=1", Status.WARNING),
        ("amqps://ann:pw@far.example", Status.OK),
    ],
)
def test_addresses(url, status):
    (finding,) = check_broker_address(parse_address(url))
    assert finding.status is status


@pytest.mark.parametrize(
    ("product", "version", "status"),
    [
        ("RabbitMQ", "3.10.8", Status.OK),
        ("RabbitMQ", "4.1.0", Status.OK),
        ("RabbitMQ", "3.9.29", Status.WARNING),
        ("LavinMQ", "2.0.0", Status.WARNING),
    ],
)
def test_servers(product, version, status):
    server = Server(
        product=product, version=version, frame_max=131072, channel_max=2047, heartbeat_s=60
    )
    assert judge_server(server).status is status


def test_private_runs():
    named = private_run(parse_address("amqp://127.0.0.1/?run=mine"))
    assert named.startswith("mine.doctor-")
    long = private_run(parse_address(f"amqp://127.0.0.1/?run={'x' * 64}"))
    assert long.startswith("doctor-")
