"""Settings of `manyhands up` that cannot be."""

from __future__ import annotations

import socket

import pytest

from manyhands.cluster.hostfile import HostLine
from manyhands.cluster.up import Up, UpSettings
from manyhands.core.errors import SettingsError


def test_far_hosts_need_more_than_loopback(tmp_path):
    far = HostLine(address="ann@10.0.0.7", name="10.0.0.7")
    with pytest.raises(SettingsError, match=r"ann@10.0.0.7 cannot reach") as caught:
        UpSettings(state=tmp_path, logdir=tmp_path, hosts=(far,))
    assert "--bind 0.0.0.0" in caught.value.hint
    UpSettings(state=tmp_path, logdir=tmp_path, hosts=(far,), bind="0.0.0.0:12347")


@pytest.mark.parametrize("advertise", ["box", "192.0.2.1:7", "[2001:db8::1]:7"])
def test_one_that_only_this_machine_reaches_is_not_advertised_to_others(tmp_path, advertise):
    with pytest.raises(SettingsError, match="cannot be reached") as caught:
        UpSettings(state=tmp_path, logdir=tmp_path, bind="127.0.0.1:1", advertise=advertise)
    assert "--bind 0.0.0.0" in caught.value.hint
    UpSettings(state=tmp_path, logdir=tmp_path, bind="127.0.0.1:1", advertise="localhost")
    UpSettings(state=tmp_path, logdir=tmp_path, bind="0.0.0.0:1", advertise=advertise)


@pytest.mark.parametrize("lease_s", [0.5, 0, 1e9])
def test_leases_out_of_range(tmp_path, lease_s):
    with pytest.raises(SettingsError, match="a lease of"):
        UpSettings(state=tmp_path, logdir=tmp_path, lease_s=lease_s)


@pytest.mark.parametrize(
    ("host", "more", "is_another"),
    [
        (HostLine(address="ann@node1", name="node1"), {}, True),
        (HostLine(address="root@node1", name="node1"), {"ssh": ("ssh", "-l", "ann")}, True),
        (HostLine(address="root@node1", name="node1"), {"ssh": ("ssh",), "python": ""}, False),
        (HostLine(address="root@node1", name="node1", line=7), {}, False),
    ],
)
def test_who_ssh_goes_in_as_is_among_an_agents_terms(tmp_path, host, more, is_another):
    """Jobs run as whom it logs in: an agent of another user's may not stay."""

    def terms(host, **more):
        far = {"bind": "0.0.0.0:0", "hosts": (host,), **more}
        return Up(UpSettings(state=tmp_path, logdir=tmp_path, **far), say=print)._terms(host)

    before = terms(HostLine(address="root@node1", name="node1"))
    assert (terms(host, **more) != before) == is_another


def test_an_address_that_is_taken_is_found_before_anything_is_noted(tmp_path):
    """The hub's port, above all: it is kept, and would have been another one."""
    said = []
    with socket.create_server(("127.0.0.1", 0)) as other:
        bind = f"127.0.0.1:{other.getsockname()[1]}"
        settings = UpSettings(state=tmp_path / "state", logdir=tmp_path / "logs", bind=bind)
        with (
            pytest.raises(SettingsError, match="cannot listen at") as caught,
            Up(settings, say=said.append),
        ):
            pass
    assert "`manyhands down`" in caught.value.hint
    assert said == []
    assert not (tmp_path / "state" / "hub").exists()
    assert not (tmp_path / "logs").exists()
