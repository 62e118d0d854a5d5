"""Hosts that can begin nothing: they get nothing, and cost no job a restart."""

from __future__ import annotations

import msgspec
import pytest

from manyhands.cluster.devices import cpu_shares
from manyhands.cluster.errors import BadReport
from manyhands.cluster.hosts import MAX_TEXT, check_hello
from manyhands.cluster.job import State
from manyhands.cluster.messages import Phase, Status
from tests.cluster.model import hello
from tests.cluster.story import Story, held


def say(story, host, *holdings, rests):
    status = Status(agent="agent-1", holdings=holdings, rests=rests)
    story.book.status(host, status, story.now_s)
    story.keep()


def test_a_host_without_room_does_not_eat_the_queue():
    story = Story(("a", 1))
    for _ in range(5):
        story.submit(max_restarts=0)
    story.tick()
    story.wants("a")
    assert story.job(1).state is State.STARTING
    lost = held(1, 0, Phase.ENDED, lost="cannot be begun on this host: No space left", free=True)
    say(story, "a", lost, rests=True)
    for _ in range(10):
        story.tick(1.0)
        say(story, "a", rests=True)
    assert {story.job(id).state for id in range(1, 6)} == {State.PENDING}
    assert [node.state for node in story.book.nodes()] == ["resting"]
    say(story, "a", rests=False)
    story.tick()
    assert story.job(1).state is State.STARTING
    assert story.job(1).attempt == 1


def test_agents_that_are_stopped_on_purpose_cost_no_restart():
    story = Story(("a", 1))
    story.submit(max_restarts=0)
    story.run("a")
    stopped = held(1, 0, Phase.ENDED, lost="the agent was stopped", free=True)
    say(story, "a", stopped, rests=True)
    assert story.job(1).state is State.PENDING
    assert State.PREEMPTED in story.states


def test_an_agent_that_was_killed_costs_one():
    story = Story(("a", 1))
    story.submit(max_restarts=0)
    story.run("a")
    say(story, "a", held(1, 0, Phase.ENDED, lost="the agent was killed"), rests=False)
    assert story.job(1).state is State.FAILED


def test_a_host_may_have_cores_that_are_not_adjacent():
    """As those of one NUMA node, of 256."""
    shares = cpu_shares(1, range(0, 256, 2))
    check_hello(msgspec.structs.replace(hello("a", slots=1), slots=shares))
    endless = (msgspec.structs.replace(shares[0], device="0," * 4096),)
    with pytest.raises(BadReport):
        check_hello(msgspec.structs.replace(hello("a", slots=1), slots=endless))


@pytest.mark.parametrize("field", ["version", "terms"])
def test_no_text_of_a_hello_is_without_a_limit(field):
    """They are kept, stored, and shown."""
    check_hello(msgspec.structs.replace(hello("a"), **{field: "x" * MAX_TEXT}))
    for text in ("x" * (MAX_TEXT + 1), "\ud800"):
        with pytest.raises(BadReport):
            check_hello(msgspec.structs.replace(hello("a"), **{field: text}))
