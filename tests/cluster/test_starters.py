"""Starters: an agent here and one over a real ssh; no secret where others can read it."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from manyhands.cluster.starters import (
    Errand,
    LocalStarter,
    SshStarter,
    Started,
    parse_ssh,
    python_command,
    why,
)
from manyhands.core.errors import ManyhandsError, SettingsError
from manyhands.testing.processes import is_gone
from tests.cluster.sshd import Sshd

WAIT_S = 60.0
CODE = "mhc1-a-secret-of-this-test"

# What an agent would find: then it waits until the test has looked, or was told to leave.
AGENT = """
import json, os, signal, sys, time
told = {"stdin": sys.stdin.read(), "argv": sys.argv[1:], "pid": os.getpid(),
        "leads": os.getsid(0) == os.getpid(), "env": dict(os.environ), "cwd": os.getcwd()}
with open(FILE + ".new", "w") as file:
    json.dump(told, file)
os.rename(FILE + ".new", FILE)
print("here I am", flush=True)
while os.path.exists(STAY):
    time.sleep(0.02)
"""


class Stub:
    """A program in the place of `manyhands`, and what it was told."""

    def __init__(self, folder):
        self.told, self.stay = folder / "told", folder / "stay"
        script = folder / "a program.py"
        script.write_text(f"FILE = {str(self.told)!r}\nSTAY = {str(self.stay)!r}\n{AGENT}")
        self.command = (sys.executable, str(script))
        self.stay.touch()

    def read(self):
        deadline = time.monotonic() + WAIT_S
        while not self.told.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return json.loads(self.told.read_text())

    def leave(self):
        self.stay.unlink()


@pytest.fixture
def stub(tmp_path):
    return Stub(tmp_path)


def errand(tmp_path, **changes):
    given = {
        "name": "node-a",
        "address": "127.0.0.1",
        "arguments": ("--name", "node-a", "--state", "a folder's; name"),
        "code": CODE,
        "log": tmp_path / "logs" / "node-a.log",
    }
    return Errand(**{**given, **changes})


def everything_public(pid):
    """What `ps` shows of a process to others, and its environment, which root may read."""
    process = psutil.Process(pid)
    return f"{process.cmdline()} {process.environ()}"


def test_an_agent_of_this_machine(stub, tmp_path, monkeypatch):
    monkeypatch.setenv("MANYHANDS_TOKEN", "a-token")
    started = LocalStarter(command=stub.command).start(errand(tmp_path))
    told = stub.read()
    assert told["pid"] == started.pid
    assert told["leads"]
    assert told["stdin"] == CODE + "\n"
    assert told["argv"] == ["agent", "-", "--name", "node-a", "--state", "a folder's; name"]
    assert "MANYHANDS_TOKEN" not in told["env"]
    assert told["env"]["PATH"] == os.environ["PATH"]
    assert CODE not in everything_public(started.pid)
    assert CODE not in repr(errand(tmp_path))
    assert started.wait(0) is None
    stub.leave()
    assert started.wait(WAIT_S) == 0
    assert started.last_words() == ("here I am",)


def test_the_log_is_appended_to_and_last_words_are_its_own(stub, tmp_path):
    given = errand(tmp_path)
    given.log.parent.mkdir()
    given.log.write_text("of another time\n")
    stub.leave()
    assert LocalStarter(command=stub.command).start(given).wait(WAIT_S) == 0
    started = LocalStarter(command=(sys.executable, "-c", "print('x' * 9999, '\\n\\nend')")).start(
        given
    )
    assert started.wait(WAIT_S) == 0
    assert started.last_words()[-1] == "end"
    assert "of another time" not in started.last_words()
    assert given.log.read_text().startswith("of another time\nhere I am\n")
    given.log.unlink()
    assert started.last_words() == ()


def test_one_that_reads_nothing(tmp_path):
    """The pipe is closed before the code is in it, or after: neither is an error here."""
    started = LocalStarter(command=("/bin/false",)).start(errand(tmp_path))
    assert started.wait(WAIT_S) == 1


def test_asked_and_killed(stub, tmp_path):
    for act, number in (("ask", signal.SIGTERM), ("kill", signal.SIGKILL)):
        started = LocalStarter(command=stub.command).start(errand(tmp_path))
        stub.read()
        stub.told.unlink()
        getattr(started, act)()
        assert started.wait(WAIT_S) == -number


def test_what_cannot_be_started(tmp_path):
    with pytest.raises(ManyhandsError, match="cannot start /no/such"):
        LocalStarter(command=("/no/such",)).start(errand(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match="cannot write the log"):
        LocalStarter().start(errand(tmp_path, log=tmp_path / "file" / "x.log"))


def test_python_is_the_one_of_up_and_no_file_of_the_users(tmp_path, monkeypatch):
    """A manyhands.py in the folder that `up` is called in is not what is started."""
    (tmp_path / "manyhands.py").write_text("raise SystemExit(99)")
    monkeypatch.chdir(tmp_path)
    assert python_command(sys.executable)[0] == sys.executable
    given = errand(tmp_path, arguments=("--help",))
    started = LocalStarter().start(given)
    assert started.wait(WAIT_S) != 99


@pytest.mark.parametrize("text", ["", "  ", "ssh 'half"])
def test_ssh_commands_that_are_none(text):
    with pytest.raises(SettingsError, match="--ssh"):
        parse_ssh(text)


def test_ssh_commands():
    assert parse_ssh("ssh -o 'User=a b' -p 22") == ("ssh", "-o", "User=a b", "-p", "22")


@pytest.mark.parametrize(
    ("code", "words", "what", "remedy"),
    [
        (255, ["Host key verification failed."], "does not know", "ssh ann@n1 true"),
        (255, ["ann@n1: Permission denied (publickey)."], "not let in", "ssh-copy-id ann@n1"),
        (255, ["ssh: Could not resolve hostname n1"], "did not get there", "ssh ann@n1 true"),
        (127, ["bash: /opt/python: No such file or directory"], "no such Python", "--python"),
        (1, ["/usr/bin/python3: No module named manyhands"], "no manyhands", "--python"),
        (-9, [], "killed by signal 9", "node-a.log"),
        (1, ["error: no GPU 7"], "ended with code 1", "node-a.log"),
    ],
)
def test_why_an_agent_ended(tmp_path, code, words, what, remedy):
    said, hint = why(errand(tmp_path, address="ann@n1"), code, words)
    assert what in said
    assert remedy in hint


@pytest.mark.parametrize(("is_far", "doubtful"), [(False, {75}), (True, {75, 255, *range(-64, 0)})])
def test_an_end_that_need_not_be_the_agents(tmp_path, is_far, doubtful):
    started = Started(None, tmp_path, 0, is_far=is_far)
    assert {code for code in range(-64, 256) if started.leaves_doubt(code)} == doubtful


# -- over ssh ---------------------------------------------------------------------------------


@pytest.fixture
def sshd(tmp_path):
    environment = {"MARK": "of sshd", "TMPDIR": os.environ["TMPDIR"]}
    with Sshd(tmp_path / "sshd", environment) as running:
        yield running


def test_an_agent_over_ssh(sshd, stub, tmp_path):
    starter = SshStarter(ssh=sshd.command(), command=stub.command)
    started = starter.start(errand(tmp_path, address=sshd.address))
    told = stub.read()
    assert told["pid"] != started.pid
    assert told["env"]["MARK"] == "of sshd"
    assert told["env"].get("SSH_CONNECTION")
    assert told["stdin"] == CODE + "\n"
    assert told["argv"] == ["agent", "-", "--name", "node-a", "--state", "a folder's; name"]
    assert told["cwd"] == str(Path.home().resolve())
    for pid in (started.pid, told["pid"]):
        assert CODE not in everything_public(pid)
    assert "BatchMode=yes" in psutil.Process(started.pid).cmdline()
    stub.leave()
    assert started.wait(WAIT_S) == 0
    assert started.last_words()[-1] == "here I am"


@pytest.mark.parametrize("end", ["kill", "drop"])
def test_when_ssh_dies_the_agent_does_not(sshd, stub, tmp_path, end):
    starter = SshStarter(ssh=sshd.command(), command=stub.command)
    started = starter.start(errand(tmp_path, address=sshd.address))
    agent = psutil.Process(stub.read()["pid"])
    started.kill() if end == "kill" else sshd.drop()
    code = started.wait(WAIT_S)
    assert code == (-signal.SIGKILL if end == "kill" else 255)
    assert not is_gone(agent)
    stub.leave()
    psutil.wait_procs([agent], timeout=WAIT_S)
    assert is_gone(agent)


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        ({"known_hosts": "none"}, "ssh does not know the host"),
        ({"key": "host_key"}, "ssh was not let in"),
    ],
)
def test_ssh_that_does_not_get_in(sshd, stub, tmp_path, broken, what):
    """Without a question: BatchMode."""
    given = errand(tmp_path, address=sshd.address)
    started = SshStarter(ssh=sshd.command(**broken), command=stub.command).start(given)
    code = started.wait(WAIT_S)
    assert code == 255
    assert why(given, code, started.last_words())[0] == what


def test_a_python_that_is_not_there(sshd, tmp_path):
    given = errand(tmp_path, address=sshd.address)
    starter = SshStarter(ssh=sshd.command(), command=python_command("/no/such/python"))
    started = starter.start(given)
    code = started.wait(WAIT_S)
    assert why(given, code, started.last_words())[0] == "there is no such Python"


def test_a_host_where_nobody_listens(sshd, tmp_path):
    given = errand(tmp_path, address=sshd.address)
    sshd.process.terminate()
    sshd.process.wait(WAIT_S)
    started = SshStarter(ssh=sshd.command()).start(given)
    code = started.wait(WAIT_S)
    assert why(given, code, started.last_words())[0] == "ssh did not get there"
