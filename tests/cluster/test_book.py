"""The book, one rule at a time; test_world.py has them all at once."""

from __future__ import annotations

import pytest
from msgspec import structs

from manyhands.cluster import jobs, part
from manyhands.cluster.errors import (
    BadReport,
    HostTaken,
    KeyTaken,
    NoSuchJob,
    QueueFull,
    Unplaceable,
)
from manyhands.cluster.hosts import GONE_S
from manyhands.cluster.job import Failure, IllegalStep, Place, Priority, Spec, State
from manyhands.cluster.messages import Holding, Origin, Phase, RankEnd, Status
from manyhands.cluster.schedule import Decisions, Promise, decide
from tests.cluster.model import MARGIN_S, hello
from tests.cluster.story import PATIENCE_S, Story, a_pair, ended, failed, held


@pytest.fixture
def pair():
    return a_pair()


# -- submission ----------------------------------------------------------------------------------


def test_more_slots_than_there_are_is_an_error_that_says_what_there_is():
    story = Story()
    with pytest.raises(Unplaceable, match="no host has joined"):
        story.submit()
    story = Story(("a", 2), ("b", 1))
    with pytest.raises(Unplaceable, match="asks for 4 slots, and the cluster has 3: a has 2, b"):
        story.submit(4)
    assert story.submit(3) == 1
    story = Story(*((f"h{i:02}", 1) for i in range(12)))
    with pytest.raises(Unplaceable, match="4 more hosts"):
        story.submit(13)


def test_hosts_of_the_hostfile_count_before_they_have_come():
    story = Story(("a", 2), asked={"a": 1, "b": 3})
    with pytest.raises(Unplaceable, match=r"has 5: a has 2, b has 3 \(not here yet\)\n"):
        story.submit(6)
    assert story.job(story.submit(5)).state is State.PENDING
    story.book.hello(hello("b", slots=1), story.now_s)
    with pytest.raises(Unplaceable, match=r"has 3: a has 2, b has 1\n"):
        story.submit(5)


@pytest.mark.parametrize("asked", [{}, {"a": None}], ids=["nobody", "all that it has"])
def test_while_nobody_knows_what_there_will_be_jobs_wait(asked):
    story = Story(decide=decide, asked=asked)
    story.submit(5)
    story.tick()
    assert story.job().reason == "wants 5 slots, there are no hosts"
    story.book.hello(hello("a", slots=2), story.now_s)
    with pytest.raises(Unplaceable, match=r"has 2: a has 2\n"):
        story.submit(5)


def test_a_refused_submission_changes_nothing():
    story = Story(("a", 1))
    for gpus in (0, 2):
        with pytest.raises(ValueError, match=r"gpus|slots"):
            story.submit(gpus)
    assert not story.book.drain()
    assert story.submit() == 1


def test_what_is_kept_in_memory_has_a_bound(monkeypatch):
    monkeypatch.setattr(jobs, "MAX_BYTES", 400_000)
    story = Story(("a", 1))
    large = {"command": ("x", "y" * 100_000)}
    for _ in range(3):
        story.book.submit(Spec(**large), "", story.now_s)
    with pytest.raises(QueueFull, match="3 jobs wait or run"):
        story.book.submit(Spec(**large), "", story.now_s)
    story.submit()
    story.keep()
    story.cancel(2)
    story.book.submit(Spec(**large), "", story.now_s)
    story.book.undo()
    story.book.submit(Spec(**large), "", story.now_s)
    story.keep()
    story.again()
    with pytest.raises(QueueFull):
        story.book.submit(Spec(**large), "", story.now_s)


def test_a_key_stands_for_one_submission_also_when_it_is_over():
    story = Story(("a", 1))
    spec = Spec(command=("run",))
    first, new = story.book.submit(spec, "k", 1.0)
    assert new
    assert story.book.submit(spec, "k", 2.0) == (first, False)
    with pytest.raises(KeyTaken, match="belongs to job 1"):
        story.book.submit(Spec(command=("other",)), "k", 2.0)
    over = story.cancel(1)
    assert story.book.submit(spec, "k", 3.0, known=over) == (over, False)
    assert story.book.submit(spec, "", 3.0)[0].id == 2
    assert story.book.submit(spec, "", 3.0)[0].id == 3


# -- the order of things -------------------------------------------------------------------------


def test_a_job_from_beginning_to_end():
    story = Story(("a", 2), ("b", 1), hub=lambda job, k: (f"code-{job}", f"job-{job}-{k}"))
    story.submit(3, batch=7)
    story.tick()
    assert story.job().state is State.STARTING
    assert story.job().places == (Place("a", (0, 1)), Place("b", (0,)))
    before = story.wants("b")
    [want] = before.wants
    assert (want.task.master_port, want.task.master_addr) == (0, "a.test")
    assert want.task.ranks == ((2, 0),)
    assert (want.task.world_size, want.task.num_hosts, want.task.rank_of_host) == (3, 2, 1)
    assert (want.task.hub, want.task.run) == ("code-1", "job-1-0")
    assert story.wants("a").wants[0].task.ranks == ((0, 0), (1, 1))

    story.status("b", held(phase=Phase.READY))
    assert story.wants("b") == before, "nothing new without a port"
    story.status("a", held(phase=Phase.READY, port=4711))
    assert story.wants("b").version > before.version
    assert {story.wants(host).wants[0].task.master_port for host in "ab"} == {4711}

    story.status("a", held(port=4711))
    assert story.job().state is State.STARTING
    story.status("b", held())
    assert story.job().state is State.RUNNING
    story.status("a", ended([(0, 0), (1, 0)], port=4711))
    assert story.job().state is State.RUNNING
    assert len(story.wants("a").wants) == 1, "what has ended is held until all has"
    story.status("b", ended([(2, 0)]))
    job = story.job()
    assert (job.state, job.exit_code, job.ended_s) == (State.SUCCEEDED, 0, story.now_s)
    assert not story.wants("a").wants
    assert not story.book.placed
    assert story.states == ["PENDING", "STARTING", "RUNNING", "SUCCEEDED"]
    with pytest.raises(NoSuchJob):
        story.cancel()


def test_a_job_that_ends_before_anybody_saw_it_run():
    story = Story(("a", 1))
    story.submit()
    story.tick()
    story.wants("a")
    story.status("a", ended([(0, 0)]))
    assert story.states == ["PENDING", "STARTING", "RUNNING", "SUCCEEDED"]


def test_the_first_failure_by_time_is_the_jobs(pair):
    late = held(exits=[(2, 9)], failure=failed(2, 9))
    pair.status("b", late)
    assert pair.job().ending.into is State.FAILED
    assert pair.wants("a").wants[0].stop
    early = (RankEnd(rank=1, exit_code=3, at_s=1.0), RankEnd(rank=0, exit_code=143, at_s=12.0))
    pair.status(
        "a", Holding(job=1, attempt=0, phase=Phase.ENDED, ended=early, failure=failed(1, 3))
    )
    assert pair.job().state is State.RUNNING, "a process of b is left"
    pair.status("b", ended([(2, 9)], failure=failed(2, 9)))
    job = pair.job()
    assert (job.state, job.exit_code) == (State.FAILED, 3)
    assert job.failure == Failure(rank=1, host="a", exit_code=3, words="Traceback")
    assert job.reason == "rank 1 on a failed with exit code 3"


def test_a_death_by_signal_is_said(pair):
    pair.status("b", held(exits=[(2, 139)], failure=failed(2, 139)))
    assert "exit code 139 (signal 11)" in pair.job().ending.reason


def test_a_failure_that_comes_of_a_lost_host_is_the_hosts(pair):
    pair.now_s += 5
    pair.status("b", ended([(2, 1)], failure=failed(2)))
    assert pair.job().ending.into is State.FAILED
    pair.now_s += 9  # a has been silent for longer than its lease and margin, b has not
    pair.tick()
    assert pair.states[-2:] == ["NODE_FAIL", "PENDING"]
    assert pair.job().node_failures == 1


def test_its_own_failure_stays_when_its_host_is_lost_after_it():
    story = Story(("a", 1))
    story.submit()
    story.run("a")
    story.status("a", held(exits=[(0, 5)], failure=failed(0, 5)))
    story.tick(PATIENCE_S)
    assert (story.job().state, story.job().exit_code) == (State.FAILED, 5)


# -- cancel, time, preemption --------------------------------------------------------------------


def test_cancel_while_it_waits():
    story = Story(("a", 1))
    story.submit()
    job = story.cancel()
    assert (job.state, job.exit_code) == (State.CANCELLED, 143)


def test_cancel_before_any_agent_was_told_ends_it_at_once():
    story = Story(("a", 1))
    story.submit()
    story.tick()
    assert story.cancel().state is State.CANCELLED
    assert not story.wants("a").wants


def test_cancel_waits_for_the_last_process(pair):
    assert pair.cancel().ending.into is State.CANCELLED
    assert [pair.wants(host).wants[0].stop for host in "ab"] == [True, True]
    pair.status("a", ended([(0, 143), (1, 143)]))
    assert pair.job().state is State.RUNNING
    assert pair.cancel().seq == pair.job().seq, "twice is once"
    pair.status("b", ended([(2, 0)]))
    assert (pair.job().state, pair.job().exit_code) == (State.CANCELLED, 143)


def test_cancel_of_what_the_agent_never_began():
    story = Story(("a", 1))
    story.submit()
    story.tick()
    assert story.wants("a").wants
    story.cancel()
    assert story.job().state is State.STARTING, "the agent was told of it: it may have begun"
    story.status("a", ended([]))
    assert story.job().state is State.CANCELLED


@pytest.mark.parametrize(
    ("end", "state"),
    [
        (ended([(0, 0)]), State.SUCCEEDED),
        (ended([(0, 2)], failure=failed(0, 2)), State.FAILED),
    ],
)
@pytest.mark.parametrize("told", [False, True])
def test_what_ended_before_it_was_told_to_has_ended_first(end, state, told):
    story = Story(("a", 1))
    story.submit()
    story.run("a")
    story.cancel()
    if told:
        assert story.wants("a").wants[0].stop
    story.status("a", end)
    assert story.job().state is (State.CANCELLED if told else state)


@pytest.mark.parametrize("why", ["preempted", "node failure", "failure", "time"])
def test_cancel_wins_over_every_other_end(pair, why):
    if why == "preempted":
        pair.submit(1, priority=Priority.HIGH)
        pair.book.adopt(Decisions(preempt=((1, 2),)), pair.now_s)
    elif why == "node failure":
        pair.status("b", ended([], lost="the keeper was killed"))
    elif why == "failure":
        pair.status("b", ended([(2, 1)], failure=failed(2)))
    else:
        story = Story(("a", 2), ("b", 1))
        story.submit(3, time_s=5)
        pair = story.run("a", "b")
        pair.tick(5)
    pair.keep()
    assert pair.job().ending is not None
    for host in "ab":
        pair.wants(host)
    pair.cancel()
    pair.status("a", ended([(0, 143), (1, 143)]))
    pair.status("b", ended([(2, 143)]))
    assert (pair.job().state, pair.job().exit_code) == (State.CANCELLED, 143)


def test_the_time_limit():
    story = Story(("a", 1))
    story.submit(time_s=5)
    story.run("a")
    assert story.book.next_due_s() == story.now_s + 5
    story.tick(4.9)
    assert story.job().ending is None
    story.tick(0.2)
    assert story.wants("a").wants[0].stop
    story.status("a", ended([(0, 0)]))
    assert (story.job().state, story.job().exit_code) == (State.TIMEOUT, 124)


def test_the_line_is_in_the_order_of_submission_whatever_the_clock_says():
    story = Story(("a", 1), decide=decide)
    story.submit()
    story.run("a")
    story.submit()
    story.now_s -= 50
    story.submit()
    story.now_s += 50
    story.status("a", ended([(0, 0)]))
    story.tick()
    assert [story.job(id).state for id in (2, 3)] == [State.STARTING, State.PENDING]


def test_preemption_requeues_and_does_not_count_as_a_restart(pair):
    for number in (1, 2, 3):
        pair.submit(1, priority=Priority.HIGH)
        pair.book.adopt(Decisions(preempt=((1, number + 1),)), pair.now_s)
        pair.keep()
        assert pair.job().state is State.RUNNING
        for host in "ab":
            pair.wants(host)
        attempt = pair.job().attempt
        pair.status("a", held(1, attempt, Phase.ENDED, exits=[(0, 0), (1, 143)]))
        pair.status("b", held(1, attempt, Phase.ENDED, exits=[(2, 0)]))
        assert pair.states[-2:] == ["PREEMPTED", "PENDING"]
        assert f"makes room for job {number + 1}" in pair.job().reason
        pair.run("a", "b")
        assert (pair.job().attempt, pair.job().preemptions) == (number, number)
        assert pair.wants("b").wants[0].task.run == f"job-1-{number}"
        pair.cancel(number + 1)
    assert pair.job().node_failures == 0


def test_nobody_ends_for_a_job_that_needs_no_room_any_more(pair):
    """The schedule decides while others act: its winner may be cancelled by then."""
    pair.submit(1, priority=Priority.HIGH)
    pair.cancel(2)
    pair.book.adopt(Decisions(preempt=((1, 2), (1, 99), (1, 1))), pair.now_s)
    assert pair.job().ending is None


# -- the schedule, and changes that could not be stored ------------------------------------------


@pytest.mark.parametrize(
    "places",
    [
        (Place("a", (0,)),),
        (Place("a", (0, 0)),),
        (Place("a", (0,)), Place("a", (1,))),
        (Place("a", (1, 2)),),
        (Place("a", (0,)), Place("nobody", (0,))),
        (Place("a", (0, 1)), Place("b", ())),
    ],
    ids=str,
)
def test_a_decision_that_does_not_hold_is_not_carried_out(places):
    story = Story(("a", 2), ("b", 1))
    story.submit(2)
    story.book.adopt(Decisions(place=((1, places), (99, places))), story.now_s)
    assert story.job().state is State.PENDING
    story.book.adopt(Decisions(place=((1, (Place("a", (1,)), Place("b", (0,)))),)), story.now_s)
    assert story.job().state is State.STARTING


def test_a_promise_is_looked_at_when_its_time_has_come():
    story = Story(("a", 1))
    now_s = story.now_s
    story.book.ask(now_s)
    story.book.adopt(Decisions(promise=Promise(2, now_s + 9)), now_s)
    assert story.book.next_due_s() == now_s + 9
    story.book.ask(now_s + 9)
    assert story.book.next_due_s() == now_s + PATIENCE_S
    story.book.adopt(Decisions(promise=Promise(2, now_s + 12), again_s=now_s + 11), now_s + 9)
    assert story.book.next_due_s() == now_s + 11


def test_who_fills_slots_in_front_of_a_large_job_is_told_in_time():
    """Job 1 is gone by 205, when 2 wants both slots. 3 has a grace of 30 s."""
    story = Story(("a", 2), decide=decide)
    story.submit(time_s=100.0, grace_s=5.0)
    story.submit(2)
    story.submit(priority=Priority.BEST_EFFORT, grace_s=30.0)
    for now_s, into in ((100.0, None), (174.5, None), (175.0, State.PREEMPTED)):
        story.now_s = now_s
        story.status("a", *(held(id, port=5000) for id in (1, 3) if now_s > 100.0))
        story.tick()
        story.wants("a")
        assert story.job(3).places, now_s
        ending = story.job(3).ending
        assert (ending and ending.into) == into, now_s
    assert ending.reason == "makes room for job 2"


def test_what_could_not_be_stored_has_not_happened(pair):
    before, wants = pair.job(), pair.wants("a")
    pair.book.cancel(1, pair.now_s)
    pair.book.submit(Spec(command=("x",)), "key", pair.now_s)
    pair.book.hello(hello("new"), pair.now_s)
    pair.book.hello(hello("a", slots=1), pair.now_s)
    changes = pair.book.drain()
    assert (len(changes.jobs), len(changes.hosts)) == (2, 2)
    pair.book.undo()
    assert pair.job() == before
    assert [node.name for node in pair.book.nodes()] == ["a", "b"]
    assert len(pair.book.nodes()[0].slots) == 2
    assert not pair.book.refresh()
    assert pair.wants("a") == wants
    assert not pair.book.drain()
    pair.cancel(1)
    assert pair.submit() == 2


def test_an_end_that_could_not_be_stored_is_found_again(pair):
    pair.status("a", ended([(0, 0), (1, 0)]))
    pair.book.status("b", Status(agent="agent-1", holdings=(ended([(2, 0)]),)), pair.now_s)
    pair.book.undo()
    assert pair.job().state is State.RUNNING
    pair.tick()
    assert pair.job().state is State.SUCCEEDED


def test_a_job_that_a_bug_stops_takes_no_other_with_it(monkeypatch):
    story = Story(("a", 1), ("b", 1))
    for id, host in ((1, "a"), (2, "b")):
        story.submit()
        story.run(host, id=id)
    real = part.verdict

    def verdict(job, *rest):
        if job.id == 1:
            raise IllegalStep(job, State.PENDING)
        return real(job, *rest)

    monkeypatch.setattr(part, "verdict", verdict)
    story.tick()
    assert list(story.book.poisoned) == [1]
    story.status("a", ended([(0, 0)]))
    assert story.job(1).state is State.RUNNING
    story.status("b", held(2, phase=Phase.ENDED, exits=[(0, 0)]))
    assert story.job(2).state is State.SUCCEEDED


def test_names_of_hosts_that_are_gone_are_not_kept():
    story = Story(("a", 1))
    story.submit()
    story.run("a")
    story.status("a", ended([(0, 0)]))
    assert not story.book._jobs._on


# -- going down ----------------------------------------------------------------------------------


def test_a_cluster_that_is_taken_down(pair):
    pair.submit()
    pair.book.leave(pair.now_s)
    pair.keep()
    assert pair.book.lingering() == ([1], ["a", "b"])
    for host in "ab":
        wants = pair.wants(host)
        assert wants.leave
        assert [want.stop for want in wants.wants] == [True]
    assert pair.book.lingering() == ([1], [])
    pair.status("a", ended([(0, 0), (1, 143)]))
    pair.status("b", ended([(2, 143)]))
    pair.tick()
    assert pair.book.lingering() == ([], [])
    assert pair.job().state is State.PENDING
    assert "the cluster was taken down" in pair.reasons[-1]
    assert pair.job(2).state is State.PENDING
    pair.book.forget_hosts()
    assert pair.book.drain().gone == ("a", "b")


def test_a_users_agent_that_has_hung_up_is_not_waited_for():
    story = Story(("a", 1), ("b", 1), ("c", 1))  # c has never asked for anything
    for host in "ab":
        story.wants(host)
    story.book.leave(story.now_s)
    story.keep()
    assert story.book.lingering() == ([], ["a", "b"])
    story.book.broke("a", "agent-1")
    assert story.book.lingering() == ([], ["b"])
    story.status("a")
    assert story.book.lingering() == ([], ["b"]), "its last words came after its line had ended"


# -- agents of an earlier `up` -------------------------------------------------------------------


def of_up(agent="agent-1", terms="old", **changes):
    """From a host of two slots."""
    made = hello("a", slots=2, agent=agent)
    return structs.replace(made, origin=Origin.UP, terms=terms, **changes)


@pytest.fixture
def killed():
    """A job runs on an agent of `up`, which is killed, and comes back with other options."""
    story = Story()
    story.book.hello(of_up(), story.now_s)
    story.status("a")
    story.submit()
    story.run("a")
    story.again(terms={"a": "new"}, asked={"a": 1})
    return story


def test_an_agent_with_other_options_is_told_to_leave_and_its_job_begins_again(killed):
    assert not killed.wants("a").leave, "that its job begins again is not stored yet"
    killed.tick()
    assert killed.wants("a").leave
    assert killed.wants("a").wants[0].stop
    with pytest.raises(HostTaken):
        killed.book.hello(of_up("agent-2", "new", folder="other"), killed.now_s)
    killed.book.status(
        "a",
        Status(agent="agent-1", holdings=(ended([(0, 143)]),), rests=True),
        killed.now_s,
    )
    killed.keep()
    killed.book.broke("a", "agent-1")
    killed.tick()
    assert killed.book.nodes() == []
    assert (killed.job().state, killed.job().node_failures) == (State.PENDING, 0)
    killed.book.hello(of_up("agent-2", "new", folder="other"), killed.now_s)
    killed.status("a", agent="agent-2")
    killed.tick()
    assert (killed.job().state, killed.job().attempt) == (State.STARTING, 1)


def test_an_agent_that_goes_before_it_asks_again_has_left_too(killed):
    """Nobody hears it hang up: it was answered, and asks no more."""
    seen = killed.wants("a").version
    killed.tick()
    killed.book.host("a", "agent-1", killed.now_s)
    killed.book.status(
        "a",
        Status(agent="agent-1", holdings=(ended([(0, 143)]),), rests=True),
        killed.now_s,
    )
    killed.keep()
    killed.book.tell("a", seen)
    killed.book.hello(of_up("agent-2", "new", folder="other"), killed.now_s)
    killed.status("a", agent="agent-2")
    assert [node.state for node in killed.book.nodes()] == ["here"]


@pytest.fixture
def leaver(killed):
    """Its job has ended, it has been told so, and has not asked again yet."""
    seen = killed.wants("a").version
    killed.tick()
    killed.book.host("a", "agent-1", killed.now_s)
    last = Status(agent="agent-1", holdings=(ended([(0, 143)]),), rests=True)
    killed.book.status("a", last, killed.now_s)
    killed.keep()
    assert killed.book.tell("a", seen).leave
    killed.tick()
    return killed


def test_an_agent_that_leaves_is_known_until_it_has_gone(leaver):
    """It has logs to send yet, and would be refused."""
    assert not leaver.wants("a").wants
    leaver.tick()
    leaver.book.broke("a", "agent-1")
    assert leaver.book.is_stale
    leaver.tick()
    assert leaver.book.nodes() == []


def test_an_agent_that_leaves_and_is_not_heard_again_is_forgotten(leaver):
    """Before its lease is over, or at its end."""
    for margin_s, rest_s in ((100.0, GONE_S), (MARGIN_S, PATIENCE_S)):
        leaver.book.margin_s = margin_s
        assert leaver.book.next_due_s() == leaver.now_s + rest_s
    leaver.tick(PATIENCE_S - 0.1)
    assert [node.state for node in leaver.book.nodes()] == ["leaving"]
    leaver.tick(0.2)
    assert leaver.book.nodes() == []


def test_an_agent_with_other_options_is_given_nothing_and_its_slots_do_not_count(killed):
    with pytest.raises(Unplaceable, match=r"cluster has 1: a has 1 \(not here yet"):
        killed.submit(2)
    killed.book.hello(of_up(), killed.now_s)
    killed.status("a", held())
    assert killed.book.nodes()[0].state == "leaving"
    assert killed.book.ask(killed.now_s)[0] == []


def test_an_agent_with_other_options_that_nobody_knows_is_refused(killed):
    with pytest.raises(BadReport, match="of an earlier `up`, which had other options"):
        killed.book.hello(of_up("agent-2"), killed.now_s)
    with pytest.raises(BadReport):
        killed.book.hello(of_up("agent-2", "new", host="b"), killed.now_s)  # not asked for at all
    killed.book.hello(hello("b", agent="agent-3"), killed.now_s)  # a user's stays the user's


def test_an_agent_with_the_same_options_goes_on():
    story = Story(terms={"a": "old"})
    story.book.hello(of_up(), story.now_s)
    story.status("a")
    story.submit()
    story.run("a")
    story.again(terms={"a": "old"})
    story.book.hello(of_up(), story.now_s)
    story.status("a", held(port=5000))
    story.tick()
    assert not story.wants("a").leave
    assert story.job().state is State.RUNNING
