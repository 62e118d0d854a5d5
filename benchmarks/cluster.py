"""The cluster, from a user's side: how soon a job trains, how many can be submitted, read, kept.

    python benchmarks/cluster.py [--ray PYTHON] [--quick] --json FILE

`start`: from the call of submit to the first line of a Python program without torch (`hello`), and
to the end of a first training step with it (`step`); by the Python client, and by the command
line. `submit`: jobs a second while all slots are taken, by one client and by several at once; each
is on disk when it is answered. `logs`: from submit to the last byte of what a job writes as fast
as it can, followed by the client. `recovery`: from the start of a coordinator, after kill -9 of the
one before it, until it has its jobs, its host is back and the job that ran runs. `tick`: one
decision of the scheduler. Ray, where a Python that has `ray[default]` is named, does the same
through `ray job submit` and its JobSubmissionClient, in turns with ours. What it does not offer
(jobs that survive their head without another data base) has no row.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from cluster_tick import measured
from guardian import guarded
from harness import Worker, machine, quantile

from manyhands.cluster.client import Cluster
from manyhands.cluster.job import State
from manyhands.testing.processes import end_tree

SLOTS = 2
UP_S = 90.0
LOG_LINE = "a line of a log as training programs write it, some eighty characters a line\n"

HELLO = "import sys, time, pathlib; pathlib.Path(sys.argv[1]).write_text(repr(time.time()))"
STEP = """
import sys, time, pathlib, torch
model = torch.nn.Linear(64, 10)
loss = torch.nn.functional.cross_entropy(model(torch.randn(32, 64)), torch.randint(10, (32,)))
loss.backward()
torch.optim.SGD(model.parameters(), lr=0.1).step()
pathlib.Path(sys.argv[1]).write_text(repr(time.time()))
"""
WRITE = "import sys; [sys.stdout.write(sys.argv[1] * 1000) for _ in range(int(sys.argv[2]))]"


class Up:
    """A cluster of its own in `folder`; may be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.process: subprocess.Popen[bytes] | None = None
        with socket.create_server(("127.0.0.1", 0)) as probe:  # the same in all its lives
            self.port = probe.getsockname()[1]

    def start(self) -> None:
        command = ["up", "--bind", f"127.0.0.1:{self.port}", "--state", str(self.state)]
        command += ["--logdir", str(self._folder / "logs"), "--slots", str(SLOTS), "--json"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "manyhands", *command],
            stdout=subprocess.PIPE,
            stderr=(self._folder / "up.log").open("ab"),
            start_new_session=True,
        )

    @property
    def state(self) -> Path:
        return self._folder / "state"

    def await_ready(self) -> None:
        assert self.process is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError((self._folder / "up.log").read_text())

    def client(self) -> Cluster:
        return Cluster(f"127.0.0.1:{self.port}", state=self.state)

    def kill(self) -> None:
        """As a crash: nothing that it started is told."""
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(UP_S)
            except subprocess.TimeoutExpired:
                end_tree(self.process, patience_s=0.0)
            self.process.stdout.close()


@contextlib.contextmanager
def cluster(folder: Path):
    up = Up(folder)
    up.start()
    try:
        up.await_ready()
        yield up
    finally:
        up.stop()


def await_file(path: Path) -> float:
    """What the job wrote into it: when it was so far."""
    deadline = time.monotonic() + UP_S
    while not (path.exists() and path.stat().st_size):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no word of the job within {UP_S:g} s")
        time.sleep(0.005)
    return float(path.read_text())


class Marks:
    """Files that jobs write their time into, one a job."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    def next(self) -> Path:
        self._count += 1
        return self._folder / f"mark-{self._count}"


def start_rows(up: Up, ray: Worker | None, ray_cli: str | None, folder: Path, turns: int):
    marks, taken = Marks(folder), {}
    for _ in range(turns):
        for what, code in (("hello", HELLO), ("step", STEP)):
            for system, by, one in starters(up, ray, ray_cli):
                mark = marks.next()
                began_s = time.time()
                one([sys.executable, "-c", code, str(mark)])
                taken.setdefault((what, system, by), []).append(await_file(mark) - began_s)
    for (what, system, by), values in taken.items():
        yield row("start", system, values, job=what, by=by)


def starters(up: Up, ray: Worker | None, ray_cli: str | None):
    def ours(command: list[str]) -> None:
        with up.client() as client:
            client.wait(client.submit(command, workdir="/tmp").id)

    def ours_typed(command: list[str]) -> None:
        at = ["--coordinator", f"127.0.0.1:{up.port}", "--state", str(up.state)]
        manyhands = [sys.executable, "-m", "manyhands", "submit", *at, "--wait", "--"]
        subprocess.run([*manyhands, *command], check=True, capture_output=True)

    def theirs(command: list[str]) -> None:
        ray.say(do="submit", command=command)
        ray.say(do="wait", id=ray.hear()["ids"][0])
        ray.hear()

    def theirs_typed(command: list[str]) -> None:
        typed = [ray_cli, "job", "submit", "--address", ray.address, "--", *command]
        subprocess.run(typed, check=True, capture_output=True)

    yield "manyhands", "client", ours
    yield "manyhands", "command", ours_typed
    if ray is not None:
        yield "ray", "client", theirs
        yield "ray", "command", theirs_typed


def submit_rows(up: Up, ray: Worker | None, count: int):
    with up.client() as client:
        full = client.submit(["sleep", "600"], gpus=SLOTS, workdir="/tmp", grace_s=1.0)
        while client.job(full.id).state is not State.RUNNING:
            time.sleep(0.02)
        for num_clients in (1, 8):
            values = [submissions(up, num_clients, count) for _ in range(3)]
            yield row("submit", "manyhands", values, clients=num_clients, count=count)
        for job in client.jobs(limit=100_000):
            client.cancel(job.id)
        client.wait(full.id)
    if ray is not None:
        # Each of its submissions starts a process at once: a few, and of nothing to do.
        few = max(2, count // 50)
        values = []
        for _ in range(3):
            ray.say(do="rate", command=["true"], count=few)
            values.append(ray.hear(limit_s=600)["took_s"] / few)
        yield row("submit", "ray", values, clients=1, count=few)


def submissions(up: Up, num_clients: int, count: int) -> float:
    """Seconds for one of them."""

    def some() -> None:
        with up.client() as client:
            for _ in range(count // num_clients):
                client.submit(["true"], workdir="/tmp")

    threads = [threading.Thread(target=some) for _ in range(num_clients)]
    began_s = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (time.monotonic() - began_s) / (count // num_clients * num_clients)


def log_rows(up: Up, ray: Worker | None, mbytes: int, turns: int):
    pieces = mbytes * 1_000_000 // (1000 * len(LOG_LINE))
    command = [sys.executable, "-c", WRITE, LOG_LINE, str(pieces)]
    size = pieces * 1000 * len(LOG_LINE)
    taken = {"manyhands": [], "ray": []}
    whole = {"manyhands": True, "ray": True}
    for _ in range(turns):
        with up.client() as client:
            began_s = time.monotonic()
            job = client.submit(command, workdir="/tmp")
            told = sum(len(piece) for piece in client.logs(job.id, follow=True))
            taken["manyhands"].append(time.monotonic() - began_s)
            whole["manyhands"] &= told == size
        if ray is not None:
            ray.say(do="logs", command=command)
            said = ray.hear(limit_s=600)
            taken["ray"].append(said["took_s"])
            whole["ray"] &= said["bytes"] >= size  # it adds lines of its own
    for system, values in taken.items():
        if values:
            rate = size / 1e6 / statistics.median(values)
            yield row(
                "logs", system, values, mbytes=size / 1e6, mb_per_s=rate, complete=whole[system]
            )


def recovery_rows(up: Up, num_jobs: int, turns: int):
    values = []
    with up.client() as client:
        running = client.submit(["sleep", "600"], gpus=SLOTS, workdir="/tmp", grace_s=1.0)
        while client.job(running.id).state is not State.RUNNING:
            time.sleep(0.02)
        for _ in range(num_jobs):
            client.submit(["true"], workdir="/tmp")
    same = True
    for _ in range(turns):
        up.kill()
        began_s = time.monotonic()
        up.start()
        up.await_ready()
        with up.client() as client:
            while not all(node.state == "here" for node in client.nodes()):
                time.sleep(0.01)
            job = client.job(running.id)
            values.append(time.monotonic() - began_s)
            waiting = client.jobs(state=State.PENDING, limit=100_000)
            same &= job.state is State.RUNNING and job.attempt == 0 and len(waiting) == num_jobs
    with up.client() as client:
        for job in client.jobs(limit=100_000):
            client.cancel(job.id)
        client.wait(running.id)
    yield row("recovery", "manyhands", values, jobs=num_jobs, nothing_lost=same)


def row(what: str, system: str, values: list[float], **facts: object) -> dict:
    values = sorted(values)
    made = {
        "what": what,
        "system": system,
        **facts,
        "median_s": statistics.median(values),
        "p10_s": quantile(values, 0.1),
        "p90_s": quantile(values, 0.9),
        "turns": len(values),
    }
    print(json.dumps(made), flush=True)
    return made


def add_ratios(rows: list[dict]) -> None:
    """How many times as long Ray takes for the same."""
    keys = ("what", "job", "by", "clients")
    theirs = {tuple(r.get(k) for k in keys): r["median_s"] for r in rows if r["system"] == "ray"}
    for one in rows:
        same = theirs.get(tuple(one.get(key) for key in keys))
        if one["system"] == "manyhands" and same is not None:
            one["ray_to_ours"] = same / one["median_s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ray", metavar="PYTHON", help="one that has ray[default]")
    parser.add_argument("--quick", action="store_true", help="whether it works, not how fast")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    turns, count, mbytes, jobs = (1, 16, 1, 20) if options.quick else (7, 1000, 64, 1000)
    rows, told = [], {}
    with guarded(), tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder = Path(temporary)
        up = stack.enter_context(cluster(folder))
        ray, ray_cli = None, None
        if options.ray:
            ray_folder = folder / "ray"
            ray_folder.mkdir()
            script = str(Path(__file__).with_name("ray_jobs.py"))
            ray = stack.enter_context(Worker(script, ray_folder, SLOTS, python=options.ray))
            told = ray.hear(limit_s=UP_S)
            ray.address = told["address"]
            ray_cli = str(Path(options.ray).with_name("ray"))
        else:
            print("ray is left out: --ray PYTHON names one that has ray[default]", file=sys.stderr)
        rows += start_rows(up, ray, ray_cli, folder, turns)
        rows += log_rows(up, ray, mbytes, turns)
        rows += submit_rows(up, ray, count)
        if ray is not None:
            ray.close()  # it keeps a core busy
        rows += recovery_rows(up, jobs, 2 if options.quick else 5)
    for hosts in (10,) if options.quick else (100, 1000):
        for one in measured(hosts, 100 if options.quick else 10_000, turns):
            rows.append({"what": "tick", "system": "manyhands", **one})
            print(json.dumps(rows[-1]), flush=True)
    add_ratios(rows)
    made = {"bench": "cluster", "machine": machine() | {"ray": told.get("version")}, "rows": rows}
    options.json.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    os.umask(0o077)
    main()
