"""Deaths by kill -9 on a host, at every point of an attempt's life: nothing runs twice, nothing
is left, and what cannot be known is said to be lost.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import TYPE_CHECKING

import psutil
import pytest

from manyhands.cluster.attempt import AGENT_KILLED, AGENT_STOPPED, KEEPER_KILLED
from manyhands.cluster.messages import Phase
from tests.cluster.hosts import TestHost, gone
from tests.cluster.offices import want
from tests.cluster.programs import (
    DEAF,
    HAS_DAEMON,
    HAS_MARKED_DAEMON,
    LEAVES_DAEMON,
    PARENT,
    POLITE,
    STAYS,
    STUBBORN,
    python,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def host(tmp_path: Path) -> Iterator[TestHost]:
    with TestHost(tmp_path) as made:
        made.start()
        yield made


def counted(folder: Path, code: str) -> tuple[str, ...]:
    """The program, and a mark for each time that it was started."""
    return python(f"open({str(folder / 'count')!r}, 'a').write('x')\n{code}")


# A rank, and its child


def test_a_rank(host) -> None:
    host.office.want(want(STAYS, ranks=2))
    (rank,), (other,) = host.said(0), host.said(1)
    rank.kill()
    ended = host.office.wait_phase(Phase.ENDED)
    assert (ended.failure.rank, ended.failure.exit_code, ended.lost) == (0, 137, "")
    assert gone([rank, other])


def test_a_rank_with_a_daemon(host) -> None:
    host.office.want(want(HAS_DAEMON, grace_s=0.1))
    rank, daemon = host.said()
    rank.kill()
    assert host.office.wait_phase(Phase.ENDED).failure.exit_code == 137
    assert gone([daemon])


def test_a_rank_that_is_ending(host) -> None:
    code = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True))\n"
    command = python(code + STAYS[-1])
    host.office.want(want(command))
    (rank,) = host.said()
    host.office.want(want(command, stop=True))
    host.office.wait_log(b"asked")
    rank.kill()
    ended = host.office.wait_phase(Phase.ENDED)
    assert (ended.failure, ended.lost) == (None, "")  # it was told to end: no failure of its own


def test_the_child_of_a_rank_is_the_ranks_own_affair(host) -> None:
    host.office.want(want(PARENT))
    rank, child = host.said()
    child.kill()
    assert gone([child])
    assert rank.is_running()
    host.office.want(want(PARENT, stop=True))
    assert host.office.wait_phase(Phase.ENDED).failure is None


# The keeper


@pytest.mark.parametrize("program", [STUBBORN, PARENT, HAS_DAEMON])
def test_a_keeper(host, program) -> None:
    host.office.want(want(program))
    processes = host.said()
    (keeper,) = host.keepers()
    keeper.kill()
    ended = host.office.wait_phase(Phase.ENDED)
    assert (ended.lost, ended.failure) == (KEEPER_KILLED, None)
    assert gone(processes)


def test_a_keeper_beside_another(host) -> None:
    host.office.want(want(STAYS, job=1), want(STAYS, job=2))
    (one,), (other,) = host.said(job=1), host.said(job=2)
    psutil.Process(one.ppid()).kill()
    assert host.office.wait_phase(Phase.ENDED, job=1).lost == KEEPER_KILLED
    assert gone([one])
    assert other.is_running()
    assert host.office.holding(2).phase is Phase.RUNNING


def test_a_keeper_whose_attempt_is_ending(host) -> None:
    host.office.want(want(DEAF, grace_s=100_000.0))
    processes = host.said()
    (keeper,) = host.keepers()
    host.office.want(want(DEAF, grace_s=100_000.0, stop=True))
    host.office.wait_log(b"asked")
    keeper.kill()
    assert host.office.wait_phase(Phase.ENDED).lost == KEEPER_KILLED
    assert gone(processes)


def test_a_keeper_that_is_stopped_does_not_keep_its_ranks_alive(host) -> None:
    """It cannot obey, so it is killed after a while."""
    host.kill_agent()
    host.start(patience_s=0.5)
    host.office.want(want(STUBBORN, grace_s=0.1))
    processes = host.said()
    (keeper,) = host.keepers()
    keeper.suspend()
    host.office.want(want(STUBBORN, grace_s=0.1, stop=True))
    assert host.office.wait_phase(Phase.ENDED).lost == KEEPER_KILLED
    assert gone([keeper, *processes])


# The agent


@pytest.mark.parametrize("program", [STUBBORN, PARENT, HAS_DAEMON])
def test_an_agent(host, program) -> None:
    host.office.want(want(program))
    processes = host.said()
    host.kill_agent()
    assert gone([*host.family(), *processes])
    host.start()
    ended = host.office.wait_phase(Phase.ENDED)
    assert (ended.lost, ended.failure) == (AGENT_KILLED, None)
    assert host.office.hellos[0].agent != host.office.hellos[-1].agent


def test_an_agent_before_the_start(host) -> None:
    command = counted(host.folder, "")
    host.office.want(want(command, port=0))
    host.office.wait_phase(Phase.READY)
    host.kill_agent()
    host.office.want(want(command))
    host.start()
    assert host.office.wait_phase(Phase.ENDED).lost == AGENT_KILLED
    assert not (host.folder / "count").exists()


def test_an_agent_whose_attempt_is_ending(host) -> None:
    host.office.want(want(DEAF, grace_s=100_000.0))
    processes = host.said()
    host.office.want(want(DEAF, grace_s=100_000.0, stop=True))
    host.office.wait_log(b"asked")
    host.kill_agent()
    assert gone(processes)
    host.start()
    assert host.office.wait_phase(Phase.ENDED).failure is None


def test_an_agent_between_the_end_and_the_report(host) -> None:
    """What the keeper wrote is as good as what the agent saw."""
    release = host.folder / "release"
    os.mkfifo(release)
    command = counted(
        host.folder, f"print('up', flush=True); open({str(release)!r}).read(); raise SystemExit(9)"
    )
    host.office.want(want(command))
    host.office.wait_phase(Phase.RUNNING)
    host.office.wait_log(b"up")
    processes = host.family()
    host.office.cut("status", "send_log")
    release.write_text("go")
    assert gone(processes)
    host.kill_agent()
    host.office.mend()
    host.start()
    ended = host.office.wait_phase(Phase.ENDED)
    assert (ended.failure.exit_code, ended.lost) == (9, "")
    assert (host.folder / "count").read_text() == "x"


def test_an_agent_and_its_logs(host) -> None:
    """What was not sent before its death is sent by the next, once."""
    host.office.cut("send_log")
    host.office.want(want(python("print('one'); print('two')")))
    host.office.wait(lambda: (held := host.office.holding()) and held.ended, "the rank's end")
    host.kill_agent()
    host.office.logs[1, 0, 0] = bytearray(b"one\n")
    host.office.mend()
    host.start()
    assert host.office.wait_log(b"two") == b"one\ntwo\n"


# Several at once


def test_an_agent_and_its_keeper(host) -> None:
    host.office.want(want(HAS_MARKED_DAEMON))
    rank, daemon = host.said()
    agent, (keeper,) = psutil.Process(host.agent.pid), host.keepers()
    for process in (agent, keeper):
        process.suspend()  # neither sees the other die
    for process in (agent, keeper):
        process.kill()
    host.agent.wait()
    assert gone([keeper, rank])
    host.start()
    assert gone([daemon])
    assert host.office.wait_phase(Phase.ENDED).lost == AGENT_KILLED


def test_everything(host) -> None:
    host.office.want(want(PARENT, ranks=2))
    processes = [*host.said(0), *host.said(1), *host.family(), psutil.Process(host.agent.pid)]
    for process in processes:
        process.suspend()
    for process in processes:
        if process.is_running():
            process.kill()
    host.agent.wait()
    host.start()
    assert gone(processes)
    assert host.office.wait_phase(Phase.ENDED).lost == AGENT_KILLED


def test_a_stopped_keeper_of_a_dead_agent_is_ended_by_the_next(host) -> None:
    host.office.want(want(STUBBORN))
    processes = host.said()
    (keeper,) = host.keepers()
    keeper.suspend()
    host.kill_agent()
    host.start()
    assert gone([keeper, *processes])
    assert host.office.wait_phase(Phase.ENDED).lost == AGENT_KILLED


@pytest.mark.parametrize("pause_s", [0.0, 0.01, 0.03, 0.06, 0.1, 0.2])
def test_an_agent_at_some_moments_of_a_start(host, pause_s) -> None:
    """Wherever it was: begun once or not at all, ended, and said so by the next."""
    command = counted(host.folder, LEAVES_DAEMON[-1])
    host.office.want(want(command, grace_s=0.1))
    threading.Event().wait(pause_s)  # a place in the life of an attempt, not a wait for one
    host.kill_agent()
    host.start()
    ended = host.office.wait_phase(Phase.ENDED)
    count = host.folder / "count"
    assert (count.read_text() if count.exists() else "") in ("", "x")
    if not ended.lost:
        assert {end.exit_code for end in ended.ended} == {0}
    host.office.want(want(POLITE, job=2))
    host.said(job=2)  # it is as good as new


def test_a_rank_at_some_moments_of_its_start(host) -> None:
    """From before its program is there: it was started once, is the failure, and ends the other."""
    for job, pause_s in enumerate([0.0, 0.01, 0.03, 0.1], start=1):
        host.office.want(want(counted(host.folder, STAYS[-1]), job=job, ranks=2, grace_s=0.1))
        host.until(lambda: len(host.ranks()) == 2)
        killed, other = host.ranks()
        threading.Event().wait(pause_s)  # a place in its life, as above
        killed.kill()
        ended = host.office.wait_phase(Phase.ENDED, job=job)
        assert (ended.failure.exit_code, ended.lost) == (137, ""), pause_s
        assert gone([killed, other])
        count = host.folder / "count"
        assert (count.read_text() if count.exists() else "") in ("", "x", "xx"), pause_s
        count.unlink(missing_ok=True)


def test_everything_at_some_moments_of_a_start(host) -> None:
    """As an agent alone: begun once or not at all, and said so by the next. The last moment is when
    its program has begun.
    """
    count = host.folder / "count"
    for job, pause_s in enumerate([0.0, 0.05, None], start=1):
        host.office.want(want(counted(host.folder, LEAVES_DAEMON[-1]), job=job, grace_s=0.1))
        if pause_s is None:
            host.until(count.exists)
        threading.Event().wait(pause_s or 0.0)
        agent = psutil.Process(host.agent.pid)
        agent.suspend()  # it starts nothing more
        processes = [*host.family(), agent]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        host.agent.wait()
        host.start()
        ended = host.office.wait_phase(Phase.ENDED, job=job)
        assert (count.read_text() if count.exists() else "") in ("", "x"), pause_s
        if not ended.lost:
            assert {end.exit_code for end in ended.ended} == {0}
        assert gone(processes)
        count.unlink(missing_ok=True)


# The network, while a job is cancelled


def test_a_network_that_is_lost_before_the_agent_hears_of_the_end(host) -> None:
    host.office.want(want(DEAF, grace_s=0.1))
    processes = host.said()
    host.office.cut()
    host.until(lambda: "cannot be reached" in (host.folder / "agent.log").read_text())
    host.office.want(want(DEAF, grace_s=0.1, stop=True))
    assert all(process.is_running() for process in processes)
    host.office.mend()
    ended = host.office.wait_phase(Phase.ENDED)
    assert (ended.failure, ended.lost) == (None, "")
    assert gone(processes)


def test_a_network_that_is_lost_before_the_end_is_reported(host) -> None:
    """Its processes end all the same; what it says then is the end that was asked for."""
    host.office.want(want(DEAF, grace_s=0.5))
    processes = host.said()
    host.office.want(want(DEAF, grace_s=0.5, stop=True))
    host.office.wait_log(b"asked")
    host.office.cut()
    assert gone(processes)
    host.until(lambda: "cannot be reached" in (host.folder / "agent.log").read_text())
    assert host.office.holding().phase is Phase.RUNNING
    host.office.mend()
    ended = host.office.wait_phase(Phase.ENDED)
    assert (ended.failure, ended.lost) == (None, "")


def test_an_agent_at_every_step_of_a_life(tmp_path) -> None:
    """Before each thing that it does to its disk, and before it starts a keeper: the attempt was
    started once at most, the next agent ends and forgets it, and nothing is left.
    """
    with TestHost(tmp_path) as host:
        command = counted(host.folder, "")
        job, lived = 0, False
        while not lived:
            job += 1
            (host.folder / "count").unlink(missing_ok=True)
            host.office.restart()
            host.start(wait=False, dies_at=job)
            host.office.want(want(command, job=job, grace_s=0.1))
            lived = host.outlives(job)
            host.office.want()
            if not lived:
                host.start()
                host.until(lambda: not host.office.statuses[-1].holdings)
                host.kill_agent()
            count = host.folder / "count"
            assert (count.read_text() if count.exists() else "") in ("", "x"), job
    assert job > 10  # there are as many steps at least


def test_signals_while_the_last_agents_keeper_still_ends(host) -> None:
    """An agent that is told to go before it came is gone too."""
    host.office.want(want(STUBBORN))
    processes = host.said()
    host.kill_agent()
    host.start(wait=False)
    host.agent.send_signal(signal.SIGTERM)
    host.agent.wait()
    assert gone(processes)


def test_an_agent_that_is_told_to_go_while_something_cannot_be_killed_says_no_hello(host) -> None:
    """A Hello says that all that was left has ended."""
    host.office.want(want(STUBBORN))
    host.said()
    host.kill_agent()
    host.start(wait=False, unkillable=True, patience_s=0.1)
    log = host.folder / "agent.log"
    host.until(lambda: b"cannot be killed" in log.read_bytes())
    hellos = len(host.office.hellos)
    host.agent.send_signal(signal.SIGTERM)
    assert host.words() == AGENT_STOPPED
    assert len(host.office.hellos) == hellos
