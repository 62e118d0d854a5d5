"""Hosts that are lost, come back, are replaced, or talk nonsense."""

from __future__ import annotations

import msgspec
import pytest

from manyhands.cluster.book import MAX_HOSTS
from manyhands.cluster.errors import (
    BadReport,
    HostTaken,
    NotAHost,
    Unplaceable,
)
from manyhands.cluster.hosts import FORGET_S, newer
from manyhands.cluster.job import Failure, State
from manyhands.cluster.messages import Kind, Phase, Slot, Status
from tests.cluster.model import hello
from tests.cluster.story import PATIENCE_S, Story, a_pair, ended, failed, held


@pytest.fixture
def pair():
    return a_pair()


# -- hosts that are lost ---------------------------------------------------------------------------


def test_a_silent_host_is_lost_when_its_lease_and_the_margin_are_over(pair):
    pair.now_s += PATIENCE_S - 1
    pair.status("a", held())
    pair.tick(0.9)
    assert pair.job().ending is None
    assert pair.book.next_due_s() == 100.0 + PATIENCE_S
    pair.tick(0.2)
    assert pair.job().ending.into is State.NODE_FAIL
    assert [node.state for node in pair.book.nodes()] == ["here", "silent"]
    assert pair.wants("a").wants[0].stop, "the rest of the gang must be gone first"
    pair.status("a", ended([(0, 143), (1, 0)]))
    assert pair.states[-2:] == ["NODE_FAIL", "PENDING"]
    assert "host b has not been heard" in pair.job().reason
    pair.tick()
    assert pair.job().state is State.PENDING, "two slots of three are there"
    assert pair.job().reason == "waits for 3 slots"


def test_restarts_are_counted_and_end(pair):
    for _ in range(2):
        attempt = pair.job().attempt
        pair.status("b", held(1, attempt, Phase.ENDED, lost="the keeper was killed"))
        pair.wants("a")
        pair.status("a", held(1, attempt, Phase.ENDED, exits=[(0, 143), (1, 143)]))
        if pair.job().state is State.PENDING:
            pair.run("a", "b")
    job = pair.job()
    assert (job.state, job.node_failures, job.attempt, job.exit_code) == (State.FAILED, 2, 1, 1)
    assert "host b: the keeper was killed; it has begun again once, and may not" in job.reason


def test_an_end_that_nobody_asked_for_is_the_hosts_doing(pair):
    pair.status("b", ended([(2, 143)]))
    assert pair.job().ending.into is State.NODE_FAIL
    assert "without being asked" in pair.job().ending.reason


def test_another_agent_comes_only_when_the_first_is_gone():
    story = Story(("a", 1))
    story.wants("a")
    with pytest.raises(HostTaken, match="host a is held by another agent"):
        story.book.hello(hello("a", agent="agent-2"), story.now_s)
    story.book.broke("a", "someone")
    with pytest.raises(HostTaken):
        story.book.hello(hello("a", agent="agent-2"), story.now_s)
    story.book.broke("a", "agent-1")
    story.book.hello(hello("a", agent="agent-2"), story.now_s)
    with pytest.raises(NotAHost):
        story.status("a")
    with pytest.raises(NotAHost):
        story.wants("a")
    story.wants("a", "agent-2")
    story.book.broke("a", "agent-2")
    story.status("a", agent="agent-2")  # its last words, which come after its line has ended
    story.book.hello(hello("a", agent="agent-3"), story.now_s)
    story.wants("a", "agent-3")
    story.now_s += PATIENCE_S
    story.book.hello(hello("a", agent="agent-4"), story.now_s)
    # One that was killed before it asked for anything.
    story.book.hello(hello("a", agent="agent-5"), story.now_s)


@pytest.mark.parametrize("restart", [False, True])
def test_what_a_new_agent_does_not_know_is_lost_and_never_begun_by_it(pair, restart):
    pair.book.broke("b", "agent-1")
    pair.book.hello(hello("b", agent="agent-2", slots=1), pair.now_s)
    pair.keep()
    if restart:
        pair.again()
    [want] = pair.wants("b", "agent-2").wants
    assert want.stop, "whatever it hears first, it begins nothing of the agent before"
    assert pair.job().ending is None, "it may know how it ended"
    pair.status("b", agent="agent-2")
    assert pair.job().ending.into is State.NODE_FAIL


def test_what_a_new_agent_knows_of_the_old_ones_attempts_counts(pair):
    pair.status("a", ended([(0, 0), (1, 0)]))
    pair.book.broke("b", "agent-1")
    pair.book.hello(hello("b", agent="agent-2", slots=1), pair.now_s)
    pair.status("b", ended([(2, 0)]), agent="agent-2")
    assert pair.job().state is State.SUCCEEDED


def test_an_attempt_nobody_was_told_of_is_the_next_agents():
    story = Story(("a", 1))
    story.submit()
    story.tick()
    story.book.broke("a", "agent-1")
    story.book.hello(hello("a", agent="agent-2", slots=1), story.now_s)
    story.status("a", agent="agent-2")
    assert not story.wants("a", "agent-2").wants[0].stop
    assert story.job().state is State.STARTING


def test_a_coordinator_that_comes_back_gives_everybody_a_fresh_lease(pair):
    pair.now_s += 1000
    pair.again()
    assert [node.state for node in pair.book.nodes()] == ["expected", "expected"]
    assert pair.job().state is State.RUNNING
    pair.tick(PATIENCE_S - 0.1)
    assert pair.job().ending is None
    for name, slots in (("a", 2), ("b", 1)):
        pair.book.hello(hello(name, slots=slots), pair.now_s)
    pair.status("a", held(port=5000))
    pair.status("b", held())
    assert pair.job().attempt == 0
    pair.status("a", ended([(0, 0), (1, 0)]))
    pair.status("b", ended([(2, 0)]))
    assert pair.job().state is State.SUCCEEDED


@pytest.mark.parametrize("restarts", [1, 2])
def test_a_shorter_lease_does_not_end_the_one_that_was_promised(pair, restarts):
    """An agent that is cut off counts by what it was told, whoever is coordinator meanwhile."""
    for _ in range(restarts):
        pair.again(lease_s=1.0)
    pair.tick(PATIENCE_S - 0.1)
    assert pair.job().ending is None
    assert pair.book.next_due_s() == 100.0 + PATIENCE_S
    pair.tick(0.2)
    assert pair.job().state is State.PENDING


def test_a_longer_lease_is_stored_before_an_agent_hears_of_it(pair):
    pair.again(lease_s=100.0)
    pair.book.hello(hello("b", slots=1), pair.now_s)
    assert [row.lease_s for row in pair.book.drain().hosts] == [100.0]
    pair.book.undo()
    assert not pair.book.drain().hosts
    for _ in range(2):
        pair.book.hello(hello("b", slots=1), pair.now_s)
    pair.keep()
    pair.again()
    pair.tick(PATIENCE_S + 1)
    assert [node.state for node in pair.book.nodes()] == ["silent", "expected"]
    assert "host a" in pair.job().ending.reason


@pytest.mark.parametrize("folder", ["another-folder", ""])
@pytest.mark.parametrize("restart", [False, True])
def test_another_machine_of_the_same_name_waits_until_the_first_one_is_surely_gone(
    pair, restart, folder
):
    """It cannot have ended what the agent before it left: that was elsewhere."""
    pair.book.broke("b", "agent-1")
    if restart:
        pair.again()
    stranger = hello("b", agent="agent-2", slots=1, folder=folder)
    pair.now_s += PATIENCE_S - 0.1
    with pytest.raises(HostTaken):
        pair.book.hello(stranger, pair.now_s)
    pair.tick()
    assert pair.job().ending is None
    pair.now_s += 0.2
    pair.book.hello(stranger, pair.now_s)
    pair.status("b", agent="agent-2")
    assert pair.job().ending.into is State.NODE_FAIL


def test_an_agent_that_says_no_folder_is_not_the_one_before_it():
    story = Story()
    story.book.hello(hello("a", folder=""), story.now_s)
    story.book.broke("a", "agent-1")
    with pytest.raises(HostTaken):
        story.book.hello(hello("a", agent="agent-2", folder=""), story.now_s)


def test_a_host_that_still_has_processes_of_what_is_over_gets_nothing_new(pair):
    pair.now_s += PATIENCE_S
    pair.status("a", held())
    pair.tick()
    pair.wants("a")
    pair.status("a", ended([(0, 143), (1, 143)]))
    assert pair.job().state is State.PENDING
    pair.status("b", held())  # it was asleep, and its processes too
    assert pair.book.nodes()[1].state == "clearing"
    pair.tick()
    assert pair.job().state is State.PENDING
    assert not pair.wants("b").wants, "what is not wanted is ended and forgotten"
    pair.status("b", ended([(2, 137)]))
    pair.tick()
    assert (pair.job().state, pair.job().attempt) == (State.STARTING, 1)


def test_a_host_is_forgotten_in_the_end_and_not_while_it_has_a_job():
    story = Story(("a", 1), ("b", 1))
    story.tick(PATIENCE_S)
    assert story.book.next_due_s() == story.now_s + FORGET_S
    with pytest.raises(Unplaceable, match="asks for 3 slots, and the cluster has 2"):
        story.submit(3)
    story.tick(FORGET_S)
    assert not story.book.nodes()
    with pytest.raises(NotAHost):
        story.status("a")


# -- nonsense ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "nonsense",
    [held(job=77), held(job=-1, attempt=-1), held(attempt=1, phase=Phase.ENDED)],
    ids=str,
)
def test_nonsense_changes_no_job(pair, nonsense):
    before = pair.job()
    pair.status("b", nonsense)
    assert pair.job() == before


@pytest.mark.parametrize(
    "nonsense",
    [
        held(phase=Phase.ENDED, exits=[(0, 0)]),  # a rank of the other host
        held(phase=Phase.ENDED, exits=[(2, 0), (2, 0)]),
        held(phase=Phase.ENDED, exits=[(2, 256)]),
        held(phase=Phase.ENDED, exits=[(2, -9)]),
        held(phase=Phase.ENDED, failure=failed(0)),
        held(phase=Phase.ENDED, failure=failed(2, 0)),
        held(phase=Phase.ENDED, port=99_999),
    ],
    ids=str,
)
def test_nonsense_about_its_own_part_is_refused_and_changes_no_job(pair, nonsense):
    """Else the job would stay as it is for ever, and nobody would know why."""
    before = pair.job()
    with pytest.raises(BadReport, match=r"says of job 1 cannot be: it has ranks 2 to 2"):
        pair.status("b", held(job=9), nonsense)
    assert pair.job() == before
    assert [node.state for node in pair.book.nodes()] == ["here", "here"], "nothing was taken"


def test_an_older_status_that_arrives_late_says_nothing():
    """Slots would be given out on which it has processes that nobody wants."""
    story = Story(("a", 1))

    def say(number, *holdings):
        story.book.status("a", Status(agent="agent-1", holdings=holdings, number=number), 100.0)
        return story.book.nodes()[0].state

    assert say(1) == "here"
    assert say(3, held(job=9)) == "clearing"
    assert say(2) == "clearing"
    assert say(3, held(job=9)) == "clearing"
    assert say(4) == "here"
    story.book.broke("a", "agent-1")
    story.book.hello(hello("a", agent="agent-2", slots=1), story.now_s)
    story.book.status("a", Status(agent="agent-2", number=1), story.now_s)
    assert story.book.nodes()[0].state == "here", "another agent counts anew"


def test_an_agent_says_nothing_about_what_is_not_on_its_host():
    story = Story(("a", 1), ("b", 1))
    story.submit()
    story.run("a")
    story.status("b", ended([(0, 0)]))
    story.status("b", held(failure=failed(0)))
    assert story.job().state is State.RUNNING
    assert story.job().ending is None


def test_giant_texts_are_cut(pair):
    words = Failure(rank=2, host="x" * 10**6, exit_code=1, words="y" * 10**6 + "END")
    pair.status("b", held(exits=[(2, 1)], failure=words))
    failure = pair.job().failure
    assert failure.host == "b"
    assert len(failure.words) == 8192
    assert failure.words.endswith("END")


def test_halves_of_characters_can_be_stored(pair):
    words = Failure(rank=2, host="b", exit_code=1, words="half \ud800")
    pair.status("b", held(exits=[(2, 1)], failure=words))
    msgspec.json.encode(pair.job())
    assert pair.job().failure.words == "half ?"
    pair.status("a", ended([], lost="half \ud800"))
    msgspec.json.encode(pair.job())


def test_a_status_of_too_much_is_refused(pair):
    with pytest.raises(BadReport, match="holdings"):
        pair.status("a", *(held(job=i) for i in range(20_000)))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"protocol": 2}, "version 2 of the protocol"),
        ({"host": "../a"}, "name of a host"),
        ({"agent": ""}, "name of an agent"),
        ({"folder": "a/b"}, "name of a folder"),
        ({"address": "a b"}, "not an address"),
        ({"slots": (Slot(1, Kind.CPU, "0"),)}, "numbered from 0"),
        ({"slots": (Slot(0, Kind.CPU, "x" * 9999),)}, "more than 256"),
        ({"version": "\ud800"}, "a text of"),
        ({"pid": 2**80}, "number of a process"),
        ({"slots": tuple(Slot(i, Kind.CPU, "") for i in range(5000))}, "at most 4096"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_hello_that_breaks_the_protocol_is_refused(changes, says):
    story = Story()
    fields = {"version": "0", "host": "a", "agent": "x", "address": "a", "pid": 1, **changes}
    fields.setdefault("slots", ())
    with pytest.raises(BadReport, match=says):
        story.book.hello(type(hello())(**fields), story.now_s)
    assert not story.book.nodes()


def test_hosts_without_end_are_refused():
    story = Story()
    for i in range(MAX_HOSTS):
        story.book.hello(hello(f"h{i}", slots=0), story.now_s)
    with pytest.raises(BadReport, match="takes no more"):
        story.book.hello(hello("one-more"), story.now_s)


def test_of_two_reports_of_one_agent_the_one_that_is_further_stands():
    ready, running = held(phase=Phase.READY, port=1), held(exits=[(0, 0)])
    further = held(exits=[(0, 0), (1, 1)], failure=failed(1))
    end = ended([(0, 0), (1, 1)], failure=failed(1))
    order = [ready, running, further, end]
    for i, one in enumerate(order):
        assert newer(None, one) == one
        for other in order[:i]:
            assert newer(other, one) == one
            assert newer(one, other) == one
    assert newer(end, ended([], lost="?")) == end
