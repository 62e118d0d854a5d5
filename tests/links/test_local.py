"""The local link keeps the contract of every link."""

from __future__ import annotations

import pytest

from manyhands.testing.contract import LinkContract, Meeting


class LocalMeeting(Meeting):
    spawns = proxies = restarts = False


class TestLocal(LinkContract):
    @pytest.fixture
    def meeting(self):
        with LocalMeeting("local://") as meeting:
            yield meeting
