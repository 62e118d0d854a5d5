"""The hub keeps the contract of every link, with and without TLS, and what it owes besides."""

from __future__ import annotations

import dataclasses

import pytest

from manyhands.core.address import HubAddress, parse_address
from manyhands.links.hub import Hub
from manyhands.testing.contract import LinkContract, Meeting


class HubMeeting(Meeting):
    """A hub with a memory, so that it can restart."""

    def __init__(self, tmp_path, *, insecure: bool) -> None:
        self._state, self._insecure = tmp_path / "state", insecure
        self.hub = Hub("127.0.0.1:0", state=self._state, insecure=insecure)
        super().__init__(url_of(self.hub.address))

    def __exit__(self, *details) -> None:
        super().__exit__(*details)
        self.hub.close()

    def target(self):
        return "127.0.0.1", self.hub.address.port

    def via(self, port):
        return url_of(dataclasses.replace(self.hub.address, port=port))

    def restart(self):
        self.hub.close()
        bind = f"127.0.0.1:{self.hub.address.port}"
        self.hub = Hub(bind, state=self._state, insecure=self._insecure)


def url_of(address: HubAddress) -> str:
    return f"{address}?insecure=1" if address.insecure else address.code()


class TestHub(LinkContract):
    @pytest.fixture
    def meeting(self, tmp_path):
        with HubMeeting(tmp_path, insecure=True) as meeting:
            yield meeting


class TestHubWithTls(LinkContract):
    @pytest.fixture
    def meeting(self, tmp_path):
        with HubMeeting(tmp_path, insecure=False) as meeting:
            yield meeting
