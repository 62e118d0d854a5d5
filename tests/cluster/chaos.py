"""kill -9 of anything in a real cluster, as the dice fall, while jobs are submitted and run.

    python -m tests.cluster.chaos --seconds 300 --seed 7

`up` with three hosts on loopback; jobs of one to three ranks, each of which holds a lock. What is
killed: `up` (another comes, at once or after a lease), an agent, a keeper, all processes of a host
at once. And `up` is taken down, an agent stopped for a while. Not a rank alone: that is the job's
own failure.
The dice are seeded, so a schedule can be repeated; what it meets depends on the machine.

The oracle: every submission is one job, every job SUCCEEDED once, no attempt was begun twice, no
rank ever ran twice at once, and when the cluster is down no process of it is left.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

from manyhands.cluster.agent import FIRST_WELCOME_S
from manyhands.cluster.client import Cluster
from manyhands.cluster.dial import CoordinatorUnreachable
from manyhands.cluster.environment import HOST
from manyhands.cluster.job import TERMINAL, State
from manyhands.testing.processes import is_gone
from tests.cluster.programs import HOLDS
from tests.cluster.running import WAIT_S, World

HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
HOSTFILE = "".join(f"{name} slots=2\n" for name in HOSTS)
DECK = ("up", "up late", "down", "agent", "keeper", "host", "stop", "job", "job", "job", "job")
LEASE_S = 6.0
SETTLE_S = 300.0  # for all jobs to end when nothing is killed any more
MOST_LIVE = 12
WORDS = 3000  # characters of each log, where something failed


class Chaos:
    """One cluster under random faults."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._dice = random.Random(seed)
        self.world = World(folder)
        (folder / "hosts.txt").write_text(HOSTFILE)
        self.counts: Counter[str] = Counter()
        self.jobs: dict[int, int] = {}  # number of a submission -> job
        self._deck: list[str] = []
        self._stopped: list[tuple[float, psutil.Process]] = []
        self._start(is_ready=True)

    # -- what is done to it ------------------------------------------------------------------------

    def go(self, seconds: float) -> None:
        """Play for so long, and until every card was played; then let all end, and judge."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s or not set(DECK) <= set(self.counts):
            time.sleep(self._dice.uniform(0.02, 0.6))
            self._wake(time.monotonic())
            self._play(self._deal())
        self._wake(float("inf"))
        self._settle()

    def _deal(self) -> str:
        if not self._deck:
            self._deck = self._dice.sample(DECK, len(DECK))
        return self._deck.pop()

    def _play(self, card: str) -> None:
        victims = [] if card in ("job", "up", "up late", "down") else self._victims(card)
        if card == "job":
            self._submit()
        elif card.startswith("up"):
            self._kill_up()
            if card == "up late":
                time.sleep(self._dice.uniform(0.5, 1.6) * LEASE_S)
            self._start()
        elif card == "down":
            self._take_down()
            self._start(is_ready=True)  # before, it knows no host, and takes no job
        elif not victims:
            return  # nobody is there to be met by it; there is one in the next deck
        elif card == "stop":  # sometimes past its lease
            self._signal(victims, signal.SIGSTOP)
            for process in victims:
                until_s = time.monotonic() + self._dice.uniform(0.2, 1.5) * LEASE_S
                self._stopped.append((until_s, process))
        else:
            self._signal(victims, signal.SIGKILL)
        self.counts[card] += 1

    def _victims(self, card: str) -> list[psutil.Process]:
        """In the order in which they are to be met."""
        found = self.world.processes()
        agents = [one for one in found if "agent" in command_of(one)]
        if card in ("agent", "stop"):
            return self._dice.sample(agents, min(1, len(agents)))
        # A rank that has not begun yet looks as its keeper does; a keeper is an agent's child.
        pids = {one.pid for one in agents}
        keepers = [
            one
            for one in found
            if "keeper.py" in " ".join(command_of(one)) and parent_of(one) in pids
        ]
        if card == "keeper":
            return self._dice.sample(keepers, min(1, len(keepers)))
        # Whoever could tell of it first: a host that dies says nothing.
        name = self._dice.choice(HOSTS)
        here = [one for one in agents if name in command_of(one)]
        ranks = [one for one in found if environ_of(one).get(HOST) == name]
        return here + sorted(ranks, key=lambda one: one not in keepers) if here else []

    def _signal(self, victims: list[psutil.Process], number: signal.Signals) -> None:
        for process in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _wake(self, now_s: float) -> None:
        for until_s, process in list(self._stopped):
            if now_s >= until_s:
                self._signal([process], signal.SIGCONT)
                self._stopped.remove((until_s, process))

    # -- its user ----------------------------------------------------------------------------------

    def _start(self, *, is_ready: bool = False) -> None:
        hosts = str(self.world.folder / "hosts.txt")
        options = ("--hostfile", hosts, "--lease", f"{LEASE_S:g}s")
        self.up = self.world.up(*options, ready=False)
        if is_ready or self._dice.random() < 0.5:  # else it may be met before it is ready
            self._wake(float("inf"))  # it waits for all of them
            assert self.up.process.stdout.readline(), self.up.said()

    def _kill_up(self) -> None:
        assert self.up.process.poll() is None, self.up.said()
        self.up.process.kill()
        self.up.process.wait(WAIT_S)
        self.up.close()

    def _take_down(self) -> None:
        self._wake(float("inf"))
        self._ask(lambda cluster: cluster.info())  # before, a signal ends it as any program
        assert self.up.end() == 0
        left = {one: " ".join(command_of(one)) for one in self.world.processes()}
        # An agent that was still starting when its `up` was killed, and has never been welcomed by
        # anybody, may come to work when all others have gone. It leaves by itself.
        others = [words for words in left.values() if words and " agent " not in words]
        assert not others, left
        self.counts["late"] += len(left)
        end_s = time.monotonic() + FIRST_WELCOME_S + WAIT_S
        while not all(map(is_gone, left)):
            assert time.monotonic() < end_s, left
            time.sleep(0.05)

    def _ask(self, ask):
        """Asked until it is answered: `up` may just be starting."""
        while True:
            assert self.up.process.poll() is None, self.up.said()
            try:
                with Cluster(state=self.world.state) as cluster:
                    return ask(cluster)
            except CoordinatorUnreachable:
                time.sleep(0.05)

    def _submit(self) -> None:
        number = len(self.jobs) + 1
        live = self._ask(lambda cluster: [j for j in cluster.jobs() if not j.is_over])
        if len(live) >= MOST_LIVE:
            return
        seconds = self._dice.uniform(0.0, 3.0)
        spec = {
            "gpus": self._dice.choice((1, 1, 1, 2, 3)),
            "workdir": str(self.world.folder),
            "max_restarts": 10_000,
            "grace_s": self._dice.choice((0.0, 1.0)),
        }

        def submit(cluster):
            return cluster.submit([*HOLDS, f"{seconds:.2f}"], key=f"key-{number}", **spec)

        job = self._ask(submit)
        assert self._ask(submit).id == job.id, "one key, one job"
        self.jobs[number] = job.id

    # -- the oracle --------------------------------------------------------------------------------

    def _settle(self) -> None:
        end_s = time.monotonic() + SETTLE_S
        for id in self.jobs.values():
            left_s = max(0.0, end_s - time.monotonic())
            job = self._ask(lambda cluster, id=id, left_s=left_s: cluster.wait(id, left_s))
            assert (job.state, job.exit_code) == (State.SUCCEEDED, 0), job
        stored = self._ask(lambda cluster: cluster.jobs())
        assert sorted(job.id for job in stored) == sorted(self.jobs.values())
        for job in stored:
            self._judge(job)
        folder = self.world.folder
        overlaps = folder / "overlaps"
        assert not overlaps.exists(), overlaps.read_text()
        self._take_down()

    def _judge(self, job) -> None:
        steps = self._ask(lambda cluster: cluster.history(job.id))
        assert [step.seq for step in steps] == list(range(len(steps)))
        assert [step.state for step in steps if step.state in TERMINAL] == [State.SUCCEEDED]
        for rank in range(job.spec.gpus):
            begun = (self.world.folder / f"starts-{job.id}-{rank}").read_text().split()
            assert len(set(begun)) == len(begun), f"job {job.id}, rank {rank}: {begun}"
            ended = (self.world.folder / f"ends-{job.id}-{rank}").read_text().split()
            assert str(job.attempt) in ended
            assert begun[-1] == str(job.attempt) == ended[-1]

    def close(self) -> None:
        self._wake(float("inf"))
        self.world.close()


def command_of(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def parent_of(process: psutil.Process) -> int | None:
    with contextlib.suppress(psutil.Error):
        return process.ppid()
    return None


def environ_of(process: psutil.Process) -> dict[str, str]:
    with contextlib.suppress(psutil.Error):
        return process.environ()
    return {}


def play(folder: Path, seed: int, seconds: float) -> Chaos:
    chaos = Chaos(folder, seed)
    try:
        chaos.go(seconds)
    except BaseException as error:
        error.add_note(f"python -m tests.cluster.chaos --seed {seed}; {dict(chaos.counts)}")
        for log in (folder / "up.err", *sorted((folder / "logs" / "agents").glob("*.log"))):
            error.add_note(f"{log.name}:\n{log.read_text()[-WORDS:]}")
        raise
    finally:
        chaos.close()
    return chaos


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=None)
    given = parser.parse_args()
    seed = random.randrange(1 << 31) if given.seed is None else given.seed
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # slots are shares of the CPUs
    deadline = time.monotonic() + given.seconds
    while (left_s := deadline - time.monotonic()) > 0:
        print(f"--seed {seed}", end=" ", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            chaos = play(Path(folder), seed, min(30.0, left_s))
        print(f"{len(chaos.jobs)} jobs; {dict(chaos.counts)}", flush=True)
        seed += 1


if __name__ == "__main__":
    main()
