"""The agent: what it does for an office, in real processes."""

from __future__ import annotations

import json
import os
import pwd
import resource
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from manyhands.cluster.attempt import AGENT_STOPPED, LEASE_ENDED
from manyhands.cluster.messages import Phase
from manyhands.cluster.office import HOST_TAKEN
from manyhands.cluster.uploads import CHUNK_BYTES
from tests.cluster.folders import open_to_all
from tests.cluster.hosts import TestHost, gone
from tests.cluster.offices import want
from tests.cluster.programs import (
    FAILS,
    HAS_DAEMON,
    POLITE,
    RAISES,
    STAYS,
    STUBBORN,
    SUCCEEDS,
    python,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

SHOW_ENVIRONMENT = python(
    "import os, json; print(json.dumps(dict(os.environ)), os.getcwd(), flush=True)"
)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[TestHost]:
    with TestHost(tmp_path) as made:
        yield made


def exit_codes(host: TestHost, job: int = 1, attempt: int = 0) -> dict[int, int]:
    holding = host.office.holding(job, attempt)
    return {end.rank: end.exit_code for end in holding.ended}


# From wanted to forgotten


def test_an_attempt_is_ready_then_runs_then_ends_then_is_forgotten(host) -> None:
    host.start()
    host.office.want(want(POLITE, port=0))
    ready = host.office.wait_phase(Phase.READY)
    assert ready.port > 0
    assert not host.family()
    host.office.want(want(POLITE, port=ready.port))
    assert host.office.wait_phase(Phase.RUNNING).port == ready.port
    host.said()
    host.office.want(want(POLITE, port=ready.port, stop=True))
    ended = host.office.wait_phase(Phase.ENDED)
    assert (exit_codes(host), ended.failure, ended.lost) == ({0: 0}, None, "")
    host.office.want()
    host.office.wait(lambda: host.office.holding() is None, "it to be forgotten")
    host.office.wait_log(b"saved")
    assert not list((host.state / "attempts" / "c1").iterdir())
    assert [path.name for path in (host.state / "begun" / "c1").iterdir()] == ["1-0"]


def test_the_environment_of_ranks(host) -> None:
    host.start(environment={"FROM_AGENT": "1", "MANYHANDS_NAME": "agent", "RANK": "77"})
    wanted = want(
        SHOW_ENVIRONMENT,
        attempt=2,
        ranks=2,
        batch=64,
        env={"MINE": "x", "FROM_AGENT": "2"},
        hub="mh1-secretsecretsecret",
    )
    host.office.want(wanted)
    host.office.wait_phase(Phase.ENDED, attempt=2)
    text = host.office.wait_log(b"\n", rank=1, attempt=2).decode()
    shown, _, folder = text.strip().rpartition("} ")
    assert folder == str(host.state / "work" / "c1" / "job-1")
    environment = json.loads(shown + "}")
    assert {name: value for name, value in environment.items() if name in EXPECTED} == EXPECTED
    assert environment["MANYHANDS_HOST"] == host.name
    assert environment["PATH"].startswith(str(Path(sys.executable).parent) + os.pathsep)


EXPECTED = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "ROLE_NAME": "default",
    "ROLE_RANK": "1",
    "ROLE_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_RUN_ID": "job-1",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
    "MANYHANDS_JOB": "1",
    "MANYHANDS_ATTEMPT": "c1/1/2",
    "MANYHANDS_RESTART_COUNT": "2",
    "MANYHANDS_BATCH": "64",
    "MANYHANDS_URL": "mh1-secretsecretsecret",
    "MANYHANDS_RUN": "job-1-2",
    "MANYHANDS_MIN_PEERS": "2",
    "MANYHANDS_OUTAGE": "120",
    "MANYHANDS_NAME": "rank-1",
    "OMP_NUM_THREADS": "1",
    "MINE": "x",
    "FROM_AGENT": "2",
}


def test_no_secret_of_the_cluster_is_within_reach_of_a_rank(host) -> None:
    """Not in its environment, nor on any command line, nor in the agent's first environment."""
    secret = "s3cret-of-the-cluster"
    code = (
        "import os, pathlib\n"
        "def look(path):\n"
        f"    try: return {secret.encode()!r} in pathlib.Path(path).read_bytes()\n"
        "    except OSError: return False\n"
        "me = os.getpid()\n"
        "names = [f'/proc/{n}/cmdline' for n in os.listdir('/proc') if n.isdigit()]\n"
        "names += [f'/proc/{me}/environ', f'/proc/{os.getppid()}/environ']\n"
        "print('found', [name for name in names if look(name)], os.listdir('/proc/self/fd'))\n"
        "print(sorted(n for n in os.environ if n.endswith(('_TOKEN', '_CODE'))))\n"
    )
    host.start(
        environment={
            "MANYHANDS_TOKEN": secret,
            "MODEL_TOKEN": "other",
            "SOME_TOKEN": f"x{secret}x",
            "A_CODE": "mhc1-abcdefghijkl",
            "HF_TOKEN": "the user's own",
        },
        secrets=["MANYHANDS_TOKEN"],
    )
    # The script has the secret on its own command line otherwise.
    script = host.folder / "look.py"
    script.write_text(code)
    command = (*python("")[:-2], str(script))
    host.office.want(want(command))
    host.office.wait_phase(Phase.ENDED)
    text = host.office.wait_log(b"]\n[").decode()
    assert text == "found [] ['0', '1', '2', '3']\n['HF_TOKEN']\n"


# Ends


def test_a_failure_comes_with_the_last_words_and_without_secrets(host) -> None:
    host.start()
    code = f"{RAISES[-1].replace('the reason', 'cannot join mh1-AAAABBBBCCCCDDDD')}"
    host.office.want(want(python(code), ranks=1))
    failure = host.office.wait_phase(Phase.ENDED).failure
    assert (failure.rank, failure.host, failure.exit_code) == (0, host.name, 1)
    assert failure.words.startswith("Traceback (most recent call last):")
    assert failure.words.endswith("ValueError: cannot join mh1-***")


def test_a_command_that_is_not_there_is_a_failure_with_words(host) -> None:
    host.start()
    host.office.want(want(("no-such-program",)))
    failure = host.office.wait_phase(Phase.ENDED).failure
    assert failure.exit_code == 127
    assert "cannot run 'no-such-program'" in failure.words


def test_the_first_failure_ends_the_other_ranks(host) -> None:
    code = f"import os\nif os.environ['RANK'] == '1': exec({FAILS[-1]!r})\n{STAYS[-1]}"
    host.start()
    host.office.want(want(python(code), ranks=3))
    ended = host.office.wait_phase(Phase.ENDED)
    assert (ended.failure.rank, ended.failure.exit_code) == (1, 7)
    assert exit_codes(host) == {0: 143, 1: 7, 2: 143}


@pytest.mark.parametrize("program", [STUBBORN, HAS_DAEMON])
def test_a_stop_ends_what_does_not_want_to(host, program) -> None:
    host.start()
    host.office.want(want(program, grace_s=0.1))
    host.office.wait_phase(Phase.RUNNING)
    processes = host.said()
    host.office.want(want(program, grace_s=0.1, stop=True))
    ended = host.office.wait_phase(Phase.ENDED)
    assert gone(processes)
    assert (ended.failure, ended.lost) == (None, "")


def test_a_stop_reaches_a_rank_that_is_stopped(host) -> None:
    host.start()
    host.office.want(want(POLITE))
    (rank,) = host.said()
    rank.suspend()
    host.office.want(want(POLITE, stop=True))
    host.office.wait_phase(Phase.ENDED)
    assert exit_codes(host) == {0: 0}


def test_what_is_not_wanted_any_more_is_ended_and_forgotten(host) -> None:
    host.start()
    host.office.want(want(POLITE))
    processes = host.said()
    host.office.want()
    host.office.wait(lambda: host.office.holding() is None, "it to be forgotten")
    assert gone(processes)
    host.office.wait_log(b"saved")


def test_what_is_to_end_before_it_began_is_held_as_ended(host) -> None:
    host.start()
    host.office.want(want(SUCCEEDS, stop=True))
    ended = host.office.wait_phase(Phase.ENDED)
    assert (ended.ended, ended.lost) == ((), "")
    assert not (host.state / "begun").exists()


def test_a_stop_while_ready_needs_no_process(host) -> None:
    host.start()
    host.office.want(want(SUCCEEDS, port=0))
    host.office.wait_phase(Phase.READY)
    host.office.want(want(SUCCEEDS, port=0, stop=True))
    assert host.office.wait_phase(Phase.ENDED).ended == ()


def test_ranks_of_gpus_run_on_any_core_and_see_the_gpus_of_their_attempt(host) -> None:
    show = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], len(os.sched_getaffinity(0)))"
    host.start(gpus=["GPU-5a1b-0", "GPU-5a1b-1"])
    host.office.want(want(python(show), ranks=2))
    assert host.office.wait_phase(Phase.ENDED).lost == ""
    said = f"GPU-5a1b-0,GPU-5a1b-1 {len(os.sched_getaffinity(0))}\n".encode()
    assert [host.office.wait_log(b"\n", rank) for rank in (0, 1)] == [said, said]


def test_a_slot_that_is_not_there_is_said(host) -> None:
    host.start(slots=1)
    host.office.want(want(SUCCEEDS, ranks=2))
    assert "no slot 1" in host.office.wait_phase(Phase.ENDED).lost


def test_two_attempts_at_once_keep_out_of_each_others_way(host) -> None:
    host.start()
    first, second = want(POLITE, job=1), want(POLITE, job=2)
    host.office.want(first, second)
    (one,), (other,) = host.said(job=1), host.said(job=2)
    host.office.want(second)
    host.office.wait(lambda: host.office.holding(1) is None, "job 1 to be forgotten")
    assert gone([one])
    assert other.is_running()
    assert host.office.holding(2).phase is Phase.RUNNING


# A full disk


def test_an_attempt_that_has_no_room_on_the_disk_is_lost_at_once(host) -> None:
    """The kernel's limit on files stands for the disk: the same calls fail, in the same way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        host.start(wait=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    host.office.wait(lambda: host.office.statuses, "the first Status")
    host.office.want(want(SUCCEEDS))
    ended = host.office.wait_phase(Phase.ENDED)
    assert "cannot be begun on this host" in ended.lost
    assert "File too large" in ended.lost
    assert ended.failure is None


# Logs


def test_a_long_log_travels_in_chunks_and_whole(host) -> None:
    size = 2 * CHUNK_BYTES + 12345
    host.start()
    host.office.want(want(python(f"import sys; sys.stdout.write('x' * {size} + 'end')")))
    host.office.wait_phase(Phase.ENDED)
    assert host.office.wait_log(b"end") == b"x" * size + b"end"
    assert max(host.office.chunks) <= CHUNK_BYTES


def test_whoever_hears_of_the_end_finds_the_whole_log(host) -> None:
    host.office.cut("send_log")
    host.start(logs_s=1e6)
    host.office.want(want(SUCCEEDS))
    host.office.wait(lambda: (held := host.office.holding()) and held.ended, "the rank's end")
    number = len(host.office.statuses)
    host.office.restart()  # so that it says again what it holds
    host.office.wait(lambda: len(host.office.statuses) > number, "another Status")
    assert host.office.holding().phase is Phase.RUNNING
    host.office.mend()
    host.office.wait_phase(Phase.ENDED)
    assert host.office.logs[1, 0, 0] == b"done\n"


def test_the_end_waits_for_the_log_so_long_only_and_forgetting_does(host) -> None:
    host.office.cut("send_log")
    host.start(logs_s=0.2)
    host.office.want(want(SUCCEEDS))
    host.office.wait_phase(Phase.ENDED)
    host.office.want(want(SUCCEEDS, job=2))  # 1 is not wanted any more
    host.office.wait_phase(Phase.ENDED, job=2)
    assert host.office.holding(1) is not None
    host.office.mend()
    assert host.office.wait_log(b"done") == b"done\n"
    host.office.wait(lambda: host.office.holding(1) is None, "it to be forgotten")


def test_a_log_that_is_refused_keeps_nothing(host) -> None:
    host.office.refused["send_log"] = "too-late"
    host.start()
    host.office.want(want(SUCCEEDS))
    host.office.wait_phase(Phase.ENDED)
    host.office.want()
    host.office.wait(lambda: host.office.holding() is None, "it to be forgotten")
    assert host.office.logs == {}


def test_a_lost_answer_to_a_log_repeats_none_of_it(host) -> None:
    host.office.lost_answers["send_log"] = 1
    host.start()
    host.office.want(want(python("print('first', flush=True); print('second')")))
    host.office.wait_phase(Phase.ENDED)
    assert host.office.wait_log(b"second") == b"first\nsecond\n"


# The office: restarted, cut off, refusing


def test_jobs_live_through_a_restart_of_the_coordinator(host) -> None:
    host.start()
    host.office.want(want(POLITE))
    (rank,) = host.said()
    host.office.restart()
    host.office.wait(lambda: len(host.office.hellos) > 1, "a second Hello")
    number = len(host.office.statuses)
    host.office.wait(lambda: len(host.office.statuses) > number, "a Status after it")
    assert host.office.hellos[0].agent == host.office.hellos[-1].agent
    assert host.office.holding().phase is Phase.RUNNING
    assert rank.is_running()
    host.office.want(want(POLITE, stop=True))
    host.office.wait_phase(Phase.ENDED)


def test_lost_answers_and_repeated_wants_start_nothing_twice(host) -> None:
    count = host.folder / "count"
    code = f"open({str(count)!r}, 'a').write('x')"
    host.office.lost_answers = {"hello": 1, "status": 3, "wants": 2}
    host.start()
    for _ in range(5):
        host.office.want(want(python(code)))
    host.office.wait_phase(Phase.ENDED)
    host.office.want()
    host.office.wait(lambda: host.office.holding() is None, "it to be forgotten")
    host.office.want(want(python(code)))  # a coordinator that has lost its memory
    assert "begun here before" in host.office.wait_phase(Phase.ENDED).lost
    assert count.read_text() == "x"


def test_another_cluster_at_the_same_address_ends_the_jobs_of_the_first(host) -> None:
    host.start()
    host.office.want(want(POLITE))
    processes = host.said()
    host.office.cluster = "c2"
    host.office.want(want(STAYS, job=7))
    host.office.restart()
    host.said(job=7)
    assert gone(processes)
    assert host.office.holding(1) is None


def test_a_lease_that_ends_ends_the_jobs_and_the_agent_comes_back(host) -> None:
    host.start()
    host.office.want(want(STUBBORN))
    processes = host.said()
    host.shorten_lease()
    host.office.cut()
    assert gone(processes)
    host.office.lease_s = 60.0
    host.office.mend()
    assert host.office.wait_phase(Phase.ENDED).lost == LEASE_ENDED
    host.office.want(want(SUCCEEDS, attempt=1))
    host.office.wait_phase(Phase.ENDED, attempt=1)
    assert exit_codes(host, attempt=1) == {0: 0}


def test_an_agent_of_up_goes_when_its_lease_ends(host) -> None:
    host.start(origin="up")
    host.office.want(want(STUBBORN))
    processes = host.said()
    host.shorten_lease()
    host.office.cut()
    assert host.words() == "the coordinator did not answer for a lease"
    assert gone(processes)


def test_ranks_of_an_agent_that_is_stopped_end_with_the_lease(host) -> None:
    """The one thing that an agent cannot see to itself."""
    host.start()
    host.office.want(want(STUBBORN))
    processes = host.said()
    host.shorten_lease()
    host.agent.send_signal(signal.SIGSTOP)
    assert gone(processes)
    host.office.lease_s = 60.0
    host.agent.send_signal(signal.SIGCONT)
    assert host.office.wait_phase(Phase.ENDED).lost == LEASE_ENDED


def test_an_agent_that_is_refused_says_why_and_goes(host) -> None:
    host.office.refused["hello"] = "bad-token"
    host.start(wait=False)
    assert host.words() == "error: hello is refused"
    assert host.agent.returncode == 3


def test_a_host_that_is_taken_is_waited_for(host) -> None:
    host.office.refused["hello"] = HOST_TAKEN
    host.start(wait=False)
    host.office.wait(lambda: host.office.refusals.get("hello", 0) > 1, "a second try")
    del host.office.refused["hello"]
    host.office.wait(lambda: host.office.statuses, "the first Status")


def test_a_second_agent_in_the_same_folder_is_refused(host) -> None:
    host.start()
    host.start(wait=False)
    assert host.words().startswith(f"error: another agent (process {host.agents[0].pid}) works in")
    assert host.agents[0].poll() is None


# Leaving


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_jobs_with_grace_and_reports_them(host, number) -> None:
    host.start()
    host.office.want(want(POLITE))
    processes = host.said()
    host.agent.send_signal(number)
    assert host.words() == AGENT_STOPPED
    assert gone(processes)
    ended = host.office.holding()
    assert (ended.phase, ended.lost) == (Phase.ENDED, AGENT_STOPPED)
    assert b"saved" in host.office.logs[1, 0, 0]


def test_a_second_signal_kills(host) -> None:
    host.start()
    host.office.want(want(STUBBORN, grace_s=100_000.0))
    processes = host.said()
    host.agent.send_signal(signal.SIGTERM)
    host.agent.send_signal(signal.SIGINT)  # two of one kind may come as one
    assert host.words() == AGENT_STOPPED
    assert gone(processes)


def test_the_cluster_goes_down(host) -> None:
    host.start(origin="up")
    host.office.want(want(POLITE))
    processes = host.said()
    host.office.want(want(POLITE, stop=True), leave=True)
    assert host.words() == "the coordinator told it to leave"
    assert gone(processes)
    assert host.office.holding().phase is Phase.ENDED


def test_an_agent_of_a_user_stays_when_the_cluster_goes_down(host) -> None:
    host.start()
    host.office.want(want(POLITE))
    processes = host.said()
    host.office.want(want(POLITE), leave=True)
    assert host.office.wait_phase(Phase.ENDED).failure is None  # said, not just forgotten
    assert gone(processes)
    host.office.restart()
    host.office.want(want(POLITE, attempt=1))
    host.said(attempt=1)
    assert host.agent.poll() is None


# Another user


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run jobs as another user")
def test_root_runs_jobs_as_the_user_it_is_given(host) -> None:
    open_to_all(host.folder)
    code = (
        "import os; print(os.getresuid(), os.environ['HOME'], os.environ['USER'])\n"
        "open('mine', 'w').write('x'); print(os.listdir(os.getcwd()))"
    )
    host.start(user="nobody")
    host.office.want(want(("/usr/bin/env", "-u", "PYTHONPATH", "/usr/bin/python3", "-c", code)))
    host.office.wait_phase(Phase.ENDED)
    text = host.office.wait_log(b"]\n").decode()
    entry = pwd.getpwnam("nobody")
    expected = f"{(entry.pw_uid,) * 3} {entry.pw_dir} nobody\n['mine']\n"
    assert text == expected
    assert (host.state / "work/c1/job-1").stat().st_uid == entry.pw_uid
    assert (host.state / "attempts/c1").stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run jobs as another user")
def test_a_state_folder_that_the_user_cannot_reach_is_said_at_once(host) -> None:
    host.folder.chmod(0o700)
    host.start(user="nobody", wait=False)
    assert "is closed to them" in host.words()
