"""A book, a clock, and what is on disk, for tests that tell a story."""

from __future__ import annotations

from manyhands.cluster.book import Book
from manyhands.cluster.job import Failure, Spec, State
from manyhands.cluster.messages import Holding, Phase, RankEnd, Status
from tests.cluster.model import LEASE_S, MARGIN_S, first_come, hello

PATIENCE_S = LEASE_S + MARGIN_S


class Story:
    """A book, a clock, and what is on disk, for tests that tell a story."""

    def __init__(self, *hosts, decide=first_come, **arguments):
        self.now_s = 100.0
        self.states = []
        self.reasons = []
        self.over = {}
        self.rows = {}
        self.book = Book(decide, now_s=self.now_s, lease_s=LEASE_S, margin_s=MARGIN_S, **arguments)
        for name, slots in hosts:
            self.book.hello(hello(name, slots=slots), self.now_s)
            self.status(name)

    def keep(self):
        changes = self.book.drain()
        self.states += [step.state for step in changes.steps]
        self.reasons += [step.reason for step in changes.steps]
        self.over.update({job.id: job for job in changes.jobs})
        self.rows.update({row.hello.host: row for row in changes.hosts})
        self.book.keep()
        return self.book.refresh()

    def again(self, lease_s=LEASE_S, decide=first_come, **arguments):
        """The coordinator is restarted, perhaps with another lease."""
        self.keep()
        self.book = Book(
            decide,
            now_s=self.now_s,
            lease_s=lease_s,
            margin_s=MARGIN_S,
            jobs=[job for job in self.over.values() if not job.is_over],
            hosts=list(self.rows.values()),
            next_id=max(self.over) + 1,
            version=10**9,
            **arguments,
        )
        self.keep()

    def submit(self, gpus=1, key="", **spec):
        made, _ = self.book.submit(Spec(command=("run",), gpus=gpus, **spec), key, self.now_s)
        self.keep()
        return made.id

    def tick(self, after_s=0.0):
        self.now_s += after_s
        self.book.tick(self.now_s)
        self.keep()

    def status(self, host, *holdings, agent="agent-1"):
        self.book.status(host, Status(agent=agent, holdings=holdings), self.now_s)
        self.keep()

    def wants(self, host, agent="agent-1"):
        self.book.host(host, agent, self.now_s)
        return self.book.tell(host)

    def job(self, id=1):
        return self.book.job(id) or self.over[id]

    def cancel(self, id=1):
        made = self.book.cancel(id, self.now_s)
        self.keep()
        return made

    def run(self, *hosts, id=1):
        """Bring a job that was submitted to RUNNING."""
        self.tick()
        for host in hosts:
            self.wants(host)
        for host in hosts:
            self.status(host, held(id, self.job(id).attempt, Phase.READY, port=5000))
        for host in hosts:
            self.status(host, held(id, self.job(id).attempt, Phase.RUNNING, port=5000))
        assert self.job(id).state is State.RUNNING
        return self


def held(job=1, attempt=0, phase=Phase.RUNNING, *, port=0, exits=(), **more):
    ended = tuple(
        RankEnd(rank=rank, exit_code=code, at_s=10.0 + at) for at, (rank, code) in enumerate(exits)
    )
    return Holding(job=job, attempt=attempt, phase=phase, port=port, ended=ended, **more)


def failed(rank, code=1, host="?"):
    return Failure(rank=rank, host=host, exit_code=code, words="Traceback")


def ended(exits, **more):
    return held(phase=Phase.ENDED, exits=exits, **more)


def a_pair():
    """A job of three ranks that runs on hosts a (two slots) and b (one)."""
    story = Story(("a", 2), ("b", 1), hub=lambda job, k: ("code", f"job-{job}-{k}"))
    story.submit(3, max_restarts=1)
    return story.run("a", "b")
