"""The crew: agents that die are started again, unless their host is heard; all end at the end."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from manyhands.cluster.crew import FIRST_DELAY_S, LAST_DELAY_S, Crew, delays
from manyhands.cluster.holder import LOCK, Holder
from manyhands.cluster.starters import Errand, LocalStarter, SshStarter

WAIT_S = 60.0
NOW = threading.Event()
NOW.set()


class Stage:
    """Agents that are small shell scripts, and what is said of them."""

    def __init__(self, folder):
        self.folder = folder
        self.heard = frozenset()
        self.said = []
        self.news = threading.Condition()

    def say(self, text):
        with self.news:
            self.said.append(text)
            self.news.notify_all()

    def errand(self, name, script):
        starter = LocalStarter(command=("/bin/sh", "-c", f"read code; {script}", name))
        log = self.folder / f"{name}.log"
        return starter, Errand(name=name, address=name, arguments=(), code="c", log=log)

    def crew(self, **scripts):
        errands = [self.errand(name, script) for name, script in scripts.items()]
        return Crew(errands, is_heard=lambda host: host in self.heard, say=self.say)

    def until_said(self, number):
        with self.news:
            assert self.news.wait_for(lambda: len(self.said) >= number, WAIT_S), self.said
            return self.said[number - 1]

    def lives(self, name, number):
        """The ids that the agent has had, once there are so many."""
        deadline = time.monotonic() + WAIT_S
        while True:
            log = self.folder / f"{name}.log"
            lives = [int(word) for word in log.read_text().split()] if log.exists() else []
            if len(lives) >= number:
                return lives
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path)


STAY = "echo $$; exec sleep 600"


def test_one_that_is_killed_is_started_again(stage):
    with stage.crew(a=STAY) as crew:
        (first,) = stage.lives("a", 1)
        assert crew.pid("a") == first
        os.kill(first, signal.SIGKILL)
        assert "a: it was killed by signal 9" in stage.until_said(1)
        second = stage.lives("a", 2)[1]
        assert crew.end(hurry=NOW) in ([], ["a"])
        assert crew.pid("a") is None
    assert not psutil.pid_exists(first)
    assert not psutil.pid_exists(second)


def test_what_it_said_last_and_the_remedy_are_told(stage):
    with stage.crew(a="echo no GPU 7; exit 3") as crew:
        said = stage.until_said(1)
        assert "a: it ended with code 3" in said
        assert "    no GPU 7" in said
        assert "a.log" in said
        stage.until_said(2)  # it is tried again
        (trouble,) = crew.troubles
        assert trouble.host == "a"


def test_a_program_that_is_not_there_is_no_end_of_the_crew(stage):
    starter, errand = stage.errand("b", STAY)
    missing = LocalStarter(command=("/no/such/program",))
    _, given = stage.errand("a", STAY)
    crew = Crew(
        [(missing, given), (starter, errand)], is_heard=stage.heard.__contains__, say=stage.say
    )
    with crew:
        assert "cannot start /no/such/program" in stage.until_said(1)
        stage.lives("b", 1)
        assert [trouble.host for trouble in crew.troubles] == ["a"]


def test_one_of_this_machine_is_started_again_though_its_host_is_heard(stage):
    """The coordinator has yet to notice that it is dead."""
    stage.heard = frozenset({"a"})
    with stage.crew(a="echo $$; exit 1"):
        stage.lives("a", 2)


@pytest.mark.parametrize("code", [75, 255])
def test_where_an_agent_may_be_at_work_none_is_started_while_its_host_is_heard(stage, code):
    """It found another one in its folder; or ssh has died."""
    stage.heard = frozenset({"a"})
    _, given = stage.errand("a", "")
    ssh = SshStarter(ssh=("/bin/sh", "-c", f"echo $$; exit {code}"))
    local, other = stage.errand("b", "echo $$; exit 1")
    crew = Crew(
        [(ssh, given), (local, other)], is_heard=lambda host: host in stage.heard, say=stage.say
    )
    with crew:
        stage.lives("b", 2)  # as long as it takes another to be started again
        assert len(stage.lives("a", 1)) == 1
        assert not [trouble for trouble in crew.troubles if trouble.host == "a"]
        stage.heard = frozenset()
        crew.look()
        stage.lives("a", 2)


def test_one_that_finds_another_at_work_says_nothing_and_tries_again(stage):
    with stage.crew(a="echo $$; exit 75") as crew:
        stage.lives("a", 2)
        assert crew.troubles == ()
    assert stage.said == []


def test_all_end_by_themselves_when_they_are_told_to(stage, tmp_path):
    wait = f"echo $$; while ! test -e {tmp_path}/go; do sleep 0.02; done"
    with stage.crew(a=wait, b=wait) as crew:
        stage.lives("a", 1)
        stage.lives("b", 1)
        crew.stop_starting()
        (tmp_path / "go").touch()
        assert crew.end(hurry=threading.Event(), leave_s=WAIT_S) == []
    assert stage.said == []


def test_who_does_not_leave_is_asked(stage):
    with stage.crew(a="trap 'exit 0' TERM; echo $$; while true; do sleep 0.02; done") as crew:
        stage.lives("a", 1)
        assert crew.end(hurry=threading.Event(), leave_s=0, ask_s=WAIT_S) == []


def test_who_does_not_listen_is_killed(stage):
    with stage.crew(a="trap '' TERM INT HUP; echo $$; while true; do sleep 0.02; done") as crew:
        stage.lives("a", 1)
        assert crew.end(hurry=threading.Event(), leave_s=0, ask_s=0.1, hurry_s=0.1) == ["a"]


def test_who_cannot_be_told_is_asked(stage):
    wait = "trap 'exit 0' TERM; echo $$; while true; do sleep 0.02; done"
    with stage.crew(a=wait, b=wait) as crew:
        (first,) = stage.lives("a", 1)
        stage.lives("b", 1)
        stage.heard = frozenset({"b"})
        crew.stop_starting()
        crew.ask_unheard()
        psutil.wait_procs([psutil.Process(first)] if psutil.pid_exists(first) else [], WAIT_S)
        assert crew.pid("b") is not None


def test_hurry_does_not_wait(stage):
    """It would be ten minutes else."""
    deaf = "trap '' TERM INT HUP; echo $$; while true; do sleep 0.02; done"
    with stage.crew(a=deaf) as crew:
        stage.lives("a", 1)
        hurry = threading.Event()
        ended = []
        thread = threading.Thread(
            target=lambda: ended.extend(crew.end(hurry=hurry, leave_s=600.0, hurry_s=0.1))
        )
        thread.start()
        hurry.set()
        crew.look()
        thread.join(WAIT_S)
        assert ended == ["a"]


def test_delays_double_up_to_a_minute():
    first = list(itertools.islice(delays(), 10))
    assert first[:3] == [FIRST_DELAY_S, 2 * FIRST_DELAY_S, 4 * FIRST_DELAY_S]
    assert first[-1] == LAST_DELAY_S


# -- one that an `up` before this one started ---------------------------------------------------


@pytest.fixture
def earlier(tmp_path):
    """A process that works in the folder of an agent, and no child of this one's crew."""
    code = (
        "import sys, time, pathlib\n"
        "from manyhands.cluster.ledger import Ledger\n"
        "with Ledger(pathlib.Path(sys.argv[1])):\n"
        "    print('here', flush=True)\n"
        "    time.sleep(600)\n"
    )
    state = tmp_path / "agent"
    with subprocess.Popen([sys.executable, "-c", code, state], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"here\n"
        yield state, process
        process.kill()


def test_an_agent_of_an_earlier_up_is_minded_as_one_of_ours(stage, earlier):
    state, process = earlier
    starter, errand = stage.errand("a", "echo $$; exit 75")
    crew = Crew(
        [(starter, dataclasses.replace(errand, state=state))],
        is_heard=lambda host: False,
        say=stage.say,
    )
    with crew:
        until(lambda: crew.pid("a") == process.pid)
        assert len(stage.lives("a", 1)) == 1
        assert crew.end(hurry=threading.Event(), leave_s=0, ask_s=WAIT_S) == []
        assert process.wait(WAIT_S) == -signal.SIGTERM
    assert stage.said == []


@pytest.mark.parametrize("heard", [False, True])
def test_after_an_agent_of_an_earlier_up_comes_one_of_ours(stage, earlier, heard):
    """At once: whether the coordinator has noticed yet that it is gone is no matter."""
    state, process = earlier
    starter, errand = stage.errand("a", "echo $$; exit 75")
    crew = Crew(
        [(starter, dataclasses.replace(errand, state=state))],
        is_heard=lambda host: heard,
        say=stage.say,
    )
    with crew:
        until(lambda: crew.pid("a") == process.pid)
        process.kill()
        stage.lives("a", 2)


@pytest.mark.parametrize("error", [PermissionError, OSError(24, "too many"), OSError(38, "none")])
def test_one_that_cannot_be_minded_is_none(earlier, monkeypatch, error):
    state, process = earlier
    holder = Holder.of(state / LOCK)
    assert holder.pid == process.pid
    holder.close()

    def refuse(pid):
        raise error

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert Holder.of(state / LOCK) is None
    assert Holder.of(state / "none") is None
    assert Holder.of(state / LOCK / "none") is None


def test_a_holder_is_waited_for_by_a_descriptor_of_any_number():
    """select() takes those below 1024."""
    code = """
import fcntl, os, resource, subprocess
from manyhands.cluster.holder import Holder
resource.setrlimit(resource.RLIMIT_NOFILE, (2000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
child = subprocess.Popen(["sleep", "600"])
holder = Holder(child.pid, fcntl.fcntl(os.pidfd_open(child.pid), fcntl.F_DUPFD, 1500))
assert not holder.wait(0)
holder.send(9)
assert holder.wait()
child.wait()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=WAIT_S)


def until(question):
    deadline = time.monotonic() + WAIT_S
    while not question():
        assert time.monotonic() < deadline
        time.sleep(0.02)
