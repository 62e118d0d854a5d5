"""The keeper alone: real processes under it, and every way to end them."""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import pwd
import select
import signal
import subprocess
import sys
import termios
from typing import TYPE_CHECKING, Self

import psutil
import pytest

from manyhands.cluster import keeper
from manyhands.cluster.attempt import Attempt
from manyhands.cluster.keeper import CANNOT_RUN, NOT_FOUND, Alarm, Order, clock_s
from manyhands.cluster.ledger import Key
from manyhands.testing.processes import is_gone
from tests.cluster.folders import open_to_all
from tests.cluster.hosts import gone
from tests.cluster.programs import (
    FAILS,
    HAS_DAEMON,
    LEAVES_DAEMON,
    PARENT,
    POLITE,
    STAYS,
    STUBBORN,
    SUCCEEDS,
    python,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

FAR_S = 100_000.0


class Kept:
    """A keeper, its pipes, and what it says."""

    def __init__(
        self, folder: Path, *commands: tuple[str, ...], errors: int | None = None, **changes: object
    ) -> None:
        self.folder = folder
        ranks = [
            keeper.Rank(
                rank=number,
                environment={"PATH": os.defpath, "WHICH": str(number)},
                cores=[],
                log=str(folder / f"rank-{number}.log"),
            )
            for number in range(len(commands))
        ]
        # One command for all, as in the real thing: each finds its own.
        chooser = "import os, sys, json; c = json.loads(sys.argv[1])[int(os.environ['WHICH'])]\n"
        command = [*python(chooser + "os.execv(c[0], c)"), json.dumps(commands)]
        order = Order(
            command=command if len(commands) > 1 else list(commands[0]),
            workdir=str(folder),
            ranks=ranks,
            grace_s=FAR_S,
            lease_until_s=clock_s() + FAR_S,
            user=None,
        )
        order.update(changes)
        (folder / keeper.ORDER).write_text(json.dumps(order))
        lock = os.open(folder / "keeper.lock", os.O_RDWR | os.O_CREAT)
        fcntl.flock(lock, fcntl.LOCK_EX)
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", keeper.__file__, str(folder), str(lock)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            pass_fds=(lock,),
            start_new_session=True,
        )
        os.close(lock)

    def tell(self, line: str) -> None:
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def wait_read(self) -> None:
        """Until it has read what it was told."""
        left = array.array("i", [1])
        while left[0]:
            os.sched_yield()
            fcntl.ioctl(self.process.stdin.fileno(), termios.FIONREAD, left)

    def next_record(self) -> dict:
        return json.loads(self.process.stdout.readline())

    def last_record(self) -> dict:
        """Waits for its end."""
        lines = self.process.stdout.read().splitlines()
        assert self.process.wait() == 0
        assert json.loads(lines[-1]) == json.loads((self.folder / keeper.RECORD).read_bytes())
        return json.loads(lines[-1])

    def pids(self, rank: int = 0) -> list[psutil.Process]:
        """Those that a rank names after `up`, once it has."""
        log = self.folder / f"rank-{rank}.log"
        if not log.exists():
            self.next_record()  # they are started now
        with subprocess.Popen(
            ["tail", "-n", "+1", "-s", "0.02", "-f", str(log)], stdout=subprocess.PIPE
        ) as tail:
            for line in tail.stdout:
                if line.startswith(b"up"):
                    tail.kill()
                    return [psutil.Process(int(word)) for word in line.split()[1:]]
        raise AssertionError(log.read_text())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, error, trace) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self.process.wait()


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Callable[..., Kept]]:
    with contextlib.ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(Kept(tmp_path, *args, **kwargs))


def wait_until(time_s: float) -> None:
    """By the keeper's clock."""
    with contextlib.closing(Alarm()) as alarm:
        alarm.set(time_s)
        os.set_blocking(alarm.fd, True)
        os.read(alarm.fd, 8)


def codes(record: dict) -> dict[int, int]:
    return {end["rank"]: end["exit_code"] for end in record["ends"]}


def test_it_runs_every_rank_to_its_end_and_says_how_they_ended(kept, tmp_path) -> None:
    with kept(SUCCEEDS, SUCCEEDS) as running:
        record = running.last_record()
    assert codes(record) == {0: 0, 1: 0}
    assert record["done"]
    assert record["cause"] == ""
    assert (tmp_path / "rank-1.log").read_text() == "done\n"
    assert not (tmp_path / keeper.ORDER).exists()


def test_a_rank_that_fails_makes_the_others_leave(kept) -> None:
    with kept(POLITE, FAILS) as running:
        record = running.last_record()
    assert record["failed"]["rank"] == 1
    assert record["failed"]["exit_code"] == 7
    assert record["cause"] == "failure"
    # Asked before it could set its handler, it is ended by the signal; after that, it leaves.
    assert codes(record)[0] in (0, 128 + signal.SIGTERM)


def test_a_rank_that_is_killed_has_failed(kept) -> None:
    with kept(STAYS, POLITE) as running:
        (rank,) = running.pids(0)
        running.pids(1)
        rank.kill()
        record = running.last_record()
    assert record["failed"] == record["ends"][0]
    assert codes(record) == {0: 128 + signal.SIGKILL, 1: 0}


def test_stop_asks_with_grace(kept) -> None:
    with kept(POLITE) as running:
        running.pids()
        running.tell(f"stop {FAR_S}")
        record = running.last_record()
    assert codes(record) == {0: 0}
    assert record["cause"] == "stop"
    assert record["failed"] is None


def test_the_children_of_a_rank_are_asked_only_when_it_is_gone(kept) -> None:
    """A last checkpoint may need the workers of a data loader."""
    code = (
        "import os, signal, sys\n"
        "if not (child := os.fork()):\n"
        "    signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        "    os.kill(os.getppid(), signal.SIGUSR1)\n"
        "    while 1: signal.pause()\n"
        "def save(*_):\n"
        "    print('worker lives:', os.waitpid(child, os.WNOHANG) == (0, 0), flush=True)\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "signal.sigwait([signal.SIGUSR1])\n"
        "print('up', os.getpid(), child, flush=True)\n"
        "while 1: signal.pause()\n"
    )
    blocked = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
    with kept(python(blocked + code)) as running:
        _, worker = running.pids()
        running.tell(f"stop {FAR_S}")
        record = running.last_record()
        assert "worker lives: True" in (running.folder / "rank-0.log").read_text()
    assert codes(record) == {0: 0}
    assert is_gone(worker)


@pytest.mark.parametrize("program", [STUBBORN, HAS_DAEMON, PARENT])
def test_what_does_not_leave_is_killed_after_the_grace(kept, program) -> None:
    with kept(program, grace_s=0.05) as running:
        processes = running.pids()
        running.tell("stop 0.05")
        record = running.last_record()
    assert record["done"]
    assert all(is_gone(process) for process in processes)


def test_a_second_word_shortens_the_grace(kept) -> None:
    with kept(STUBBORN) as running:
        running.pids()
        running.tell(f"stop {FAR_S}")
        running.tell("kill")
        assert codes(running.last_record()) == {0: 128 + signal.SIGKILL}


def test_a_rank_that_is_stopped_can_be_ended(kept) -> None:
    with kept(POLITE) as running:
        (rank,) = running.pids()
        rank.suspend()
        running.tell(f"stop {FAR_S}")
        assert codes(running.last_record()) == {0: 0}


def test_a_daemon_does_not_outlive_the_attempt(kept) -> None:
    ends = "import time\nwhile not os.path.exists('go'): time.sleep(0.01)"  # once it was looked at
    with kept(python(LEAVES_DAEMON[-1] + ends), grace_s=0.05) as running:
        processes = running.pids()
        (running.folder / "go").touch()
        record = running.last_record()
    assert codes(record) == {0: 0}
    assert record["cause"] == ""
    assert len(processes) == 2
    assert all(is_gone(process) for process in processes)


@pytest.mark.parametrize("program", [STUBBORN, HAS_DAEMON, PARENT])
def test_the_end_of_the_agent_ends_everything_at_once(kept, program) -> None:
    with kept(program) as running:
        processes = running.pids()
        running.process.stdin.close()
        record = running.last_record()
    assert record["cause"] == "agent"
    assert all(is_gone(process) for process in processes)


def test_the_end_of_the_lease_ends_everything_at_once(kept) -> None:
    """Without a word of the agent, which may be stopped itself."""
    with kept(STUBBORN, lease_until_s=clock_s() + 5.0) as running:  # enough for its start
        record = running.last_record()
    assert record["cause"] == "lease"
    assert codes(record) == {0: 128 + signal.SIGKILL}


def test_a_lease_can_be_made_shorter(kept) -> None:
    """As by a coordinator that was started anew with a shorter one: it counts by that."""
    with kept(STUBBORN) as running:
        running.pids()
        running.tell(f"lease {clock_s() + 0.1}")
        assert running.last_record()["cause"] == "lease"


def test_a_lease_can_be_made_longer(kept) -> None:
    soon_s = clock_s() + 5.0  # long enough for a keeper to start
    with kept(POLITE, lease_until_s=soon_s) as running:
        running.tell(f"lease {clock_s() + FAR_S}")
        running.pids()
        wait_until(soon_s)
        running.tell(f"stop {FAR_S}")
        assert running.last_record()["cause"] == "stop"


def test_a_lease_is_not_made_longer_after_its_end(kept) -> None:
    """As when everything slept: what the agent says first may be from before."""
    with kept(STUBBORN) as running:
        running.pids()
        soon_s = clock_s() + 1.0
        running.tell(f"lease {soon_s}")
        running.wait_read()
        psutil.Process(running.process.pid).suspend()
        wait_until(soon_s)
        with contextlib.suppress(BrokenPipeError):  # it may have ended before it was stopped
            running.tell(f"lease {clock_s() + FAR_S}")
        psutil.Process(running.process.pid).resume()
        assert running.last_record()["cause"] == "lease"


def test_nothing_is_started_after_the_lease(kept, tmp_path) -> None:
    with kept(SUCCEEDS, lease_until_s=clock_s() - 1) as running:
        running.tell(f"lease {clock_s() + FAR_S}")
        record = running.last_record()
    assert record["cause"] == "lease"
    assert record["done"]
    assert record["ends"] == []
    assert not (tmp_path / "rank-0.log").exists()


def test_ranks_die_with_a_keeper_that_is_killed(kept) -> None:
    with kept(STUBBORN) as running:
        (rank,) = running.pids()
        running.process.kill()
        running.process.wait()
        assert gone([rank])


def test_the_lock_is_the_keepers_alone(kept, tmp_path) -> None:
    with kept(HAS_DAEMON) as running:
        running.pids()
        with (tmp_path / "keeper.lock").open("rb") as file:
            with pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            running.process.kill()
            running.process.wait()
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # whatever still runs
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.cmdline() == ["sleep", "100000"] and process.cwd() == str(tmp_path):
                    process.kill()


def test_signals_for_a_whole_service_are_the_agents_to_answer(kept) -> None:
    with kept(POLITE) as running:
        running.pids()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            running.process.send_signal(number)
        running.tell(f"stop {FAR_S}")
        assert running.last_record()["cause"] == "stop"


@pytest.mark.parametrize("program", [STAYS, POLITE])
def test_ranks_that_are_signalled_with_the_whole_service_have_not_failed(kept, program) -> None:
    """Nor have they done what they had to: only somebody else can tell what is to become of it."""
    with kept(program, POLITE) as running:
        (rank,), _ = running.pids(0), running.pids(1)
        for pid in (running.process.pid, rank.pid):
            os.kill(pid, signal.SIGTERM)
        record = running.last_record()  # the other is asked too
    assert (record["failed"], record["cause"]) == (None, "signal")
    assert codes(record) == {0: 143 if program is STAYS else 0, 1: 0}


@pytest.mark.parametrize("way", ["agent", "stop", "lease"])
def test_what_comes_after_the_last_rank_does_not_change_how_it_ended(kept, way) -> None:
    with kept(LEAVES_DAEMON) as running:  # it lives on, and has LINGER_S
        while not running.next_record()["ends"]:
            pass
        if way == "agent":
            running.process.stdin.close()
        else:
            running.tell("kill" if way == "stop" else f"lease {clock_s() - 1}")
        record = running.last_record()
    assert (record["cause"], record["done"], codes(record)) == ("", True, {0: 0})


def test_a_keeper_whose_ranks_take_long_to_die_waits_for_them(tmp_path) -> None:
    """And does not turn round and round: nothing is due any more."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    order = Order(
        command=["/bin/cat", str(fifo)],
        workdir=str(tmp_path),
        ranks=[keeper.Rank(rank=0, environment={}, cores=[], log=str(tmp_path / "rank-0.log"))],
        grace_s=FAR_S,
        lease_until_s=clock_s() + FAR_S,
        user=None,
    )
    code = (
        "import json, os, sys\n"
        "from manyhands.cluster import keeper\n"
        "kept = keeper.Keeper(sys.argv[1], json.loads(sys.argv[2]))\n"
        "keeper.signal_each = keeper.signal_group = lambda *_: None  # they cannot die yet\n"
        "turns, true_set = [], kept._alarm.set\n"
        "def set(at_s):\n"
        "    if turns and (at_s is None or len(turns) > 50): os.close(os.open(sys.argv[3], 1))\n"
        "    if not turns: kept._lease_s = at_s = keeper.clock_s()\n"
        "    turns.append(at_s)\n"
        "    return true_set(at_s)\n"
        "kept._alarm.set = set\n"
        "kept.run()\n"
        "print(turns.count(None) == len(turns) - 1, len(turns) < 10, file=sys.stderr)\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), json.dumps(order), str(fifo)],
        stdin=(pipe := os.pipe())[0],
        capture_output=True,
        check=True,
    )
    for fd in pipe:
        os.close(fd)
    assert said.stderr == b"True True\n"


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (("no-such-program",), NOT_FOUND, "cannot run 'no-such-program': No such file"),
        (("/",), CANNOT_RUN, "cannot run '/': Permission denied"),
        (("a\0b",), CANNOT_RUN, "embedded null"),
    ],
)
def test_a_command_that_cannot_run_is_its_own_failure(kept, tmp_path, command, code, words) -> None:
    with kept(command) as running:
        record = running.last_record()
    assert record["failed"]["exit_code"] == code
    assert words in (tmp_path / "rank-0.log").read_text()


def test_a_folder_that_is_not_there_is_told(kept, tmp_path) -> None:
    with kept(SUCCEEDS, workdir=str(tmp_path / "none")) as running:
        record = running.last_record()
    assert record["failed"]["exit_code"] == NOT_FOUND
    assert "cannot enter the folder" in (tmp_path / "rank-0.log").read_text()


def test_a_log_that_cannot_be_made_is_the_hosts_failure(kept, tmp_path) -> None:
    (tmp_path / "rank-1.log").mkdir()
    with kept(STAYS, STAYS) as running:
        record = running.last_record()
    assert record["cause"] == "error"
    assert "rank 1" in record["error"]
    assert record["failed"] is None
    assert record["done"]


def test_a_record_that_cannot_be_written_is_told_by_the_pipe(kept, tmp_path) -> None:
    (tmp_path / f"{keeper.RECORD}.draft").mkdir()
    with kept(FAILS) as running:
        lines = running.process.stdout.read().splitlines()
    record = json.loads(lines[-1])
    assert record["done"]
    assert record["failed"]["exit_code"] == 7


def test_a_disk_that_is_full_costs_neither_the_keeper_nor_the_end(kept, tmp_path) -> None:
    """Its own log is on that disk as well."""
    (tmp_path / f"{keeper.RECORD}.draft").mkdir()
    full = os.open("/dev/full", os.O_WRONLY)
    with kept(SUCCEEDS, errors=full) as running:
        os.close(full)
        lines = running.process.stdout.read().splitlines()
        assert running.process.wait() == 0
    record = json.loads(lines[-1])
    assert (record["done"], codes(record)) == (True, {0: 0})


def test_a_long_record_is_told_in_parts(kept, tmp_path) -> None:
    """Too long to be written to the pipe at once, and there is no room for a file."""
    (tmp_path / f"{keeper.RECORD}.draft").mkdir()
    count = 150
    ranks = [
        keeper.Rank(rank=number, environment={}, cores=[], log=str(tmp_path / "log"))
        for number in range(count)
    ]
    full = os.open("/dev/full", os.O_WRONLY)
    with kept(("/bin/true",), errors=full, ranks=ranks) as running:
        os.close(full)
        lines = running.process.stdout.read().splitlines()
    assert max(map(len, lines)) < select.PIPE_BUF
    attempt = Attempt(Key("c", 1, 0), "h", tmp_path)
    for line in lines:
        attempt.note(line)
    held = attempt.holding()
    assert sorted(end.rank for end in held.ended) == list(range(count))
    assert json.loads(lines[-1])["done"]
    assert sum(json.loads(line)["done"] for line in lines) == 1


def test_an_agent_that_does_not_read_keeps_nobody_waiting(kept, tmp_path) -> None:
    """As one that is stopped: the pipe is full, and yet the lease is kept."""
    read, write = os.pipe()
    with contextlib.suppress(BlockingIOError):
        os.set_blocking(write, False)
        while os.write(write, b"x" * 4096):
            pass
    (tmp_path / keeper.ORDER).write_text(
        json.dumps(
            Order(
                command=list(STUBBORN),
                workdir=str(tmp_path),
                ranks=[
                    keeper.Rank(rank=0, environment={}, cores=[], log=str(tmp_path / "rank-0.log"))
                ],
                grace_s=1,
                lease_until_s=clock_s() + 0.5,
                user=None,
            )
        )
    )
    lock = os.open(tmp_path / "keeper.lock", os.O_RDWR | os.O_CREAT)
    with subprocess.Popen(
        [sys.executable, "-I", "-S", keeper.__file__, str(tmp_path), str(lock)],
        stdin=subprocess.PIPE,
        stdout=write,
        pass_fds=(lock,),
    ) as process:
        assert process.wait() == 0
    for fd in (read, write, lock):
        os.close(fd)
    record = json.loads((tmp_path / keeper.RECORD).read_bytes())
    assert (record["cause"], record["done"]) == ("lease", True)


def test_a_rank_has_its_cores_and_nothing_of_the_keeper_open(kept, tmp_path) -> None:
    core = max(os.sched_getaffinity(0))
    code = (
        "import os; print(os.sched_getaffinity(0), sorted(map(int, os.listdir('/proc/self/fd'))),"
        "os.getsid(0) == os.getpid(), os.getcwd())"
    )
    rank = keeper.Rank(
        rank=0, environment={"A": "b"}, cores=[core], log=str(tmp_path / "rank-0.log")
    )
    with kept(python(code), ranks=[rank]) as running:
        assert codes(running.last_record()) == {0: 0}
    # 3 is the folder that is being listed.
    assert (tmp_path / "rank-0.log").read_text() == f"{{{core}}} [0, 1, 2, 3] True {tmp_path}\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_root_can_run_ranks_as_another_user(kept, tmp_path) -> None:
    nobody = pwd.getpwnam("nobody")
    open_to_all(tmp_path)
    user = keeper.User(uid=nobody.pw_uid, gid=nobody.pw_gid, groups=[nobody.pw_gid])
    code = (
        "import os, signal; print(os.getresuid(), os.getresgid(), os.getgroups(), flush=True)\n"
        "os.stat(os.getcwd()); open('/dev/stderr', 'a').write('again\\n')\n"
        "print('up', os.getpid(), flush=True)\nwhile 1: signal.pause()"
    )
    with kept(("/usr/bin/env", "python3", "-I", "-S", "-c", code), user=user) as running:
        (rank,) = running.pids()
        running.process.kill()
        running.process.wait()
        assert gone([rank])  # PDEATHSIG outlives the change of user
    uid, gid = nobody.pw_uid, nobody.pw_gid
    text = (tmp_path / "rank-0.log").read_text()
    assert text.startswith(f"({uid}, {uid}, {uid}) ({gid}, {gid}, {gid}) [{gid}]\nagain\n")


def test_hidden_memory_is_closed_to_processes_of_the_same_user() -> None:
    """A first environment stays in /proc, whatever is taken out of `os.environ`."""
    code = (
        "import ctypes, os, sys\n"
        "from manyhands.cluster import keeper\n"
        "if os.geteuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        "def readable():\n"
        "    if not (child := os.fork()):\n"
        "        try: open(f'/proc/{os.getppid()}/environ', 'rb').read()\n"
        "        except PermissionError: os._exit(1)\n"
        "        os._exit(0)\n"
        "    return os.waitpid(child, 0)[1] == 0\n"
        "ctypes.CDLL(None).prctl(4, 1)\n"  # a change of user has closed it
        "before = readable()\n"
        "keeper.hide_memory()\n"
        "print(before, readable())\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert shown.stdout == b"True False\n"
