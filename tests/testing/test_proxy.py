"""The bad network on demand, as far as no test of a link shows it."""

from __future__ import annotations

import socket

import pytest

from manyhands.testing.proxy import Proxy

WAIT_S = 60.0


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.settimeout(WAIT_S)
        yield made


def met(proxy, listener):
    """Both ends of a new connection, over which something has gone."""
    near = socket.create_connection(("127.0.0.1", proxy.port), WAIT_S)
    far, _ = listener.accept()
    far.settimeout(WAIT_S)
    near.sendall(b"a")
    assert far.recv(1) == b"a"
    return near, far


def test_what_is_forgotten_is_silent_and_what_comes_then_passes(listener):
    with Proxy("127.0.0.1", listener.getsockname()[1]) as proxy:
        near, far = met(proxy, listener)
        proxy.forget()
        near.sendall(b"lost")
        far.sendall(b"lost too")
        for _ in range(2):  # bytes that were under way have had time to arrive
            other, there = met(proxy, listener)
            there.sendall(b"b")
            assert other.recv(1) == b"b"
            other.close()
            there.close()
        near.close()  # which the far end is not told
        far.setblocking(False)
        with pytest.raises(BlockingIOError):
            far.recv(1)
        far.close()
