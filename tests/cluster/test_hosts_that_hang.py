"""Hosts whose agents talk and do nothing, or come back one by one; and gangs of very many."""

from __future__ import annotations

import pytest

from manyhands.cluster import book, part
from manyhands.cluster.errors import HostTaken, NotAHost
from manyhands.cluster.job import Priority, State
from manyhands.cluster.messages import Phase
from manyhands.cluster.part import START_S, STOP_S
from manyhands.cluster.schedule import decide
from tests.cluster.model import hello
from tests.cluster.story import PATIENCE_S, Story, a_pair, ended, held

ROUND_S = 3.0
MOST_S = 1000.0
LATE_S = START_S + PATIENCE_S


@pytest.fixture
def pair():
    return a_pair()


def talk_on(story, host, *holdings, until):
    """An agent repeats what it said, for as long as it is answered; returns the time it took."""
    from_s = story.now_s
    while not until() and story.now_s < from_s + MOST_S:
        story.tick(ROUND_S)
        if story.book.nodes()["ab".index(host)].state not in ("stuck", "silent"):
            story.status(host, *holdings)
    return story.now_s - from_s


def state_of(story, host, state):
    return lambda: story.book.nodes()["ab".index(host)].state == state


# -- agents that talk, and do nothing --------------------------------------------------------------


@pytest.mark.parametrize("heard", [False, True])
@pytest.mark.parametrize("restart", [False, True])
def test_an_agent_that_talks_and_never_begins_is_given_up(heard, restart):
    story = Story(("a", 1))
    story.submit(max_restarts=0)
    story.tick()
    if heard:
        assert story.wants("a").wants
    if restart:
        story.now_s += 2 * MOST_S
        story.again()
    took_s = talk_on(story, "a", until=state_of(story, "a", "stuck"))
    assert LATE_S <= took_s < LATE_S + ROUND_S
    assert story.job().state is State.STARTING, "its lease still runs"
    with pytest.raises(HostTaken, match="host a was given up: it did not begin job 1 within 73 s"):
        story.book.hello(hello("a", slots=1), story.now_s)
    with pytest.raises(NotAHost):
        story.status("a")
    with pytest.raises(NotAHost):
        story.book.wants("a", "agent-1")
    took_s = talk_on(story, "a", until=state_of(story, "a", "silent"))
    assert PATIENCE_S - ROUND_S <= took_s < PATIENCE_S + ROUND_S
    assert "host a did not begin job 1 within 73 s" in " ".join(story.reasons)
    if heard or restart:
        assert (story.job().state, story.job().node_failures) == (State.FAILED, 1)
    else:
        assert (story.job().state, story.job().preemptions) == (State.PENDING, 1)
    story.book.hello(hello("a", slots=1), story.now_s)
    story.status("a")
    assert story.book.nodes()[0].state == "here"


def test_an_agent_that_talks_and_never_ends_what_it_is_told_to_is_given_up(pair):
    pair.cancel()
    for host in "ab":
        assert pair.wants(host).wants[0].stop
    pair.status("a", ended([(0, 143), (1, 143)]))
    late_s = 30 + PATIENCE_S + STOP_S
    assert pair.book.next_due_s() == pair.now_s + PATIENCE_S
    took_s = talk_on(pair, "b", held(), until=state_of(pair, "b", "stuck"))
    assert late_s <= took_s < late_s + ROUND_S
    assert pair.job().state is State.RUNNING
    talk_on(pair, "b", held(), until=lambda: pair.job().is_over)
    assert pair.job().state is State.CANCELLED


def test_when_a_host_is_late_something_is_due(pair):
    pair.cancel()
    pair.now_s += 30 + PATIENCE_S + STOP_S - 1
    pair.status("a", held(port=5000))
    pair.status("b", held())
    assert pair.book.next_due_s() == pair.now_s + 1
    pair.tick(1)
    assert pair.book.next_due_s() == pair.now_s - 1 + PATIENCE_S, "once is enough"


def test_only_the_one_that_is_late_is_given_up():
    story = Story(("a", 2), ("b", 1))
    story.submit(3)
    story.tick()
    for host in "ab":
        story.wants(host)
    while not state_of(story, "a", "silent")():
        story.status("b", held(phase=Phase.READY))
        talk_on(story, "a", until=iter([False, True]).__next__)
    assert [node.state for node in story.book.nodes()] == ["silent", "here"]
    assert story.job().ending.into is State.NODE_FAIL


def test_who_waits_for_rank_0_has_time_of_its_own():
    story = Story(("a", 2), ("b", 1))
    story.submit(3)
    story.tick()
    for host in "ab":
        story.wants(host)
    story.now_s += LATE_S - 1
    for after_s in (0, 0, START_S - 1):
        story.now_s += after_s
        story.status("b", held(phase=Phase.READY))
        story.status("a", held(phase=Phase.READY, port=5000))
        story.tick()
    assert [node.state for node in story.book.nodes()] == ["here", "here"]
    story.tick(3)
    assert [node.state for node in story.book.nodes()] == ["stuck", "stuck"]


def test_the_successor_of_one_that_was_given_up_need_not_wait():
    story = Story(("a", 1))
    story.submit()
    story.tick()
    story.wants("a")
    talk_on(story, "a", until=state_of(story, "a", "stuck"))
    with pytest.raises(HostTaken):
        story.book.hello(hello("a", agent="agent-2", slots=1, folder="other"), story.now_s)
    story.book.hello(hello("a", agent="agent-2", slots=1), story.now_s)
    story.status("a", agent="agent-2")
    assert story.job().node_failures == 1


# -- hosts that come back one by one ---------------------------------------------------------------


def line_of_three():
    """Job 1 has a host for ever, job 2 wants both, job 3 would delay it. Also: which host is
    busy, which free.
    """
    story = Story(("a", 1), ("b", 1), decide=decide)
    story.submit(1)
    story.tick()
    busy = story.job().places[0].host
    story.run(busy)
    story.submit(2)
    story.submit(1)
    story.tick()
    assert [story.job(id).state for id in (2, 3)] == [State.PENDING, State.PENDING]
    return story, busy, "ab".replace(busy, "")


def test_hosts_that_come_back_one_by_one_let_nobody_pass():
    story, busy, free = line_of_three()
    story.again(decide=decide)
    story.status(free)
    story.tick()
    assert story.job(3).state is State.PENDING, "the head would wait for ever"
    story.status(busy, held(port=5000))
    story.tick()
    assert story.job(3).state is State.PENDING
    story.status(busy, ended([(0, 0)]))
    story.tick()
    assert story.job(2).state is State.STARTING


def test_a_host_that_does_not_get_ready_holds_nobody_up_for_ever():
    story, busy, free = line_of_three()
    story.again(decide=decide)
    story.cancel(2)
    story.cancel(3)
    story.status(busy, held(port=5000))
    story.status(free, held(job=99))
    story.submit(1, priority=Priority.HIGH)
    story.tick()
    assert state_of(story, free, "clearing")()
    assert story.job().ending is None, "there will be room on the other host"
    assert story.book.next_due_s() == story.now_s + PATIENCE_S
    for _ in range(2):
        story.now_s += PATIENCE_S / 2
        story.status(busy, held(port=5000))
        story.status(free, held(job=99))
    assert story.book.next_due_s() == story.now_s
    story.tick()
    assert story.job().ending is not None, "this is the only room that there is"


def test_nobody_has_to_end_for_room_that_is_about_to_come_back():
    story, busy, free = line_of_three()
    story.cancel(2)
    story.cancel(3)
    story.again(decide=decide)
    story.status(busy, held(port=5000))
    story.submit(1, priority=Priority.HIGH)
    story.tick()
    assert story.job().ending is None
    assert story.job(4).reason == "wants 1 slot; hosts that have room for it are about to be ready"
    story.status(free)
    story.tick()
    assert story.job(4).state is State.STARTING


def test_a_host_whose_line_has_ended_gets_nothing_new_before_it_is_heard():
    story = Story(("a", 1))
    story.book.broke("a", "agent-1")
    story.submit()
    story.tick()
    assert story.job().state is State.PENDING
    assert not story.book.is_stale
    story.book.host("a", "agent-1", story.now_s)
    assert story.book.is_stale
    story.tick()
    assert story.job().state is State.STARTING


def test_a_host_that_is_heard_after_a_silence_is_looked_at():
    story = Story(("a", 1))
    story.tick(PATIENCE_S)
    assert not story.book.is_stale
    story.book.host("a", "agent-1", story.now_s)
    assert story.book.is_stale
    assert story.book.next_due_s() == story.now_s + PATIENCE_S


def test_a_host_that_was_lost_before_it_heard_of_a_job_costs_it_no_restart():
    story = Story(("a", 1), ("b", 1))
    story.submit(2, max_restarts=0)
    story.tick()
    story.wants("a")
    story.now_s += PATIENCE_S - 1
    story.status("a", held(phase=Phase.READY, port=5000))
    story.tick(1)
    assert story.job().ending.into is State.PREEMPTED
    story.wants("a")
    story.status("a", held(phase=Phase.ENDED))
    assert (story.job().state, story.job().node_failures) == (State.PENDING, 0)
    story.status("b")
    story.tick()
    assert (story.job().state, story.job().attempt) == (State.STARTING, 1)


def test_a_heartbeat_of_a_large_gang_is_not_a_look_at_all_of_it(monkeypatch):
    """A thousand hosts speak four times a lease: the work of each must not grow with them."""
    names = [f"h{i:03}" for i in range(200)]
    story = Story(*((name, 1) for name in names))
    story.submit(len(names))
    story.run(*names)
    looks, real = [], part.part_of
    monkeypatch.setattr(part, "part_of", lambda *what: looks.append(what) or real(*what))
    for name in names:
        story.status(name, held(port=5000))
    assert not looks
    story.status(names[-1], ended([(len(names) - 1, 0)]))
    assert 0 < len(looks) <= 2 * len(names)
    assert story.job().state is State.RUNNING


def offer_only_who_is_ready(patch):
    real = book.question

    def question(hosts, *rest, **more):
        return real({name: host for name, host in hosts.items() if host.is_usable}, *rest, **more)

    patch.setattr(book, "question", question)


def wait_for_ever(patch):
    real = book.question

    def question(*rest, patience_s, **more):
        return real(*rest, patience_s=1e9, **more)

    patch.setattr(book, "question", question)


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (offer_only_who_is_ready, test_hosts_that_come_back_one_by_one_let_nobody_pass),
        (offer_only_who_is_ready, test_nobody_has_to_end_for_room_that_is_about_to_come_back),
        (wait_for_ever, test_a_host_that_does_not_get_ready_holds_nobody_up_for_ever),
    ],
)
def test_a_question_that_leaves_something_out_is_found(mutant, test, monkeypatch):
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        test()
