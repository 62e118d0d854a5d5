"""Every error says what, and what to do."""

from __future__ import annotations

import pytest

from manyhands.core import errors
from manyhands.core.errors import (
    Excluded,
    LinkError,
    LinkTimeout,
    ManyhandsError,
    PeerGone,
    Refused,
    SettingsError,
    WireError,
    WrongVersion,
)
from manyhands.core.peers import PeerId

CLASSES = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, Exception)]


@pytest.mark.parametrize("kind", CLASSES)
def test_all_are_of_one_tree_and_in_its_picture(kind):
    assert issubclass(kind, ManyhandsError)
    assert kind.__name__ in errors.__doc__
    assert kind.__doc__


def test_a_hint_follows_the_message():
    error = SettingsError("beat_s is -1", hint="more than 0")
    assert str(error) == "beat_s is -1\nhint: more than 0"
    assert (error.message, error.hint) == ("beat_s is -1", "more than 0")
    assert str(SettingsError("no")) == "no"
    assert isinstance(error, ValueError)


def test_errors_carry_their_facts():
    timeout = LinkTimeout("credit from b", 1.5, hint="look")
    assert (timeout.waited_for, timeout.timeout_s) == ("credit from b", 1.5)
    assert str(timeout) == "no credit from b within 1.5 s\nhint: look"
    assert isinstance(timeout, TimeoutError | LinkError)
    assert isinstance(timeout, TimeoutError)
    assert Refused("token", "no").code == "token"
    assert WrongVersion("old", version=3).version == 3
    excluded = Excluded("it was silent")
    assert excluded.reason == "it was silent"
    assert "join again" in (excluded.hint or "")
    peer = PeerId("anna", 0xABCDE)
    assert PeerGone(peer).peer == peer
    assert "anna#bcde" in str(PeerGone(peer))
    assert not issubclass(WireError, LinkError)
