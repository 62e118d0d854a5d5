"""The agent and an office that is not as it should be: what it must not do then."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from manyhands.cluster.attempt import AGENT_STOPPED
from manyhands.cluster.messages import Phase
from tests.cluster.hosts import TestHost, gone
from tests.cluster.offices import want
from tests.cluster.programs import POLITE, STAYS, STUBBORN, SUCCEEDS, python

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def host(tmp_path: Path) -> Iterator[TestHost]:
    with TestHost(tmp_path) as made:
        yield made


def test_every_hello_names_the_folder_that_the_agent_works_in(host) -> None:
    host.start()
    host.kill_agent()
    host.start()
    first, second = host.office.hellos
    assert first.agent != second.agent
    assert first.folder == second.folder == (host.state / "id").read_text().strip() != ""


def test_what_was_wanted_before_a_lapse_is_not_started_after_it(tmp_path) -> None:
    """It may run elsewhere by now. A Status that is answered says nothing about that."""
    count = tmp_path / "count"
    given_away = want(python(f"open({str(count)!r}, 'a').write('x')"), job=2)
    with TestHost(tmp_path) as host:
        host.start()
        host.office.want(want(STUBBORN))
        processes = host.said()
        host.shorten_lease()
        host.agent.send_signal(signal.SIGSTOP)
        host.office.want(want(STUBBORN), given_away)  # the answer lies in the agent's socket
        assert gone(processes)  # by their keeper: the lease is over
        host.office.hangs = True
        host.agent.send_signal(signal.SIGCONT)
        said = len(host.office.statuses)
        host.office.wait(lambda: len(host.office.statuses) > said + 2, "the lease to hold again")
        host.office.want(want(SUCCEEDS, job=3))
        host.office.mend()
        host.office.wait_phase(Phase.ENDED, job=3)
        assert not count.exists()
        assert host.office.holding(2) is None


def test_logs_of_one_cluster_do_not_go_to_the_next(host) -> None:
    chatty = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "while 1: print('secret', flush=True); time.sleep(0.001)"
    )
    host.start()
    host.office.want(want(python(chatty), grace_s=3.0))
    host.office.wait_log(b"secret")
    host.office.cluster = "c2"
    host.office.want(want(STAYS, job=7))
    host.office.restart()
    host.said(job=7)
    size = len(host.office.logs[1, 0, 0])
    host.office.want(want(STAYS, job=7), want(STAYS, job=8))
    host.said(job=8)  # sent by the one thread that sends them all
    assert len(host.office.logs[1, 0, 0]) == size


def test_an_agent_that_is_refused_later_on_ends_its_jobs_with_grace(host) -> None:
    host.start()
    host.office.want(want(POLITE))
    processes = host.said()
    host.office.refused = {"hello": "bad-token", "status": "bad-token", "wants": "bad-token"}
    host.office.restart()
    assert host.words().startswith("error: ")
    assert host.agent.returncode == 3
    assert gone(processes)
    assert b"saved" in (host.state / "attempts/c1/1-0/rank-0.log").read_bytes()


def test_a_host_without_room_rests_and_costs_the_job_nothing(host) -> None:
    """Else it would be given the whole queue, job after job."""
    host.start()
    (host.state / "begun").write_text("in the way")
    host.office.want(want(SUCCEEDS))
    ended = host.office.wait_phase(Phase.ENDED)
    assert (ended.free, ended.lost != "") == (True, True)
    assert host.office.statuses[-1].rests
    (host.state / "begun").unlink()
    host.office.wait(lambda: not host.office.statuses[-1].rests, "it to offer itself again")
    host.office.want(want(SUCCEEDS, job=2))
    assert host.office.wait_phase(Phase.ENDED, job=2).lost == ""


def test_an_agent_that_leaves_wants_nothing_new_and_costs_no_restart(host) -> None:
    host.start()
    host.office.want(want(POLITE))
    host.said()
    host.agent.send_signal(signal.SIGTERM)
    assert host.words() == AGENT_STOPPED
    assert host.office.statuses[-1].rests
    assert host.office.holding().free


def test_an_agent_whose_thread_dies_does_not_stay(host) -> None:
    host.office.cluster = 7  # no name at all
    host.start(wait=False)
    assert host.words() == ""
    assert host.agent.returncode == 1
    assert "ValidationError" in (host.folder / "agent.log").read_text()


def test_a_second_signal_ends_the_farewell(host) -> None:
    host.start(farewell_s=1e6)
    host.office.want(want(POLITE))
    processes = host.said()
    host.office.cut()
    host.agent.send_signal(signal.SIGTERM)
    assert gone(processes)
    host.agent.send_signal(signal.SIGINT)
    assert host.words() == AGENT_STOPPED


def test_a_farewell_ends_with_the_lease(host) -> None:
    """Nobody hears it then: a coordinator that is there has given the host up."""
    host.start(farewell_s=1e6)
    host.shorten_lease()
    host.office.cut()
    host.agent.send_signal(signal.SIGTERM)
    assert host.words() == AGENT_STOPPED
