"""`manyhands up` with real processes: it comes, goes, is killed and comes back; nothing lingers."""

from __future__ import annotations

import io
import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

import manyhands
from manyhands.cluster.client import Cluster
from manyhands.cluster.errors import BadJob
from manyhands.cluster.job import State
from manyhands.cluster.starters import HELD
from manyhands.compat.deeppool import ClusterClient
from manyhands.testing.processes import is_gone
from tests.cluster import running
from tests.cluster.folders import open_to_all
from tests.cluster.running import MAIN, MARK, WAIT_S, Running, World, command_of, environ_of
from tests.cluster.sshd import Sshd

# A job that says who it is, then waits until the test lets it go.
STAY = "echo $$ > pid.new; mv pid.new pid-$MANYHANDS_RESTART_COUNT; "
STAY += "while ! test -e go; do sleep 0.02; done; echo done >> ends"
DEAF = "trap '' TERM; " + STAY


def name_of(process):
    return Path(next(iter(command_of(process)), "")).name


def is_listening(port):
    try:
        socket.create_connection(("127.0.0.1", port), WAIT_S).close()
    except ConnectionRefusedError:
        return False
    return True


def test_up_a_job_and_down(world):
    up = world.up("--slots", "2")
    hub = int((world.state / "hub" / "port").read_text())
    job = world.submit("echo rank $RANK of $WORLD_SIZE", gpus=2)
    over = world.cluster.wait(job.id, WAIT_S)
    assert (over.state, over.exit_code) == (State.SUCCEEDED, 0)
    for rank in range(2):
        log = world.logs / "job-1" / "attempt-0" / f"rank-{rank}.log"
        assert log.read_text() == f"rank {rank} of 2\n"
        assert b"".join(world.cluster.logs(1, rank=rank)) == f"rank {rank} of 2\n".encode()
    done = world.command("down", "--state", str(world.state))
    assert (done.returncode, done.stdout) == (0, "the cluster is down\n"), done.stderr
    assert up.process.poll() is not None or psutil.Process(up.process.pid).status() == "zombie"
    assert up.wait() == 0
    assert world.processes() == []
    assert not is_listening(world.port)
    assert not is_listening(hub)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all_and_the_job_begins_again_next_time(world, number):
    up = world.up()
    job = world.submit(STAY)
    rank = world.pid_in("pid-0")
    up.signal(number)
    assert up.wait() == 0
    assert world.processes() == []
    assert is_gone(rank)
    world.up()
    second = world.pid_in("pid-1")
    assert second.pid != rank.pid
    (world.folder / "go").touch()
    over = world.cluster.wait(job.id, WAIT_S)
    assert (over.state, over.attempt, over.node_failures) == (State.SUCCEEDED, 1, 0)
    assert State.PREEMPTED in world.states(job)
    assert (world.folder / "ends").read_text() == "done\n"


def test_a_terminal_that_is_closed_takes_it_down(world):
    """Nobody reads then what it says, as when Ctrl-C ends a `tee` too."""
    up = world.start(
        *("up", "--json", "--slots", "1", "--bind", "127.0.0.1:0"),
        *("--state", str(world.state), "--logdir", str(world.logs)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with up.stdout, up.stderr:
        assert up.stdout.readline()
    up.send_signal(signal.SIGHUP)
    assert up.wait(WAIT_S) == 0
    assert world.processes() == []


def test_a_second_signal_does_not_wait_for_the_grace(world):
    up = world.up()
    world.submit(DEAF, grace_s=3600.0)
    rank = world.pid_in("pid-0")
    up.signal(signal.SIGINT)
    world.until(lambda: "a second one does not wait" in up.said(), "the first signal")
    up.signal(signal.SIGINT)
    assert up.wait() == 0
    assert is_gone(rank)
    assert world.processes() == []


def test_killed_and_up_again_within_the_lease(world):
    """The same process runs on, and ends once."""
    up = world.up("--lease", "60s")
    job = world.submit(STAY)
    rank = world.pid_in("pid-0")
    world.until_state(job, State.RUNNING)
    up.process.kill()
    up.process.wait(WAIT_S)
    assert not is_gone(rank)
    again = world.up("--lease", "60s")
    assert not is_gone(rank)
    assert world.cluster.job(job.id).state is State.RUNNING
    (world.folder / "go").touch()
    over = world.cluster.wait(job.id, WAIT_S)
    assert (over.state, over.attempt) == (State.SUCCEEDED, 0)
    assert (world.folder / "ends").read_text() == "done\n"
    assert world.states(job).count(State.RUNNING) == 1
    assert again.end() == 0
    assert world.processes() == []


def test_an_agent_of_an_earlier_up_that_is_killed_is_started_again(world):
    """At once, and not when its host falls silent: that would be in an hour."""
    up = world.up("--lease", "1h")
    (agent,) = [p for p in world.processes() if "agent" in command_of(p)]
    up.process.kill()
    up.process.wait(WAIT_S)
    again = world.up("--lease", "1h")
    assert not is_gone(agent)
    # Until it is minded there is another that finds its folder held.
    world.until(lambda: agents(world) == [agent.pid], "the end of the other")
    agent.kill()
    world.until(lambda: len(agents(world)) == 1 and agent.pid not in agents(world), "a new one")
    job = world.submit("true")
    assert world.cluster.wait(job.id, WAIT_S).exit_code == 0
    assert again.end() == 0
    assert world.processes() == []


def agents(world):
    return [p.pid for p in world.processes() if "agent" in command_of(p)]


def test_a_second_signal_is_for_agents_of_an_earlier_up_too(world):
    up = world.up("--lease", "60s")
    world.submit(DEAF, grace_s=3600.0)
    rank = world.pid_in("pid-0")
    up.process.kill()
    up.process.wait(WAIT_S)
    again = world.up("--lease", "60s")
    assert not is_gone(rank)
    world.until(lambda: len(agents(world)) == 1, "the end of the other")
    again.signal(signal.SIGINT)
    world.until(lambda: "a second one does not wait" in again.said(), "the first signal")
    again.signal(signal.SIGINT)
    assert again.wait() == 0
    world.until_gone(rank)
    assert world.processes() == []


def test_a_log_is_followed_across_a_coordinator_that_is_killed(world):
    up = world.up("--lease", "60s")
    job = world.submit("echo one; while ! test -e go; do sleep 0.02; done; echo two")
    reader = world.start(
        *("logs", "--state", str(world.state), str(job.id), "-f"),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert reader.stdout.readline() == b"one\n"
    up.process.kill()
    up.process.wait(WAIT_S)
    world.up("--lease", "60s")
    (world.folder / "go").touch()
    out, _ = reader.communicate(timeout=WAIT_S)
    assert (reader.returncode, out) == (0, b"two\n")


def test_deeppools_client_follows_across_a_coordinator_that_is_killed_too(world):
    up = world.up("--lease", "60s")
    job = world.submit("echo one; while ! test -e go; do sleep 0.02; done; echo two")
    shown = io.BytesIO()
    with ClusterClient(state=world.state) as client, ThreadPoolExecutor(1) as pool:
        following = pool.submit(client.follow, job.id, shown)
        world.until(lambda: shown.getvalue() == b"one\n", "the first line")
        up.process.kill()
        up.process.wait(WAIT_S)
        world.up("--lease", "60s")
        (world.folder / "go").touch()
        assert following.result(WAIT_S) == 0
    assert shown.getvalue() == b"one\ntwo\n"


def test_beyond_loopback_it_speaks_tls(world):
    up = Running(world, ("--bind", "0.0.0.0:0", "--advertise", "127.0.0.1"))
    try:
        said = up.ready()
        assert said["url"].startswith("https://127.0.0.1:")
        with Cluster(state=world.state) as cluster:
            job = cluster.submit(["true"])
            assert cluster.wait(job.id, WAIT_S).exit_code == 0
        # As from another machine: a word is all that one needs.
        with Cluster((world.state / "code").read_text()) as cluster:
            assert cluster.job(job.id).exit_code == 0
        agent = world.join(code=said["code"])
        with Cluster(state=world.state) as cluster:
            world.until(lambda: len(cluster.nodes()) == 2, "an agent by the code")
        agent.terminate()
        agent.communicate(timeout=WAIT_S)
        assert up.end() == 0
    finally:
        up.close()


def test_down_is_for_the_folder_that_is_named(world, tmp_path):
    """Not for the cluster that the environment is about; without a folder it is."""
    other = World(tmp_path / "other")
    other.folder.mkdir()
    up, far = world.up("--slots", "0"), other.up("--slots", "0")
    try:
        environ = {**world.environ, "MANYHANDS_COORDINATOR": (other.state / "code").read_text()}
        done = world.command("down", "--state", str(world.state), env=environ)
        assert (done.returncode, done.stdout) == (0, "the cluster is down\n"), done.stderr
        assert up.wait() == 0
        assert other.cluster.info()
        again = world.up("--slots", "0")
        environ["XDG_STATE_HOME"] = str(world.folder / "none")
        assert world.command("down", env=environ).returncode == 0
        assert far.wait() == 0
        assert world.cluster.info()
        assert again.end() == 0
    finally:
        other.close()


def test_a_part_that_fails_takes_the_cluster_down(world):
    fail = "from manyhands.links.hub import Hub; Hub._tick = lambda self: 1 / 0\n"
    process = subprocess.run(
        [
            *(sys.executable, "-c", fail + MAIN, "up", "--json", "--bind", "127.0.0.1:0"),
            *("--state", str(world.state), "--logdir", str(world.logs)),
        ],
        env=world.environ,
        capture_output=True,
        timeout=WAIT_S,
        check=False,
        text=True,
    )
    assert process.returncode == 1
    assert "a part of the cluster failed (ZeroDivisionError)" in process.stderr
    assert world.processes() == []


def test_killed_and_never_up_again(world):
    """Its agent notices when the lease is over, ends the job, and goes."""
    up = world.up("--lease", "1h")  # until it has begun, on a machine that is busy too
    world.submit(DEAF)
    rank = world.pid_in("pid-0")
    up.process.kill()
    up.process.wait(WAIT_S)
    again = world.up("--lease", "1s")
    again.process.kill()
    again.process.wait(WAIT_S)
    world.until_gone(rank, *world.processes())
    assert not (world.folder / "ends").exists()


def test_down_ends_what_an_up_that_was_killed_has_left(world):
    """And nothing else: an agent of a user's stays, and another cluster's."""
    up = world.up("--lease", "1h")
    job = world.submit(DEAF, grace_s=0)
    rank = world.pid_in("pid-0")
    mine = world.join()
    world.until(lambda: len([n for n in world.cluster.nodes() if n.state == "here"]) == 2, "both")
    up.process.kill()
    up.process.wait(WAIT_S)
    other = world.command("down", "--state", str(world.folder / "elsewhere"))
    assert other.returncode == 2
    assert not is_gone(rank)
    down = world.command("down", "--state", str(world.state))
    assert (down.returncode, down.stdout) == (0, "the cluster is down\n"), down.stderr
    assert "agent of it" in down.stderr
    left = {process.pid for process in world.processes()}
    assert rank.pid not in left
    assert left == {mine.pid}
    (world.folder / "pid-0").unlink()
    world.up()
    world.pid_in("pid-1")  # until its log has been sent, the first attempt is not over
    assert world.cluster.job(job.id).attempt == 1


def test_a_second_one_on_the_same_state_is_refused(world):
    first = world.up()
    second = world.up("--bind", "127.0.0.1:0", ready=False)
    assert second.wait() == 1
    assert f"held by pid {first.process.pid}" in second.said()
    job = world.submit("true")
    assert world.cluster.wait(job.id, WAIT_S).exit_code == 0


def test_logs_of_another_cluster_are_not_gone_on_with(world):
    """Its jobs have the same numbers."""
    world.up()
    job = world.submit("echo one")
    assert world.text(job, 0) == "one\n"
    assert world.command("down", "--state", str(world.state)).returncode == 0
    world.state = world.folder / "other"
    second = world.up("--bind", "127.0.0.1:0", ready=False)
    assert second.wait() == 2
    assert "has the logs of another cluster" in second.said()
    world.logs = world.folder / "logs of the other"
    world.up("--bind", "127.0.0.1:0")
    assert world.text(world.submit("echo two"), 0) == "two\n"


def test_logs_that_are_elsewhere_are_named(world):
    world.up()
    world.text(world.submit("echo one"), 0)
    assert world.command("down", "--state", str(world.state)).returncode == 0
    before, world.logs = world.logs, world.folder / "others"
    again = world.up()
    assert f"logs of earlier jobs are in {before}" in again.said()


def test_an_agent_that_is_killed_is_started_again_and_its_job_too(world):
    up = world.up("--lease", "60s")
    job = world.submit(STAY)
    rank = world.pid_in("pid-0")
    (agent,) = [p for p in world.processes() if "agent" in command_of(p)]
    agent.kill()
    world.until_gone(rank)
    world.pid_in("pid-1")
    assert "it was killed by signal 9" in up.said()
    (world.folder / "go").touch()
    over = world.cluster.wait(job.id, WAIT_S)
    assert (over.state, over.attempt, over.node_failures) == (State.SUCCEEDED, 1, 1)
    assert (world.folder / "ends").read_text() == "done\n"


def test_a_hostfile_of_several_hosts_here(world):
    hostfile = world.folder / "hosts.txt"
    hostfile.write_text("#address,gpu_idx\n127.0.0.1,0\n127.0.0.1,1\n127.0.0.2 slots=1\n")
    world.up("--hostfile", str(hostfile))
    nodes = {node.name: len(node.slots) for node in world.cluster.nodes()}
    assert nodes == {"127.0.0.1": 2, "127.0.0.2": 1}
    job = world.submit("echo $RANK $LOCAL_RANK $GROUP_RANK $MASTER_ADDR", gpus=3)
    assert world.cluster.wait(job.id, WAIT_S).exit_code == 0
    lines = {b"".join(world.cluster.logs(job.id, rank=rank)).decode() for rank in range(3)}
    assert lines == {"0 0 0 127.0.0.1\n", "1 1 0 127.0.0.1\n", "2 0 1 127.0.0.1\n"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run jobs as another user")
def test_root_runs_jobs_as_the_user_it_is_given(world, monkeypatch):
    """Each host has a folder that this user can reach; and a later `up` finds its agents there."""
    open_to_all(world.folder)
    reached = world.folder / "lib"
    elsewhere = "from pathlib import Path\nfrom manyhands.cluster import identity\n"
    elsewhere += f"identity._OF_ROOT = Path({str(reached)!r})\n"
    monkeypatch.setattr(running, "MAIN", elsewhere + MAIN)
    hostfile = world.folder / "hosts.txt"
    hostfile.write_text("127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
    options = ("--hostfile", str(hostfile), "--user", "nobody", "--lease", "60s")
    up = world.up(*options)
    assert len(world.cluster.nodes()) == 2
    job = world.submit("id -un; pwd", gpus=2, workdir="")
    assert world.cluster.wait(job.id, WAIT_S).exit_code == 0
    for rank in range(2):
        name, where = b"".join(world.cluster.logs(job.id, rank=rank)).decode().split()
        assert name == "nobody"
        assert Path(where).is_relative_to(reached)
    assert not (world.folder / "None").exists()
    up.process.kill()
    up.process.wait(WAIT_S)
    assert len([p for p in world.processes() if "agent" in command_of(p)]) == 2
    again = world.up(*options)
    again.process.kill()
    again.process.wait(WAIT_S)
    down = world.command("down", "--state", str(world.state))
    assert down.returncode == 0
    assert "2 agents of it are told to end" in down.stderr
    # One that was just being started found its folder free, and nobody who answers.
    world.until(lambda: not world.processes(), "the agents to be gone")


def test_no_secret_is_where_others_see_it(world):
    up = world.up()
    world.submit("env; cat /proc/$PPID/cmdline; " + STAY)
    world.pid_in("pid-0")
    secrets = [(world.state / name).read_text() for name in ("token", "agent-token")]
    (world.folder / "go").touch()
    world.cluster.wait(1, WAIT_S)
    public = [f"{command_of(p)} {environ_of(p)}" for p in world.processes()]
    public += [file.read_text() for file in world.logs.rglob("*.log")]
    public.append(up.said())
    for secret in secrets:
        assert not [text for text in public if secret in text]
    assert not [text for text in public if "mhc1-" in text]
    names = ("token", "agent-token", "code", "key.pem", "jobs.db", "jobs.db-wal")
    modes = {name: (world.state / name).stat().st_mode & 0o777 for name in names}
    assert modes == dict.fromkeys(names, 0o600)
    assert world.state.stat().st_mode & 0o777 == 0o700


def test_a_job_has_the_hub_and_it_is_the_same_after_a_restart(world):
    script = (
        "from manyhands.links.base import open_link\n"
        "import os\n"
        "with open_link(os.environ['MANYHANDS_URL'], run=os.environ['MANYHANDS_RUN']) as link:\n"
        "    print(type(link.receive(60)).__name__, os.environ['MANYHANDS_RUN'])\n"
    )
    codes = []
    for _ in range(2):
        up = world.up()
        command = [sys.executable, "-c", script]
        job = world.cluster.submit(command, workdir=str(world.folder))
        assert world.cluster.wait(job.id, WAIT_S).exit_code == 0
        said = b"".join(world.cluster.logs(job.id)).decode()
        assert re.fullmatch(rf"View job-{job.id}-0-\w{{16}}\n", said)
        codes.append((world.state / "hub" / "port").read_text())
        assert up.end() == 0
    assert codes[0] == codes[1]


def test_no_agent_of_its_own(world):
    said = world.up("--slots", "0")
    assert world.cluster.nodes() == []
    job = world.submit("true")
    agent = world.join(typed=True)
    assert world.cluster.wait(job.id, WAIT_S).exit_code == 0
    # It goes down; the agent is a user's, stays, and comes back to the next.
    assert said.end() == 0
    assert agent.poll() is None
    world.up("--slots", "0")
    world.until(lambda: [n for n in world.cluster.nodes() if n.state == "here"], "the agent again")
    job = world.submit("true")
    assert world.cluster.wait(job.id, WAIT_S).exit_code == 0
    agent.terminate()
    out, _ = agent.communicate(timeout=WAIT_S)
    assert agent.returncode == 0
    assert out == b"host other left: the agent was stopped\n"
    world.until(lambda: [n.state for n in world.cluster.nodes()] == ["gone"], "to be seen to go")


def test_a_second_agent_in_one_folder_says_so(world):
    world.up("--slots", "0")
    first = world.join()
    world.until(lambda: [n for n in world.cluster.nodes() if n.state == "here"], "the agent")
    second = world.join()
    second.communicate(timeout=WAIT_S)
    assert second.returncode == HELD
    first.terminate()
    first.communicate(timeout=WAIT_S)


# -- agents that do not come ------------------------------------------------------------------


def test_when_no_agent_comes_up_fails_and_says_why(world):
    hostfile = world.folder / "hosts.txt"
    hostfile.write_text("ann@127.0.0.1 slots=1\n")
    ssh = "sh -c 'echo Permission denied >&2; exit 255'"
    up = world.up("--hostfile", str(hostfile), "--ssh", ssh, ready=False)
    assert up.wait() == 1
    said = up.said()
    assert "error: no agent has come" in said
    assert "127.0.0.1: ssh was not let in" in said
    assert "ssh-copy-id ann@127.0.0.1" in said
    assert world.processes() == []


def test_when_some_come_they_are_used_and_the_others_named(world):
    hostfile = world.folder / "hosts.txt"
    hostfile.write_text("127.0.0.2 slots=1\nann@127.0.0.1 slots=1\n")
    up = world.up("--hostfile", str(hostfile), "--ssh", "sh -c 'exit 255'")
    assert [node.name for node in world.cluster.nodes()] == ["127.0.0.2"]
    assert "warning: no agent of 127.0.0.1: ssh did not get there" in up.said()
    job = world.submit("true")
    assert world.cluster.wait(job.id, WAIT_S).exit_code == 0
    # A job may want all that the hostfile has, and no more.
    job = world.submit("true", gpus=2)
    reason = "wants 2 slots, the hosts have 1"
    world.until(lambda: world.cluster.job(job.id).reason == reason, reason)
    with pytest.raises(BadJob, match=r"127.0.0.1 has 1 \(not here yet\), 127.0.0.2 has 1"):
        world.submit("true", gpus=3)
    assert up.end() == 0


def test_ctrl_c_before_it_is_ready(world):
    hostfile = world.folder / "hosts.txt"
    hostfile.write_text("ann@127.0.0.1 slots=1\n")
    ssh = f"sh -c 'touch {world.folder}/tried; exec sleep 600'"
    up = world.up("--hostfile", str(hostfile), "--ssh", ssh, ready=False)
    world.until((world.folder / "tried").exists, "ssh")
    up.signal(signal.SIGINT)
    assert up.wait() == 0
    assert world.processes() == []


def test_over_a_real_ssh(world, tmp_path):
    source = str(Path(manyhands.__file__).parent.parent)
    given = {"PYTHONPATH": source, MARK: world.mark, "TMPDIR": os.environ["TMPDIR"]}
    given["XDG_STATE_HOME"] = str(world.folder / "remote")
    with Sshd(tmp_path / "sshd", given) as sshd:
        hostfile = world.folder / "hosts.txt"
        hostfile.write_text(f"{sshd.address} slots=2\n")
        up = world.up("--hostfile", str(hostfile), "--ssh", " ".join(sshd.command()))
        job = world.submit('echo $RANK; test -n "$SSH_CONNECTION"', gpus=2)
        assert world.cluster.wait(job.id, WAIT_S).exit_code == 0
        # ssh dies, the agent does not; a job that runs meanwhile is not touched.
        job = world.submit(STAY)
        rank = world.pid_in("pid-0")
        ssh = [p for p in world.processes() if name_of(p) == "ssh"]
        assert len(ssh) == 1
        sshd.drop()
        world.until_gone(*ssh)
        assert not is_gone(rank)
        (world.folder / "go").touch()
        over = world.cluster.wait(job.id, WAIT_S)
        assert (over.state, over.attempt) == (State.SUCCEEDED, 0)
        assert up.end() == 0
        world.until(lambda: world.processes() == [], "the agent over there")
