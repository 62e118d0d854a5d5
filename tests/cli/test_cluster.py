"""The cluster's commands as a user types them: options, output, JSON, exit codes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from typer.main import get_command

from manyhands.cli.agent import host_name, numbers
from manyhands.cli.main import COMMANDS
from manyhands.cli.submit import default_name, variables
from manyhands.cli.up import hosts_of
from manyhands.cluster.code import Code
from manyhands.cluster.follow import same_cluster
from manyhands.cluster.foreground import READY_LINE
from manyhands.cluster.identity import default_agent_state, open_identity
from manyhands.cluster.job import State
from manyhands.cluster.routes import Role
from manyhands.core.errors import SettingsError
from tests.cluster.running import WAIT_S, World

WHERE = ["--coordinator", "--json", "--state"]
FLAGS = {
    "up": [
        *("--advertise", "--bind", "--hostfile", "--json", "--lease", "--logdir", "--plain"),
        *("--python", "--slots", "--ssh", "--state", "--user"),
    ],
    "down": [*WHERE, "--timeout"],
    "agent": [
        "--address",
        "--gpus",
        "--json",
        "--name",
        "--origin",
        "--slots",
        "--state",
        "--terms",
        "--user",
    ],
    "submit": [
        *(*WHERE, "--batch", "--env", "--gpus", "--grace", "--key", "--max-restarts", "--name"),
        *("--no-check", "--priority", "--time", "--wait", "--workdir"),
    ],
    "jobs": [*WHERE, "--in", "--limit"],
    "status": WHERE,
    "logs": [*WHERE, "--attempt", "--follow", "--rank", "-f"],
    "cancel": [*WHERE, "--wait"],
    "nodes": WHERE,
}
"""Frozen: scripts of users rely on them. Add freely; change one only with a deprecation."""


@pytest.mark.parametrize("name", FLAGS)
def test_the_flags(name):
    from importlib import import_module

    command = get_command(import_module(COMMANDS[name].module).app)
    found = {flag for parameter in command.params for flag in parameter.opts if flag[0] == "-"}
    assert sorted(found) == sorted(FLAGS[name])


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One cluster for all tests that neither stop nor change it."""
    made = World(tmp_path_factory.mktemp("world"))
    made.up("--slots", "2")
    yield made
    made.close()


@pytest.fixture
def world(shared):
    yield shared
    shared.cluster.close()  # it dials again when it is asked again


@pytest.fixture
def call(world):
    """`manyhands COMMAND --state STATE ARGUMENTS`: exit code, stdout, stderr."""

    def run(command, *arguments, **popen):
        done = world.command(command, "--state", str(world.state), *arguments, **popen)
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stdout, done.stderr

    return run


# -- submit -----------------------------------------------------------------------------------


def test_submit_says_the_id_and_what_to_type(world, call):
    code, out, err = call("submit", "--gpus", "2", "--", "sh", "-c", "echo from $RANK")
    assert (code, err) == (0, "")
    id = re.match(r"job (\d+) \(sh\): PENDING", out)[1]
    for word in ("logs", "status", "cancel"):
        assert f"manyhands {word} --state {world.state} {id}" in out
    job = world.cluster.wait(int(id), WAIT_S)
    assert job.spec.workdir == str(world.folder)
    assert job.exit_code == 0


def test_submit_with_every_option(world, call, tmp_path):
    (tmp_path / "train.py").write_text("import os; print(os.environ['LR'], os.getcwd())")
    code, out, _ = call(
        *("submit", "--json", "--name", "mine", "--gpus", "2", "--batch", "6"),
        *("--priority", "best-effort", "--max-restarts", "1", "--time", "1:30:00"),
        *("--grace", "5s", "--env", "LR=a=b", "--env", "X=", "--workdir", str(tmp_path)),
        *("--key", "k-1", "--", "python", "-u", "train.py", "--gpus", "9"),
    )
    assert code == 0
    spec = json.loads(out)["spec"]
    assert spec == {
        "command": ["python", "-u", "train.py", "--gpus", "9"],
        "name": "mine",
        "gpus": 2,
        "batch": 6,
        "priority": "best-effort",
        "max_restarts": 1,
        "time_s": 5400.0,
        "grace_s": 5.0,
        "env": {"LR": "a=b", "X": ""},
        "workdir": str(tmp_path),
    }
    job = world.cluster.wait(json.loads(out)["id"], WAIT_S)
    assert job.exit_code == 0, job
    assert b"".join(world.cluster.logs(job.id)) == f"a=b {tmp_path}\n".encode()


def test_one_key_is_one_job(call):
    first = call("submit", "--json", "--key", "twice", "--", "true")
    second = call("submit", "--json", "--key", "twice", "--", "true")
    assert first[0] == second[0] == 0
    assert json.loads(first[1])["id"] == json.loads(second[1])["id"]
    code, _, err = call("submit", "--key", "twice", "--", "false")
    assert code == 2
    assert "belongs to job" in err


@pytest.mark.parametrize("key", ["", " "])
def test_an_empty_key_is_a_slip_and_not_none(world, call, key):
    before = world.cluster.jobs()
    code, out, err = call("submit", "--key", key, "--", "true")
    assert (code, out) == (2, "")
    assert "--key is empty" in err
    assert "hint:" in err
    assert world.cluster.jobs() == before


def test_no_grace_at_all(call):
    code, out, _ = call("submit", "--json", "--grace", "0", "--", "true")
    assert (code, json.loads(out)["spec"]["grace_s"]) == (0, 0.0)


def test_wait_shows_the_output_and_exits_as_the_job_does(call):
    script = "echo out; echo err >&2; exit 7"
    code, out, err = call("submit", "--wait", "--", "sh", "-c", script)
    assert (code, out) == (7, "out\nerr\n")
    assert "FAILED, exit code 7" in err
    code, out, err = call("submit", "--wait", "--json", "--", "sh", "-c", "echo hello")
    assert code == 0
    assert json.loads(out)["state"] == "SUCCEEDED"
    assert "hello\n" in err


def test_wait_and_a_time_limit(call):
    code, _, err = call(
        *("submit", "--wait", "--time", "0.2", "--grace", "1", "--", "sh", "-c", "sleep 600")
    )
    assert code == 124
    assert "TIMEOUT" in err


def until_idle(process):
    """It waits for an answer. A Ctrl-C in the moment before was not heeded once, of many; where it
    was lost is not known (Python ignores one that comes while an object is cleared away).
    """
    end_s, looked = time.monotonic() + WAIT_S, psutil.Process(process.pid)
    before = None
    while (now := looked.cpu_times()[:2]) != before or looked.status() != psutil.STATUS_SLEEPING:
        assert time.monotonic() < end_s
        before = now
        time.sleep(0.1)


def test_ctrl_c_in_wait_leaves_the_job(world):
    process = world.start(
        *("submit", "--state", str(world.state), "--wait", "--"),
        *("sh", "-c", "echo ready; while ! test -e go-on; do sleep 0.02; done"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    until_idle(process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert "Traceback" not in err
    id = int(re.search(r"job (\d+) goes on", err)[1])
    assert f"manyhands cancel --state {world.state} {id}" in err
    assert world.cluster.job(id).state is State.RUNNING
    (world.folder / "go-on").touch()
    assert world.cluster.wait(id, WAIT_S).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--", "no-such-program"], "no program 'no-such-program' on PATH"),
        (["--", "python", "tarin.py"], "there is no script"),
        (["--", "torchrun", "x.py"], ""),
        (["--workdir", "/no/such", "--", "true"], "no folder /no/such"),
        (["--gpus", "3", "--", "true"], "asks for 3 slots, and the cluster has 2"),
        (["--gpus", "2", "--batch", "1", "--", "true"], "cannot be split over 2"),
        (["--time", "soon", "--", "true"], "--time cannot be 'soon'"),
        (["--time", "0", "--", "true"], "--time is 0; it has to be more than 0"),
        (["--grace", "2d", "--", "true"], "--grace is 2d; it has to be from 0, and at most 1d"),
        (["--env", "NOVALUE", "--", "true"], "--env 'NOVALUE' has no value"),
        (["--env", "RANK=3", "--", "true"], "RANK is set by the cluster"),
        (["--priority", "urgent", "--", "true"], "urgent"),
        (["--name", "no spaces", "--", "true"], "no spaces"),
        ([], "COMMAND"),
    ],
)
def test_what_can_be_seen_at_once_is_said_at_once(call, arguments, words):
    code, out, err = call("submit", *arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert "hint:" in err or "Usage:" in err


def test_the_way_round_a_check(call):
    code, out, _ = call("submit", "--no-check", "--json", "--wait", "--", "no-such-program")
    assert code != 0
    assert json.loads(out)["state"] == "FAILED"


# -- looking ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def failed(shared):
    """A job whose rank 1 has failed."""
    # Rank 0 has said its word when rank 1 fails, which ends it.
    script = "echo rank $RANK; test $RANK = 0 && touch said && exec sleep 600; "
    script += 'while ! test -e said; do sleep 0.02; done; echo "no luck" >&2; exit 9'
    job = shared.submit(script, gpus=2, name="unlucky", grace_s=1.0)
    return shared.cluster.wait(job.id, WAIT_S)


def test_jobs(call, failed):
    code, out, _ = call("jobs", "--limit", "100")
    assert code == 0
    head, *rows = out.splitlines()
    assert head.split()[:4] == ["ID", "NAME", "STATE", "GPUS"]
    (row,) = [row for row in rows if row.split()[0] == str(failed.id)]
    assert row.split()[1:4] == ["unlucky", "FAILED", "2"]
    listed = json.loads(call("jobs", "--json", "--in", "failed")[1])
    assert {job["state"] for job in listed} == {"FAILED"}
    assert failed.id in {job["id"] for job in listed}
    assert call("jobs", "--in", "preempted")[1].startswith("no job is PREEMPTED; manyhands jobs")


def test_status_has_the_failure_on_top_and_every_step(call, failed):
    code, out, _ = call("status", str(failed.id))
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == f"job {failed.id}  unlucky  FAILED, exit code 9"
    top = "\n".join(lines[:6])
    assert "rank 1 on" in top
    assert "no luck" in top
    found = [line.split()[2] for line in lines if re.match(r"  \d{4}-\d\d-\d\d ", line)]
    assert found[:2] == ["PENDING", "STARTING"]
    assert found[-1] == "FAILED"
    told = json.loads(call("status", "--json", str(failed.id))[1])
    assert told["job"]["failure"]["rank"] == 1
    assert [step["state"] for step in told["history"]] == found


def test_logs_of_a_failure_begin_with_it(call, failed):
    code, out, err = call("logs", str(failed.id))
    assert (code, out) == (0, "rank 1\nno luck\n")
    assert err.startswith("rank 1 on")
    assert "exit code 9" in err
    assert call("logs", str(failed.id), "--rank", "0")[1] == "rank 0\n"
    assert call("logs", str(failed.id), "-f", "--attempt", "0")[1] == "rank 1\nno luck\n"
    lines = call("logs", "--json", str(failed.id))[1].splitlines()
    assert [json.loads(line) for line in lines] == [
        {"rank": 1, "line": "rank 1"},
        {"rank": 1, "line": "no luck"},
    ]


def test_logs_are_followed_to_the_end(world):
    job = world.submit("echo one; while ! test -e two; do sleep 0.02; done; echo two")
    process = world.start(
        *("logs", "--state", str(world.state), str(job.id), "-f"),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "one\n"
    (world.folder / "two").touch()
    out, _ = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out) == (0, "two\n")


def test_logs_of_another_rank_are_followed_to_the_end(world):
    """And of no other: rank 0 has said its word before rank 1 does."""
    script = "test $RANK = 0 && echo of 0 && touch zero; "
    script += "while ! test -e zero; do sleep 0.02; done; test $RANK = 0 || echo of $RANK; "
    job = world.submit(script + "while ! test -e last; do sleep 0.02; done; echo end $RANK", gpus=2)
    process = world.start(
        *("logs", "--state", str(world.state), str(job.id), "-f", "--rank", "1"),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "of 1\n"
    (world.folder / "last").touch()
    out, _ = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out) == (0, "end 1\n")


def test_logs_that_are_followed_say_why_the_job_failed(world):
    """Another rank than the one that is shown."""
    script = "test $RANK = 1 || exec sleep 1e9; while ! test -e fail; do sleep 0.02; done; "
    job = world.submit(f"echo rank $RANK; {script} echo no luck; exit 9", gpus=2)
    process = world.start(
        *("logs", "--state", str(world.state), str(job.id), "-f"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "rank 0\n"
    (world.folder / "fail").touch()
    _, err = process.communicate(timeout=WAIT_S)
    assert "failed first, with exit code 9:\n    rank 1\n    no luck\n" in err
    assert re.search(rf"^job {job.id}: FAILED; rank 1 on \S+ failed with exit code 9$", err, re.M)


def test_nodes(call):
    code, out, _ = call("nodes")
    assert code == 0
    head, row = out.splitlines()
    assert head.split()[:3] == ["HOST", "STATE", "SLOTS"]
    assert row.split()[1:4] == ["here", "2", "cpu"]
    (node,) = json.loads(call("nodes", "--json")[1])
    assert len(node["slots"]) == 2


def test_cancel(world, call):
    job = world.submit("exec sleep 600")
    code, out, _ = call("cancel", "--wait", str(job.id))
    assert (code, out) == (0, f"job {job.id}: CANCELLED\n")
    code, out, _ = call("cancel", str(job.id))
    assert (code, out) == (0, f"job {job.id}: CANCELLED; it was over already, and stays as it is\n")
    again = call("cancel", "--json", str(job.id))
    assert (again[0], json.loads(again[1])[0]["exit_code"]) == (0, 143)


def test_cancel_of_some_that_are_and_some_that_are_not(world, call):
    job = world.submit("exec sleep 600")
    code, out, err = call("cancel", "--wait", "99998", str(job.id), "99999")
    assert (code, out) == (2, f"job {job.id}: CANCELLED\n")
    assert "no job 99998" in err
    assert "no job 99999" in err


@pytest.mark.parametrize("command", ["status", "logs", "cancel"])
def test_numbers_that_no_job_has(call, command):
    code, out, err = call(command, "99999")
    assert (code, out) == (2, "")
    assert "there is no job 99999" in err
    assert "manyhands jobs" in err


def test_ranks_and_attempts_that_are_not_there(call, failed):
    assert call("logs", str(failed.id), "--rank", "5")[0] == 2
    for options in (["--attempt", "5"], ["--attempt", "1"], ["--attempt", "1", "-f"]):
        code, out, err = call("logs", str(failed.id), *options)
        assert (code, out) == (2, "")
        assert f"job {failed.id} has attempts 0 to 0, not {options[1]}" in err


def test_another_way_to_say_where(world, call):
    environ = {**world.environ, "XDG_STATE_HOME": str(world.folder / "none")}
    environ["MANYHANDS_COORDINATOR"] = f"127.0.0.1:{world.port}"
    identity = open_identity(world.state)
    token, pin = identity.tokens[Role.USER], identity.fingerprint
    environ["MANYHANDS_TOKEN"], environ["MANYHANDS_FINGERPRINT"] = token, pin
    assert world.command("nodes", env=environ).returncode == 0
    code = Code(
        role=Role.USER, host="127.0.0.1", port=world.port, token=token, fingerprint=pin
    ).pack()
    environ = {**world.environ, "XDG_STATE_HOME": str(world.folder / "none")}
    assert world.command("nodes", "--coordinator", code, env=environ).returncode == 0
    environ["MANYHANDS_TOKEN"], environ["MANYHANDS_FINGERPRINT"] = "x" * 32, pin
    done = world.command("nodes", "--coordinator", f"127.0.0.1:{world.port}", env=environ)
    assert done.returncode == 1
    assert "token" in done.stderr


def test_commands_that_are_told_are_for_the_same_cluster():
    assert same_cluster(None, None) == ""
    assert same_cluster(None, Path("/a b")) == " --state '/a b'"
    assert same_cluster("box:1", Path("/s")) == " --coordinator box:1"
    assert same_cluster(" mhc1-SECRET", None) == " --coordinator CODE"


# -- without a cluster ------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["jobs", "nodes", "down"])
def test_no_cluster_was_ever_there(tmp_path, command):
    world = World(tmp_path)
    done = world.command(command, "--state", str(tmp_path / "none"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "hint:" in done.stderr
    assert not (tmp_path / "none").exists()


def test_a_cluster_that_was(tmp_path):
    world = World(tmp_path)
    try:
        world.up("--slots", "0").end()
        done = world.command("jobs", "--state", str(world.state))
        assert done.returncode == 1
        assert f"is it up? `manyhands up --state {world.state}` starts it" in done.stderr
        assert "MANYHANDS_COORDINATOR" not in done.stderr  # with --state it is not looked at
        done = world.command("down", "--state", str(world.state))
        assert (done.returncode, done.stdout) == (0, "the cluster is down\n")
        assert "it was not up" in done.stderr
    finally:
        world.close()


def test_up_for_people(tmp_path):
    world = World(tmp_path)
    try:
        process = world.start(
            *("up", "--bind", "127.0.0.1:0", "--state", str(world.state), "--slots", "1"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        lines = []
        while READY_LINE not in lines:
            lines.append(process.stdout.readline().rstrip("\n"))
            assert lines[-1] or len(lines) < 50, process.stderr.read()
        said = "\n".join(lines)
        assert "mhc1-" in said
        assert f"manyhands submit --state {world.state}" in said
        hub = int((world.state / "hub" / "port").read_text())
        assert f"hub          127.0.0.1:{hub} (" in said
        assert (tmp_path / "logs").is_dir()
        process.terminate()
        out, err = process.communicate(timeout=WAIT_S)
        assert (process.returncode, out) == (0, "the cluster is down\n"), err
    finally:
        world.close()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["up", "--hostfile", "none.txt"], 2, "cannot read the hostfile"),
        (["up", "--lease", "0.1"], 2, "a lease of 0.1 s"),
        (["up", "--user", "no-such-user"], 2, "there is no user 'no-such-user'"),
        (["up", "--user", ""], 2, "there is no user ''"),
        (["up", "--ssh", "ssh 'half"], 2, "--ssh"),
        (["up", "--bind", "127.0.0.1:none"], 2, "HOST:PORT"),
        (["up", "--bind", "192.0.2.1:0"], 2, "an address of this machine is wanted"),
        (["agent", "nonsense"], 2, "mhc1-"),
        (["agent", "-"], 2, "no code on stdin"),
        (["agent", "mh1-x"], 2, "of a hub"),
        (["down", "--timeout", "x"], 2, "--timeout"),
    ],
)
def test_errors_say_what_to_do(tmp_path, arguments, code, words):
    world = World(tmp_path)
    environ = {**world.environ, "XDG_STATE_HOME": str(tmp_path)}
    done = world.command(*arguments, env=environ)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "hint:" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_help_of_up_says_how_a_hostfile_is_written(tmp_path):
    """What looks like markup is not swallowed."""
    done = World(tmp_path).command("up", "--help")
    said = " ".join(re.sub(r"[^\x20-\x7e]", " ", done.stdout).split())
    assert "ADDRESS,GPU or HOST or HOST slots=N." in said


# -- small things -----------------------------------------------------------------------------


def test_names_of_jobs():
    assert default_name(["python", "-u", "a dir/train.py"]) == "train.py"
    assert default_name(["/usr/bin/python3", "-m", "pkg"]) == "python3"
    assert default_name(["./run me.sh"]) == "run-me.sh"
    assert default_name(["_"]) == ""


def test_variables():
    assert variables(["A=1", "B=x=y", "C="]) == {"A": "1", "B": "x=y", "C": ""}
    with pytest.raises(SettingsError) as caught:
        variables(["=secret"])
    assert "secret" not in str(caught.value)


def test_hosts_without_a_file():
    (host,) = hosts_of(None, None)
    assert (host.is_here, host.slots) == (True, None)
    assert hosts_of(None, 3)[0].slots == 3
    assert hosts_of(None, 0) == ()


def test_slots_are_for_hosts_that_have_none_in_the_file(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("a\nb slots=1\nc,4\n")
    found = [(host.name, host.slots, host.gpus) for host in hosts_of(file, 2)]
    assert found == [("a", 2, ()), ("b", 1, ()), ("c", None, (4,))]


def test_agents_arguments(monkeypatch):
    assert numbers("0,3") == (0, 3)
    assert numbers(None) == ()
    with pytest.raises(SettingsError, match="--gpus"):
        numbers("0,x")
    with pytest.raises(SettingsError, match="cannot be called"):
        host_name("no spaces")
    monkeypatch.setenv("XDG_STATE_HOME", "/s")
    of_root = "/var/lib/manyhands/agents/--1-1/h"
    assert str(default_agent_state("::1", 1, "h", None)) == "/s/manyhands/agents/--1-1/h"
    assert str(default_agent_state("::1", 1, "h", "ann")) == of_root
