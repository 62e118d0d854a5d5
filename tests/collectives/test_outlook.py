"""Who is woken by a contribution: who waits for one, and nobody who waits for the round."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from manyhands.collectives.outcomes import Committed
from manyhands.collectives.outlook import Outlook
from manyhands.core.peers import PeerState
from tests.collectives.rounds_kit import PATIENCE_S
from tests.collectives.test_rounds import Group

LIKE = [torch.empty(3)]
ONES = [torch.ones(3)]


@pytest.fixture
def group():
    """Two members that are to compute; the first is the owner of the only part."""
    with Group("local://", 2, LIKE) as made:
        yield made


@contextmanager
def waiting(engine, wait, monkeypatch):
    """A thread that waits for the engine, and by now sleeps; what it came back with."""
    asleep, found = threading.Event(), []
    usual = engine._news.wait

    def say_and_wait(timeout_s=None):
        asleep.set()  # with the lock held, which only the sleeping lets go of
        return usual(timeout_s)

    monkeypatch.setattr(engine._news, "wait", say_and_wait)
    thread = threading.Thread(target=lambda: found.append(wait()), daemon=True)
    thread.start()
    assert asleep.wait(PATIENCE_S)
    yield found
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "nothing has woken it"


def test_a_contribution_is_news(group, monkeypatch):
    owner, other = group.peers
    group.task(0)
    task = group.task(1)
    with waiting(owner, lambda: owner.outlook.wait_for_news(600.0), monkeypatch) as found:
        other.contribute(task, ONES, weight=1.0)
    assert found == [False]  # the round is not over
    assert owner.outlook.given


def test_a_contribution_does_not_wake_who_waits_for_the_round(group, monkeypatch):
    owner, other = group.peers
    tasks = group.task(0), group.task(1)
    heard, notify_all = owner.outlook.heard, owner._news.notify_all
    notified, wakes, told = [], [], threading.Event()

    def watched():
        """With the lock held: what is notified meanwhile is notified here."""
        before = len(notified)
        heard()
        wakes.append(len(notified) - before)
        told.set()

    monkeypatch.setattr(owner._news, "notify_all", lambda: notified.append(1) or notify_all())
    monkeypatch.setattr(owner.outlook, "heard", watched)
    with waiting(owner, lambda: group.next(0, Committed), monkeypatch) as found:
        other.contribute(tasks[1], ONES, weight=1.0)
        assert told.wait(PATIENCE_S)
        owner.contribute(tasks[0], ONES, weight=1.0)
    assert not any(wakes)
    assert found[0].weight == 2.0
    found[0].result.close()
    group.next(1, Committed).result.close()


def test_who_asks_for_the_first_time_may_be_about_to_offer_a_state():
    """And who had one that was of no use gets one by the next commit; those who left do not."""
    states = {1: PeerState.ACTIVE, 2: PeerState.WATCHING, 3: PeerState.WATCHING}
    machine = SimpleNamespace(states=states, asks={2: 0, 3: 1, 4: 1})
    assert Outlook(threading.Condition(), machine, None, []).num_following == 2
