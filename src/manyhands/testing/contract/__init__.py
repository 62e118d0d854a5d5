"""What every link owes its users, as tests: one suite for local, hub and AMQP.

    class TestMyLink(LinkContract):
        @pytest.fixture
        def meeting(self):
            with MyMeeting(...) as meeting:
                yield meeting

A `Meeting` is a meeting point under test and what was opened there. Nothing here knows a kind of
link: where they differ, the meeting says so (`resumes`, `spawns`, ...).
"""

from __future__ import annotations

import pytest

from manyhands.testing.contract.flow import BuffersContract, FlowContract
from manyhands.testing.contract.kit import (
    PATIENCE_S,
    PATIENT,
    QUICK,
    STEADY,
    Meeting,
    Reader,
    activate,
    is_cut,
    number_of,
    sealed,
    state_of,
    together,
)
from manyhands.testing.contract.leases import ClosingContract, LeasesContract
from manyhands.testing.contract.networks import NetworksContract
from manyhands.testing.contract.order import MembershipContract, OrderContract

__all__ = [
    "PATIENCE_S",
    "PATIENT",
    "QUICK",
    "STEADY",
    "LinkContract",
    "Meeting",
    "Reader",
    "activate",
    "is_cut",
    "number_of",
    "sealed",
    "state_of",
    "together",
]


class LinkContract(
    OrderContract,
    MembershipContract,
    BuffersContract,
    FlowContract,
    LeasesContract,
    NetworksContract,
    ClosingContract,
):
    """The suite. A subclass supplies the fixture `meeting`."""

    @pytest.fixture
    def meeting(self) -> Meeting:
        """The meeting point under test."""
        pytest.fail("a subclass of LinkContract supplies the fixture `meeting`")
