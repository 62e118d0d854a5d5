"""The keeper: starts the ranks of one attempt on one host, and sees to it that none outlives it.

    python -I -S keeper.py FOLDER LOCK_FD

FOLDER/order.json says what to run (`Order`; it is removed once read); stdin is a pipe from the
agent, a line a command:

    lease UNTIL    the agent's lease: everything is killed at this time of CLOCK_BOOTTIME. The last
                   one counts: a coordinator may grant less than it did
    stop GRACE_S   ask the ranks to leave (SIGTERM), and make them after that many seconds
    kill           make them now

Its end means that the agent is dead, and so everything is killed. What became of the ranks
(`Record`) goes to FOLDER/record.json, and as lines to stdout: a disk that is full loses the first,
an agent that does not read the second. A record that is too long for a line goes in several, each
with some of the ends. The lock is held by LOCK_FD as long as the keeper lives.

The lease is kept here, and not by the agent alone, because an agent that is stopped (SIGSTOP, a
debugger) can end nothing, while its ranks would go on. CLOCK_BOOTTIME counts while a laptop
sleeps, and so does the timer: what slept too long is killed on waking, before anything is said.

Nothing escapes: each rank leads a session of its own, orphans of any depth become children of
this process (PR_SET_CHILD_SUBREAPER), and it ends only when it has no child left. If it is killed
itself, the ranks die with it (PR_SET_PDEATHSIG) and the rest becomes the agent's.

Where these calls do not exist (macOS), ranks are ended by process group: a process that leaves its
group is not found, and ranks outlive a keeper that is killed until the agent has seen it.

Only the standard library: it is run by its path, with `-I -S`, to start fast and to be small.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import select
import selectors
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypedDict, cast

LINGER_S = 5.0
"""For what an attempt leaves behind after its last rank, between SIGTERM and SIGKILL."""
ORDER, RECORD = "order.json", "record.json"
CANNOT_RUN, NOT_FOUND = 126, 127  # as shells say it
_ENDS_A_LINE = 4  # of a record in parts: few enough for the shortest pipe (macOS: 512 bytes)
_ERROR_CHARACTERS = 200

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36
_CLOCK_BOOTTIME = 7
_TFD_TIMER_ABSTIME = 1
_ASKS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class User(TypedDict):
    """Whom the ranks run as."""

    uid: int
    gid: int
    groups: list[int]


class Rank(TypedDict):
    """One process to start."""

    rank: int
    environment: dict[str, str]
    cores: list[int]
    """To be pinned to; empty: wherever the keeper may run."""
    log: str


class Order(TypedDict):
    """What the agent wants run."""

    command: list[str]
    workdir: str
    ranks: list[Rank]
    grace_s: float
    lease_until_s: float
    user: User | None


class End(TypedDict):
    """How a rank ended, by the shell's code."""

    rank: int
    exit_code: int
    at_s: float


class Record(TypedDict):
    """What became of the ranks, as far as it is known."""

    groups: list[int]
    """Process groups of the ranks that run."""
    ends: list[End]
    failed: End | None
    """The first that failed by itself."""
    cause: str
    """Why they were made to end: "failure", "stop", "lease", "agent" (it died), "error", "signal"
    (they were asked by others, and we with them). Empty if all had ended before."""
    error: str
    """Why they could not be started."""
    done: bool
    """No process is left."""


def clock_s() -> float:
    """Seconds that also pass while the machine sleeps; the same for all processes."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def adopt_orphans() -> bool:
    """Make this process the parent of every descendant that loses its own; False where none can."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def hide_memory() -> bool:
    """Keep processes of the same user from this one's memory and first environment (/proc)."""
    return _prctl(_PR_SET_DUMPABLE, 0)


def _prctl(option: int, value: int) -> bool:
    if sys.platform != "linux":
        return False
    if ctypes.CDLL(None, use_errno=True).prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0))):
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
    return True


def parents() -> dict[int, int]:
    """Of every process, its parent. Empty where there is no /proc."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            # pid (name) state ppid ...: a name may have spaces and brackets of its own
            found[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    return found


def descendants(root: int) -> list[int]:
    """Every process below `root`, zombies too."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents().items():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    front = [root]
    while front:
        front = [child for pid in front for child in children.get(pid, ())]
        found += front
    return found


def signal_each(pids: Iterable[int], *numbers: signal.Signals) -> None:
    """Those that are gone, or another user's (sudo), do not matter here."""
    for pid in pids:
        for number in numbers:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def signal_group(group: int, *numbers: signal.Signals) -> None:
    """All processes of a group at once, so that none escapes by forking."""
    for number in numbers:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)


class Alarm:
    """Readable from a time of `clock_s` on. A select's own timeout would stand still in sleep."""

    def __init__(self) -> None:
        self.fd = -1
        if sys.platform == "linux":
            flags = os.O_NONBLOCK | os.O_CLOEXEC
            self.fd = ctypes.CDLL(None).timerfd_create(_CLOCK_BOOTTIME, flags)

    def set(self, at_s: float | None) -> float | None:
        """Returns the timeout for a select: None where the descriptor does."""
        if self.fd < 0:
            return None if at_s is None else max(0.0, at_s - clock_s())
        whole, part = divmod(max(at_s, 0.001), 1) if at_s is not None else (0, 0)
        spec = (ctypes.c_long * 4)(0, 0, int(whole), int(part * 1e9))
        ctypes.CDLL(None).timerfd_settime(self.fd, _TFD_TIMER_ABSTIME, spec, None)
        return None

    def close(self) -> None:
        """Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Keeper:
    """One attempt. `run` returns when no process of it is left."""

    def __init__(self, folder: str, order: Order) -> None:
        self._folder, self._order = folder, order
        self._lease_s = order["lease_until_s"]
        self._kill_s: float | None = None  # when patience ends
        self._ranks: dict[int, int] = {}  # process id -> rank, of those that run
        self._groups: list[int] = []  # of all that ever ran
        self._record = Record(groups=[], ends=[], failed=None, cause="", error="", done=False)
        self._killing = self._lingering = False
        self._told = 0  # ends that the agent can read by now
        self._typed = b""
        self._alarm = Alarm()
        self._selector = selectors.DefaultSelector()
        if self._alarm.fd >= 0:
            self._selector.register(self._alarm.fd, selectors.EVENT_READ)
        # SIGCHLD as bytes to read. Those who ask for an end ask the agent: they are often sent to
        # all of a service. Blocked, not ignored: a child must get what comes before its exec.
        self._woken, wake = os.pipe()
        for fd in (self._woken, wake):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.pthread_sigmask(signal.SIG_BLOCK, _ASKS)
        self._selector.register(self._woken, selectors.EVENT_READ)
        os.set_blocking(0, False)
        os.set_blocking(1, False)
        self._selector.register(0, selectors.EVENT_READ)

    def run(self) -> None:
        """Start the ranks, unless it is too late for that, and see them end."""
        self._keep_lease()
        self._obey()  # the agent may be dead already
        if not self._killing:
            self._start()
        self._publish()
        while self._reap():
            self._selector.select(self._alarm.set(self._next_s()))
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, 4096)
            self._keep_lease()  # first: what comes after the lease does not renew it
            self._obey()
            if self._kill_s is not None and clock_s() >= self._kill_s:
                self._kill()
        if sys.platform != "linux":  # where orphans do not come to us
            for group in self._groups:
                signal_group(group, signal.SIGKILL)
        self._record["done"] = True
        self._publish()

    def _start(self) -> None:
        for rank in self._order["ranks"]:
            try:
                pid = _spawn(self._order, rank)
            except OSError as error:  # no room for a log or a process: not the command's fault
                why = f"cannot start rank {rank['rank']}: {error}"
                self._record["error"] = why[:_ERROR_CHARACTERS]
                self._end("error", 0)
                return
            self._ranks[pid] = rank["rank"]
            self._groups.append(pid)

    def _next_s(self) -> float | None:
        if self._killing:  # who is still there has to die first, however long that takes
            return None
        return min(self._lease_s, self._lease_s if self._kill_s is None else self._kill_s)

    def _keep_lease(self) -> None:
        if not self._killing and clock_s() >= self._lease_s:
            self._end("lease", 0)

    def _obey(self) -> None:
        """What the agent says. Its silence for good is an order too."""
        while 0 in self._selector.get_map():
            try:
                data = os.read(0, 65536)
            except BlockingIOError:
                return
            if not data:
                self._selector.unregister(0)
                self._end("agent", 0)
            *lines, self._typed = (self._typed + data).split(b"\n")
            for line in lines:
                self._obey_line(line.decode().split())

    def _obey_line(self, words: list[str]) -> None:
        if words[0] == "lease":
            self._lease_s = float(words[1])
        elif words[0] == "stop":
            self._end("stop", float(words[1]))
        else:
            self._end("stop", 0)

    def _end(self, cause: str, grace_s: float) -> None:
        """Ask the ranks to leave; not their own children, whom they may need for it (the workers
        of a data loader, for a last checkpoint). Those follow once their rank is gone.
        """
        if self._ranks or not self._groups:  # else they had ended by themselves: so it stays
            self._record["cause"] = self._record["cause"] or cause
        if grace_s <= 0:
            self._kill()
            return
        if self._kill_s is None:
            signal_each(self._ranks, signal.SIGTERM, signal.SIGCONT)
        until_s = clock_s() + grace_s
        self._kill_s = until_s if self._kill_s is None else min(self._kill_s, until_s)

    def _kill(self) -> None:
        """Everything, and again whenever something has died: its children may be new to us."""
        self._killing, self._kill_s = True, None
        for group in self._groups if sys.platform != "linux" else self._ranks:
            signal_group(group, signal.SIGKILL)
        signal_each(descendants(os.getpid()), signal.SIGKILL)

    def _reap(self) -> bool:
        """Take note of who has ended; whether there is anybody left."""
        while True:
            try:
                ended = _ended_child()
            except ChildProcessError:
                return False
            if ended is None:
                break
            pid, code = ended
            if (rank := self._ranks.pop(pid, None)) is not None:
                self._note_end(rank, code)
                if self._record["cause"]:  # its id is its own until it is waited for
                    signal_group(pid, signal.SIGTERM, signal.SIGCONT)
            with contextlib.suppress(ChildProcessError):  # macOS: it has been
                os.waitpid(pid, 0)
            if rank is not None:
                self._publish()
        if self._killing:
            self._kill()
        elif not self._ranks and not self._lingering:
            self._lingering = True
            signal_each(descendants(os.getpid()), signal.SIGTERM, signal.SIGCONT)
            if self._kill_s is None:
                self._kill_s = clock_s() + min(self._order["grace_s"], LINGER_S)
        return True

    def _note_end(self, rank: int, code: int) -> None:
        end = End(rank=rank, exit_code=code, at_s=time.time())
        self._record["ends"].append(end)
        if self._record["cause"]:
            return
        if not signal.sigpending().isdisjoint(_ASKS):
            # Somebody asks this whole service to end, and the ranks were faster than the agent.
            # Whatever they left with is their answer to that.
            self._record["cause"] = "signal"
        elif code:
            self._record["failed"] = end
            self._record["cause"] = "failure"
        else:
            return
        self._end(self._record["cause"], self._order["grace_s"])

    def _publish(self) -> None:
        """To the disk first: what the agent has read is there, if it can be.

        It is not synced: after a power cut, nothing runs, and an attempt without a record is lost.
        A disk that hangs would keep this process from keeping the lease.
        """
        self._record["groups"] = list(self._ranks)
        text = json.dumps(self._record).encode()
        try:
            write_atomically(os.path.join(self._folder, RECORD), text, sync=False)
        except OSError as error:
            with contextlib.suppress(OSError):  # our own log is on the same disk
                os.write(2, f"cannot write {RECORD}: {error}\n".encode())
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            for line, told in self._lines(text):
                os.write(1, line)
                self._told = told

    def _lines(self, text: bytes) -> Iterator[tuple[bytes, int]]:
        """The record for the pipe, and how many ends are told with each line. A line that is no
        longer than PIPE_BUF is written whole or not at all.
        """
        ends = self._record["ends"]
        if len(text) < select.PIPE_BUF:
            yield text + b"\n", len(ends)
            return
        for start in range(self._told, max(len(ends), self._told + 1), _ENDS_A_LINE):
            stop = min(start + _ENDS_A_LINE, len(ends))
            done = self._record["done"] and stop == len(ends)
            part: Record = {**self._record, "groups": [], "ends": ends[start:stop], "done": done}
            yield json.dumps(part).encode() + b"\n", stop


def _ended_child() -> tuple[int, int] | None:
    """A child that has ended and its code, without waiting for it. Raises ChildProcessError."""
    if not hasattr(os, "waitid"):  # macOS, before Python 3.13
        pid, status = os.waitpid(-1, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status)
        return (pid, code if code >= 0 else 128 - code) if pid else None
    info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if info is None:
        return None
    return info.si_pid, info.si_status + (0 if info.si_code == os.CLD_EXITED else 128)


def write_atomically(path: str, data: bytes, *, sync: bool = True) -> None:
    """The file is there whole or not at all; with `sync` also after a power cut."""
    draft = f"{path}.draft"
    with open(draft, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(data)
        file.flush()
        if sync:
            os.fsync(file.fileno())
    os.replace(draft, path)
    if sync:
        sync_folder(os.path.dirname(path))


def sync_folder(path: str) -> None:
    """Names made in it last."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _spawn(order: Order, rank: Rank) -> int:
    """The process id of a new rank. Raises OSError when there is no room for it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    log = os.open(rank["log"], flags, 0o600)
    try:
        if order["user"] is not None:  # so that /dev/stderr can be opened by its name
            os.fchown(log, order["user"]["uid"], order["user"]["gid"])
        keeper = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become(order, rank, log, keeper)
    finally:
        os.close(log)
    return pid


def _become(order: Order, rank: Rank, log: int, keeper: int) -> None:
    """The child's part. Does not return; a failure is told in the rank's log, as a shell would."""
    code = CANNOT_RUN
    doing = "cannot prepare its process"
    try:
        signal.set_wakeup_fd(-1)
        for number in (*_ASKS, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if rank["cores"] and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, rank["cores"])
        if (user := order["user"]) is not None:
            os.setgroups(user["groups"])
            os.setgid(user["gid"])
            os.setuid(user["uid"])
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # last: a change of user takes it back
        if os.getppid() != keeper:
            os._exit(code)
        doing = f"cannot enter the folder {order['workdir']!r}"
        os.chdir(order["workdir"])
        doing = f"cannot run {order['command'][0]!r}"
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ASKS)
        os.execvpe(order["command"][0], order["command"], rank["environment"])  # noqa: S606
    except (OSError, ValueError) as error:  # ValueError: a NUL in an argument
        what = error.strerror if isinstance(error, OSError) else str(error)
        if isinstance(error, OSError) and error.errno == errno.ENOENT:
            code = NOT_FOUND
        if isinstance(error, PermissionError) and (user := order["user"]) is not None:
            what = f"{what} (for user {user['uid']}: is a folder on the way closed to it?)"
        with contextlib.suppress(OSError):
            os.write(log, f"manyhands: {doing}: {what}\n".encode())
    finally:
        os._exit(code)


def main(folder: str, lock: int) -> None:
    """The whole life of a keeper."""
    os.set_inheritable(lock, False)  # or a rank could hold it for us
    adopt_orphans()
    path = os.path.join(folder, ORDER)
    with open(path, "rb") as file:
        order = cast("Order", json.load(file))
    os.unlink(path)  # it has the environment of the ranks
    Keeper(folder, order).run()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
