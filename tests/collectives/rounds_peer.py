"""Peers in processes of their own, that a test can kill, stop and continue at a chosen point.

`python -m tests.collectives.rounds_peer` loads torch once and forks for each line on its stdin, so
that a peer costs milliseconds. A child connects to the socket that its orders name, says what
happens to it as one JSON object a line, and takes the words "go", "hurry", "leave" and "die".

Its orders may name *points*, at which it dies by SIGKILL, or says so, or also waits for "go":
    {"what": "task" | "commit", "round": r}          in the user's thread
    {"what": "Part" | "Sum" | "Status" | "Fill", "round": r, "count": n}
                                                     when n such messages are at the meeting point
    "count": "any"                                   ... each of them
    "exact": true                                    ... of a re-sync
    "applied": r                                     ... of a state after so many rounds, or more
    "before": true                                   ... just before the n-th is sent
    "then": "die" | "say" | "wait"

With a "program", a module with `play(child)`, it is that which runs instead of a `Taker`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATIENCE_S = 30.0
LOADING_S = 100.0  # for torch and its compiler, where others work too


# -- the test's side ------------------------------------------------------------------------------


class Zygote:
    """Starts peers. One for many tests."""

    def __init__(self, *preload: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.collectives.rounds_peer", *preload],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self._pids: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._status: dict[int, int] = {}
        self._reader = threading.Thread(target=self._read, name="zygote", daemon=True)
        self._reader.start()
        assert self._pids.get(timeout=LOADING_S) == self._process.pid

    def fork(self, orders: dict) -> int:
        self._process.stdin.write(json.dumps(orders).encode() + b"\n")
        self._process.stdin.flush()
        return self._pids.get(timeout=PATIENCE_S)

    def status(self, pid: int, timeout_s: float) -> int | None:
        """How it has ended; None if it has not within that time."""
        with self._changed:
            self._changed.wait_for(lambda: pid in self._status, timeout_s)
            return self._status.get(pid)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)
        self._reader.join()
        self._process.stdout.close()

    def _read(self) -> None:
        for line in self._process.stdout:
            said = json.loads(line)
            if "status" in said:
                with self._changed:
                    self._status[said["pid"]] = said["status"]
                    self._changed.notify_all()
            else:
                with self._changed:
                    # Numbers come round again in a long session: this one is of a new process.
                    self._status.pop(said["pid"], None)
                self._pids.put(said["pid"])


class PeerProcess:
    """One peer. `history` is all that it has said."""

    def __init__(self, zygote: Zygote, name: str, **orders) -> None:
        from tests.collectives.rounds_kit import History

        self.name, self._zygote = name, zygote
        self.history = History(name)
        self.said: list[dict] = []
        self._changed = threading.Condition()
        self.ended = False
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
            path = f"{folder}/s"
            self._log = tempfile.TemporaryFile()  # noqa: SIM115
            listener.bind(path)
            listener.listen()
            listener.settimeout(PATIENCE_S)
            log = f"/proc/{os.getpid()}/fd/{self._log.fileno()}"
            self.pid = zygote.fork({"socket": path, "log": log, "name": name, **orders})
            self._line, _ = listener.accept()
        self._reader = threading.Thread(target=self._read, name=f"peer {name}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with self._line.makefile("r") as lines:
            try:
                for line in lines:
                    with self._changed:
                        said = json.loads(line)
                        self.said.append(said)
                        self.history.take(said)
                        self._changed.notify_all()
            except (ConnectionError, json.JSONDecodeError):
                pass  # it was killed in the middle of a word
        with self._changed:
            self.ended = True
            self._changed.notify_all()

    def until(self, wanted: Callable[[dict], bool], timeout_s: float = PATIENCE_S) -> dict:
        """The first thing like this that it says, or has said."""

        def find() -> dict | None:
            return next((said for said in self.said if wanted(said)), None)

        with self._changed:
            self._changed.wait_for(lambda: find() or self.ended, timeout_s)
            found = find()
        assert found is not None, self.report()
        return found

    def until_round(self, round_: int) -> None:
        self.until(lambda said: said.get("committed", -1) >= round_)

    def tell(self, word: str) -> None:
        self._line.sendall(word.encode() + b"\n")

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Until the process has ended."""
        status = self._zygote.status(self.pid, timeout_s)
        if status is None:
            os.kill(self.pid, signal.SIGUSR1)
            time.sleep(0.5)  # for the stacks; the test has failed anyway
        assert status is not None, self.report()
        self._reader.join(PATIENCE_S)
        return status

    def kill(self) -> None:
        """One that cannot end by itself meanwhile: it is to wait at a point, or to train on."""
        with suppress(ProcessLookupError):  # then its status says so
            os.kill(self.pid, signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL, f"it ended by itself: {self.report()}"

    def stop(self) -> None:
        """Suspend it; returns when all its threads stand still."""
        os.kill(self.pid, signal.SIGSTOP)
        deadline = time.monotonic() + PATIENCE_S
        while any(state_of(task) != "T" for task in Path(f"/proc/{self.pid}/task").iterdir()):
            assert time.monotonic() < deadline, self.report()
            time.sleep(0.001)  # the system tells nobody but its parent

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        if self._zygote.status(self.pid, 0) is None:
            with suppress(ProcessLookupError):  # it has just ended, and the word is on its way
                os.kill(self.pid, signal.SIGKILL)
            self._zygote.status(self.pid, PATIENCE_S)
        self._line.close()
        self._reader.join()
        self._log.close()

    def report(self) -> str:
        self._log.seek(0)
        log = self._log.read().decode(errors="replace")[-6000:]
        said = "\n".join(map(str, self.said[-12:]))
        return f"{self.name} has said:\n{said}\nand its log:\n{log}"


def state_of(task: Path) -> str:
    """What a thread does: T if it is suspended. One that has just ended does nothing more."""
    try:
        return (task / "stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "T"


# -- the child's side -----------------------------------------------------------------------------


class Trip:
    """A link that counts what is sent by it, and does something at some points."""

    def __init__(self, link, points: list[dict], reached: Callable[[dict], None]) -> None:
        self._link, self._points, self._reached = link, points, reached
        self._seen: list[dict] = []
        self._lock = threading.Lock()

    def __getattr__(self, name):
        return getattr(self._link, name)

    def send(self, to, message, buffers=(), **options) -> None:
        from manyhands.collectives import messages as m

        word = m.decode(message)
        seen = {"what": type(word).__name__, "round": getattr(word, "round", None)}
        seen |= {"exact": getattr(word, "exact", False), "applied": getattr(word, "applied", 0)}
        with self._lock:  # several threads send
            self._seen.append(seen)
            points = [point for point in self._points if self._is_at(point)]
        for point in points:
            if point.get("before"):
                self._reached(point)
        self._link.send(to, message, buffers, **options)
        for point in points:
            if not point.get("before"):
                self._link.flush(PATIENCE_S)
                self._reached(point)

    def _is_at(self, point: dict) -> bool:
        like = [
            seen
            for seen in self._seen
            if seen["what"] == point["what"]
            and point.get("round") in (None, seen["round"])
            and point.get("exact") in (None, seen["exact"])
            and seen["applied"] >= point.get("applied", 0)
        ]
        count = point.get("count", 1)
        return bool(like) and like[-1] is self._seen[-1] and count in ("any", len(like))


class Leaky:
    """A link that has a hole wherever such a message would have come."""

    def __init__(self, link, what: str) -> None:
        self._link, self._what = link, what

    def __getattr__(self, name):
        return getattr(self._link, name)

    def receive(self, *options):
        from manyhands.collectives import messages as m
        from manyhands.links.base import Delivery, Gap

        event = self._link.receive(*options)
        if isinstance(event, Delivery) and type(m.decode(event.message)).__name__ == self._what:
            return Gap()
        return event


class Child:
    """A peer's process."""

    def __init__(self, orders: dict) -> None:
        self.orders = orders
        self.line = socket.socket(socket.AF_UNIX)
        self.line.connect(orders["socket"])
        self.go = threading.Event()
        self.hurried = threading.Event()
        self.lock = threading.Lock()
        self.taker = None

    def say(self, said: dict) -> None:
        with self.lock:
            self.line.sendall(json.dumps(said).encode() + b"\n")

    def reached(self, point: dict) -> None:
        then = point.get("then", "die")
        if then == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        self.say({"at": point["what"]})
        if then == "wait":
            assert self.go.wait(4 * PATIENCE_S)
            self.go.clear()

    def pass_by(self, what: str, round_: int) -> None:
        """In the user's thread."""
        if what == "task":
            time.sleep(self.orders.get("pace_s", 0.0))  # it computes
        for point in self.orders["points"]:
            if (point["what"], point.get("round")) == (what, round_):
                self.reached(point)

    def linger(self, seconds: float) -> None:
        """So that a run goes on until what a test is about has happened; then it says "hurry"."""
        self.hurried.wait(seconds)

    def listen(self) -> None:
        with self.line.makefile("r") as lines:
            for line in lines:
                match line.strip():
                    case "go":
                        self.go.set()
                    case "hurry":
                        self.hurried.set()
                    case "leave":
                        self.taker.rounds.leave()
                    case "terminate":
                        os.kill(os.getpid(), signal.SIGTERM)
                    case "interrupt":
                        os.kill(os.getpid(), signal.SIGINT)
                    case "die":
                        os.kill(os.getpid(), signal.SIGKILL)
        os._exit(5)  # the test is gone

    def run(self) -> None:
        if "program" in self.orders:
            threading.Thread(target=self.listen, daemon=True).start()
            import_module(self.orders["program"]).play(self)
        else:
            self.take_part()
        left = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
        self.say({"threads": [name for name in left if "(listen)" not in name]})

    def take_part(self) -> None:
        import msgspec

        from manyhands.collectives.mail import Mail
        from manyhands.links.base import LinkSettings, open_link
        from manyhands.links.messages import Terms
        from tests.collectives import rounds_kit

        orders = self.orders
        terms = msgspec.convert(orders["terms"], Terms) if "terms" in orders else rounds_kit.STEADY
        mail = Mail()
        link = open_link(
            orders["url"],
            run=orders["run"],
            name=orders["name"],
            settings=LinkSettings(terms=terms, connect_s=PATIENCE_S),
            place=mail,
        )
        self.say({"incarnation": link.me.incarnation})

        self.taker = rounds_kit.Taker(
            Trip(link, orders["points"], self.reached),
            mail,
            say=self.say,
            before_task=lambda task: self.pass_by("task", task.round),
            after_commit=lambda round_: self.pass_by("commit", round_),
            **orders["taker"],
        )
        threading.Thread(target=self.listen, daemon=True).start()
        self.taker.run()
        self.taker.rounds.close()
        link.close()


def serve() -> dict | None:
    """Fork as told; returns in a child, with its orders, and at the end of stdin with None."""
    read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(write_end)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    import select

    rest = b""
    while True:
        ready, _, _ = select.select([0, read_end], [], [])
        if read_end in ready:
            os.read(read_end, 4096)
            _reap()
        if 0 in ready:
            came = os.read(0, 1 << 16)
            if not came:
                return None
            *lines, rest = (rest + came).split(b"\n")
            for line in lines:
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    os.close(read_end)
                    os.close(write_end)
                    return json.loads(line)
                _answer(pid=pid)


def _reap() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _answer(pid=pid, status=os.waitstatus_to_exitcode(status))


def _answer(**facts) -> None:
    print(json.dumps(facts), flush=True)


def main() -> None:
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    import torch

    links = ("manyhands.links.amqp", "manyhands.links.hub_link")
    for module in (*links, "tests.collectives.rounds_kit", *sys.argv[1:]):
        import_module(module)

    torch.set_num_threads(1)
    _answer(pid=os.getpid())
    orders = serve()
    if orders is None:
        return
    log = os.open(orders["log"], os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, log), (2, log)):
        os.dup2(source, target)
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    warnings.simplefilter("error")
    Child(orders).run()
    os._exit(0)  # what an interpreter does at its end takes far longer than the rounds


if __name__ == "__main__":
    main()
