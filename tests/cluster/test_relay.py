"""The hub of a cluster: at which port, and what is said of it."""

from __future__ import annotations

import socket

from manyhands.cluster.relay import open_relay


def test_it_keeps_its_port_and_warns_when_that_is_taken(tmp_path):
    said = []
    open_relay("127.0.0.1:0", None, tmp_path, said.append).close()
    kept = int((tmp_path / "hub" / "port").read_text())
    with socket.create_server(("127.0.0.1", kept)):
        hub = open_relay("127.0.0.1:0", None, tmp_path, said.append)
        hub.close()
    assert hub.near.port != kept
    (warning,) = said
    assert f"the hub's port {kept} is taken, it listens at {hub.near.port}" in warning
