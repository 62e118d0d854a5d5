"""A broker of our own: it works, it is alone, and it leaves nothing."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
import time
from urllib.parse import unquote, urlsplit

import amqp
import psutil
import pytest
import trustme

from manyhands.testing import broker as broker_module
from manyhands.testing.broker import Broker, BrokerError, TlsFiles
from manyhands.testing.processes import is_gone


def connect(url, **arguments):
    parts = urlsplit(url)
    return amqp.Connection(
        host=f"{parts.hostname}:{parts.port}",
        userid=unquote(parts.username),
        password=unquote(parts.password),
        virtual_host=unquote(parts.path[1:]),
        connect_timeout=30,
        **arguments,
    )


def publish_and_get(connection, queue):
    channel = connection.channel()
    channel.queue_declare(queue, exclusive=True)
    channel.basic_publish(amqp.Message(b"hello"), routing_key=queue)
    deadline = time.monotonic() + 30
    while (message := channel.basic_get(queue, no_ack=True)) is None:
        assert time.monotonic() < deadline
    return message.body


def test_publish_and_get(broker):
    with connect(broker.url()) as connection:
        assert publish_and_get(connection, "publish-and-get") == b"hello"


def test_listens_on_loopback_only(broker):
    listening = [
        connection.laddr.ip
        for pid in broker.process_ids()
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert set(listening) <= {"127.0.0.1", "::1"}
    assert len(listening) >= 3  # amqp, dist, epmd


def test_limited_user_is_refused(broker):
    broker.add_vhost("small")
    broker.add_user("li:mited", "p@ss/word", configure="^mine-", write="", read="", vhost="small")
    with connect(broker.url("li:mited", "p@ss/word", "small")) as connection:
        connection.channel().queue_declare("mine-1", exclusive=True)
        with pytest.raises(amqp.AccessRefused):
            connection.channel().queue_declare("yours-1", exclusive=True)
    with pytest.raises(amqp.NotAllowed):
        connect(broker.url("li:mited", "p@ss/word")).connect()


def test_ctl_says_what_failed_without_the_password(broker):
    broker.add_user("twice", "first-secret")
    with pytest.raises(BrokerError, match=r"rabbitmqctl add_user .*already exists") as caught:
        broker.add_user("twice", "second-secret")
    assert "secret" not in str(caught.value)


def test_memory_alarm(broker):
    broker.set_memory_watermark(1)
    try:
        deadline = time.monotonic() + 30  # each look takes seconds where others work too
        while "memory" not in broker.ctl("eval", "rabbit_alarm:get_alarms()."):
            assert time.monotonic() < deadline
    finally:
        broker.set_memory_watermark(0.4)
    deadline = time.monotonic() + 30
    while "memory" in broker.ctl("eval", "rabbit_alarm:get_alarms()."):
        assert time.monotonic() < deadline


def test_two_nodes_do_not_see_each_other_and_one_survives_kill_and_restart(broker, fresh_broker):
    other = fresh_broker()
    with connect(broker.url()) as here, connect(other.url()) as there:
        here.channel().queue_declare("only-here", exclusive=True)
        with pytest.raises(amqp.NotFound):
            there.channel().queue_declare("only-here", passive=True)
    assert other.node_name not in broker.ctl("cluster_status")

    other.add_user("kept", "kept")
    old_ids = other.process_ids()
    other.kill()
    with pytest.raises(OSError, match="refused"):
        connect(other.url()).connect()
    other.restart()
    assert other.process_ids() & old_ids  # epmd stayed
    with connect(other.url("kept", "kept")) as connection:
        publish_and_get(connection, "after-restart")


def test_stop_leaves_no_process_and_no_file(fresh_broker, tmp_path):
    folder = tmp_path / "node"
    node = fresh_broker(folder=folder)
    family = [psutil.Process(pid) for pid in node.process_ids()]
    assert len(family) >= 3  # the node, a helper of its own, epmd
    node.stop()
    node.stop()
    assert all(is_gone(process) for process in family)
    assert not folder.exists()


def test_amqps(fresh_broker, tmp_path):
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    files = TlsFiles(
        certificate=tmp_path / "cert.pem", key=tmp_path / "key.pem", authority=tmp_path / "ca.pem"
    )
    certificate.cert_chain_pems[0].write_to_path(files.certificate)
    certificate.private_key_pem.write_to_path(files.key)
    authority.cert_pem.write_to_path(files.authority)
    node = fresh_broker(tls=files)
    trust = {"ca_certs": str(files.authority), "cert_reqs": ssl.CERT_REQUIRED}
    with connect(node.amqps_url(), ssl=trust) as connection:
        assert publish_and_get(connection, "tls") == b"hello"


def test_amqps_url_needs_tls(broker):
    with pytest.raises(BrokerError, match=r"Broker\(tls="):
        broker.amqps_url()


def test_a_node_that_does_not_start_says_why_and_leaves_nothing(tmp_path):
    node = Broker(folder=tmp_path / "node", settings={"listeners.tcp.1": "nonsense"})
    with pytest.raises(BrokerError, match=r"(?s)ended with code \d.*node\.log.*nonsense"):
        node.start()
    assert not node.process_ids()
    assert not (tmp_path / "node").exists()


def test_missing_server_is_an_error_with_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr(broker_module, "DEBIAN_SERVER", tmp_path / "rabbitmq-server")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BrokerError, match="sudo apt-get install --no-install-recommends rabbit"):
        Broker()


def test_a_test_that_asks_for_the_shared_broker_late_is_not_blamed(tmp_path):
    """The broker starts inside the test, after the leak check took its first look."""
    conftest = os.path.join(os.path.dirname(__file__), "..", "conftest.py")
    with open(conftest, encoding="utf-8") as file:
        (tmp_path / "conftest.py").write_text(file.read())
    (tmp_path / "test_it.py").write_text(
        "def test_late(request): assert request.getfixturevalue('broker').process_ids()\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir=."]
    command.append(f"--basetemp={tmp_path / 'inner'}")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert "error" not in done.stdout, done.stdout
