"""What must hold in the model world, whatever happens: see world.py."""

from __future__ import annotations

from collections import Counter

from manyhands.cluster.book import Book
from manyhands.cluster.job import NEXT, TERMINAL, Job, State, Step


class Violation(AssertionError):
    """Something that must never be."""


class Rules:
    """Compares what the coordinator has stored with what is true."""

    jobs: dict[int, Job]
    steps: dict[int, list[Step]]
    running: dict[tuple[str, int], tuple[int, int, int]]
    started: Counter[tuple[int, int, int]]
    ended: dict[tuple[int, int, int], tuple[int, bool]]
    seen: Counter
    book: Book

    def keep_step(self, step):
        before = self.steps.setdefault(step.job, [])
        if not step.reason:
            raise Violation(f"a step without a reason: {step}")
        if not before:
            if step.seq != 0 or step.state is not State.PENDING:
                raise Violation(f"a history that begins with {step}")
        else:
            last = before[-1]
            if step.seq != last.seq + 1 or step.at_s < last.at_s:
                raise Violation(f"{step} after {last}")
            if step.state is not last.state and step.state not in NEXT[last.state]:
                raise Violation(f"{step} after {last}")
        before.append(step)
        self.seen[step.state] += 1

    def check(self):
        if self.book.poisoned:
            raise Violation(f"a bug of ours: {self.book.poisoned}")
        twice = [key for key, count in self.started.items() if count > 1]
        if twice:
            raise Violation(f"begun twice: {twice}")
        attempts = {}
        for job, attempt, _ in self.running.values():
            if attempts.setdefault(job, attempt) != attempt:
                raise Violation(f"job {job} runs twice at once")
            stored = self.jobs[job]
            if stored.state not in (State.STARTING, State.RUNNING) or stored.attempt != attempt:
                raise Violation(f"attempt {attempt} of {stored} still runs")
        busy = Counter(
            (place.host, slot)
            for job in self.jobs.values()
            if not job.is_over
            for place in job.places
            for slot in place.slots
        )
        if any(count > 1 for count in busy.values()):
            raise Violation(f"slots given twice: {busy}")
        for job in self.jobs.values():
            self.check_job(job)

    def check_job(self, job):
        if job.seq != self.steps[job.id][-1].seq or job.state is not self.steps[job.id][-1].state:
            raise Violation(f"{job} is not what its history says")
        if job.state in TERMINAL and (job.ended_s is None or job.exit_code is None or job.ending):
            raise Violation(f"{job} is over, and lacks its end")
        if job.state is State.PENDING and (job.places or job.ending):
            raise Violation(f"{job} waits, and has slots")
        ends = {r: self.ended.get((job.id, job.attempt, r)) for r in range(job.spec.gpus)}
        if job.state is State.SUCCEEDED and any(end != (0, False) for end in ends.values()):
            raise Violation(f"{job} succeeded, and its ranks ended so: {ends}")
        if job.is_over and job.failure is not None and job.state is State.FAILED:
            end = ends[job.failure.rank]
            if end is None or end[0] != job.failure.exit_code or job.exit_code != end[0]:
                raise Violation(f"{job} failed, and its rank ended so: {end}")
