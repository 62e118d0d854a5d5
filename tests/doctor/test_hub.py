"""A hub, examined: each failure provoked for real."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace

import pytest

from manyhands.core.address import HubAddress
from manyhands.core.peers import PeerState
from manyhands.doctor import limits
from manyhands.doctor.hub import check_greeting, examine_hub, judge_offset
from manyhands.doctor.report import Status
from manyhands.links.base import LinkSettings, dial, new_peer
from manyhands.links.hub import Hub
from manyhands.links.messages import Terms
from manyhands.testing.proxy import Proxy
from tests.doctor.conftest import Found

SECONDS = 0.1
INSIDE = ["join", "clock offset"]


@pytest.fixture
def hub():
    with Hub("127.0.0.1:0") as running:
        yield running


@pytest.fixture
def examine(budget):
    def run(address):
        return Found(examine_hub(address, seconds=SECONDS, budget=budget))

    return run


def nowhere(port, **changes):
    values = {"host": "127.0.0.1", "port": port, "token": "t0ken-value", "fingerprint": "ab" * 32}
    return HubAddress(**(values | changes))


@pytest.mark.parametrize("insecure", [False, True])
def test_an_examination_is_nothing_that_a_hub_warns_of(examine, caplog, insecure):
    caplog.set_level(logging.INFO)
    with Hub("127.0.0.1:0", insecure=insecure) as hub:
        assert examine(hub.address).problems == []
        until(lambda: "doctor-near" in caplog.text and caplog.text.count(" is out of run ") == 3)
    assert warned_of(caplog) == []


def test_a_hub_that_serves_other_runs_warns_of_peers_but_not_of_the_doctor(examine, caplog):
    caplog.set_level(logging.INFO)
    with Hub("127.0.0.1:0", runs=frozenset({"mine"})) as hub:
        examine(hub.address)
        until(lambda: "the doctor asked" in caplog.text)
        assert warned_of(caplog) == []
        examine(replace(hub.address, token="wrong-token-value"))
        until(lambda: "token is wrong" in caplog.text)
    assert ["token" in message for message in warned_of(caplog)] == [True]


def warned_of(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def until(holds):
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def test_a_hub_that_works(hub, examine):
    found = examine(hub.address)
    assert found.problems == []
    assert found.skipped == []
    assert abs(found["clock offset"].data["offset_s"]) < 1
    assert found["tls"].data["shown"] == hub.address.fingerprint
    assert found["latency"].data["round_trip_ms"] > 0
    assert found["latency"].data["messages"] == 50
    assert found["bandwidth"].data["up_mb_per_s"] > 0
    assert found["bandwidth"].data["down_mb_per_s"] > 0
    assert found["terms"].data["lease_s"] == Terms().lease_s
    assert found["run"].data["private"]
    assert "is on this machine" in found["door"].summary


def test_a_hub_that_is_reached_over_a_network(hub, examine):
    with Proxy("127.0.0.1", hub.address.port) as proxy:
        found = examine(replace(hub.address, port=proxy.port))
    assert found.problems == []
    assert "door" not in found


def test_an_insecure_hub(examine):
    with Hub("127.0.0.1:0", insecure=True) as hub:
        found = examine(hub.address)
    assert found.problems == []
    assert {"tls", "token"} <= set(found.skipped)


def test_a_run_that_goes_on_is_left_alone(hub, examine):
    inside = replace(hub.address, run="real")
    with dial(inside, new_peer("worker"), LinkSettings()) as link:
        first = hub.room("real").view
        found = examine(inside)
        assert hub.room("real").view == first
        assert link.me in first.peers()
    assert found.problems == []
    assert found["run"].data["private"]


def test_wrong_token(hub, examine):
    found = examine(replace(hub.address, token="wrong-token-value"))
    assert found.problems == ["token"]
    assert "wrong-token-value" not in repr(found)
    assert set(INSIDE) <= set(found.skipped)


def test_wrong_fingerprint(hub, examine):
    found = examine(replace(hub.address, fingerprint="ab" * 32))
    assert found.problems == ["tls"]
    assert found["tls"].data["shown"] == hub.address.fingerprint
    assert found["tls"].data["expected"] == "ab" * 32
    assert {"token", "run", "protocol", *INSIDE} <= set(found.skipped)


def test_an_address_without_pin_and_token_still_shows_the_pin(hub, examine):
    found = examine(replace(hub.address, fingerprint="", token=""))
    assert found.problems == ["address"]
    assert found["address"].data["lacks"] == ["fingerprint", "token"]
    assert found["tls"].status is Status.WARNING
    assert found["tls"].data["shown"] == hub.address.fingerprint


def test_insecure_is_for_loopback(examine, monkeypatch):
    monkeypatch.setattr("manyhands.doctor.hub.is_loopback", lambda host: False)
    with Hub("127.0.0.1:0", insecure=True) as hub:
        found = examine(hub.address)
    assert found.problems == ["address"]
    assert set(INSIDE) <= set(found.skipped)  # nothing is said in the clear


def test_nothing_listens(closed_port, examine):
    found = examine(nowhere(closed_port))
    assert found.problems == ["tcp"]
    assert "nothing listens" in found["tcp"].summary


def test_a_host_without_an_address(examine):
    found = examine(nowhere(1, host="no-such-host.invalid"))
    assert found.problems == ["dns"]
    assert "tcp" in found.skipped


def test_a_port_that_says_nothing(silent_port, examine, monkeypatch):
    monkeypatch.setattr(limits, "TLS_S", 0.3)
    found = examine(nowhere(silent_port))
    assert found.problems == ["tls"]
    assert "did not answer" in found["tls"].summary


def test_a_port_that_says_nothing_without_tls(silent_port, examine, monkeypatch):
    monkeypatch.setattr(limits, "GREETING_S", 0.3)
    address = nowhere(silent_port, insecure=True, fingerprint="", token="")
    found = examine(address)
    assert found.problems == ["protocol"]
    assert "did not answer" in found["protocol"].summary


@pytest.mark.parametrize("insecure", [False, True])
def test_a_web_server(http_port, examine, insecure):
    found = examine(nowhere(http_port, insecure=insecure))
    assert found.problems == ["protocol" if insecure else "tls"]
    assert "a web server" in found[found.problems[0]].remedy


def test_a_hub_without_tls_where_tls_is_expected(examine):
    with Hub("127.0.0.1:0", insecure=True) as hub:
        found = examine(nowhere(hub.address.port))
    assert found.problems == ["tls"]
    assert "--insecure" in found["tls"].remedy


def test_a_line_that_breaks_while_it_is_measured(hub, budget):
    with Proxy("127.0.0.1", hub.address.port) as proxy:
        address = replace(hub.address, port=proxy.port)
        found = []
        for finding in examine_hub(address, seconds=SECONDS, budget=budget):
            found.append(finding)
            if finding.check == "terms":
                proxy.refuse()  # those that come next are the two peers
    assert Found(found).problems == ["join"]
    assert {"latency", "bandwidth"} <= set(Found(found).skipped)


def test_another_wire_version(listen):
    def answer(sock):
        sock.recv(4096)
        sock.sendall(b"MH\x63" + bytes(13))
        sock.close()

    address = nowhere(listen(answer), insecure=True)
    found = Found(check_greeting(address, "r", 30.0).findings)
    assert found.problems == ["protocol"]
    assert found["protocol"].data == {"wire": 1, "hub_wire": 0x63}


def test_a_hub_that_serves_one_run_only(budget):
    with Hub("127.0.0.1:0", runs=frozenset({"mine"})) as hub:
        without = Found(examine_hub(hub.address, seconds=SECONDS, budget=budget))
        address = replace(hub.address, run="other")
        wrong = Found(examine_hub(address, seconds=SECONDS, budget=budget))
        seen = watch(hub, "mine")
        address = replace(hub.address, run="mine")
        right = Found(examine_hub(address, seconds=SECONDS, budget=budget))
        seen.set()
    assert without.problems == wrong.problems == ["run"]
    assert "--run" in without["run"].remedy
    assert "mine" in wrong["run"].remedy
    assert right.problems == []
    assert not right["run"].data["private"]
    assert seen.states <= {PeerState.WATCHING}  # it never takes part


def watch(hub, run):
    """Notes the states of all peers that come to the run, until it is set."""
    done = threading.Event()
    done.states = set()

    def look():
        while not done.wait(0.005):
            room = hub.room(run)
            if room is not None:
                done.states |= {member.state for member in room.view.roster}

    threading.Thread(target=look).start()
    return done


def test_clocks_that_differ():
    assert judge_offset(100.5, 100.0, 101.0).status is Status.OK
    slow_answer = judge_offset(103.0, 100.0, 104.0)  # it cannot tell
    assert slow_answer.status is Status.OK
    late = judge_offset(90.0, 100.0, 100.2)
    assert late.status is Status.WARNING
    assert late.data["offset_s"] == pytest.approx(-10.1)
    assert "timedatectl" in late.remedy
