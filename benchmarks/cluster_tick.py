"""What one tick of the cluster's scheduler costs.

    python benchmarks/cluster_tick.py --hosts 100,1000 --jobs 10000

Hosts of 8 slots, all full or nearly so, and a line of waiting jobs behind them. Five moments:
`empty`, the first tick, which fills everything; `full`, nothing can be done; `gaps`, one job in
eight has ended, behind a head that wants all slots, so that everybody is a candidate for backfill;
`rush`, as many high jobs as there are hosts arrive at once and preempt; `small`, every slot but
one has a job of its own, behind such a head. And the whole tick of a coordinator's book, of which
a decision is a part, in two of them: `book, empty` and `book, full`; what it costs beside that is
the transaction. One row each, as JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec

from manyhands.cluster.book import Book
from manyhands.cluster.job import Job, Priority, Spec
from manyhands.cluster.messages import Hello, Kind, Slot, Status
from manyhands.cluster.schedule import Entry, Host, decide

SLOTS = 8
SEED = 7


def waiting(num_jobs: int, draw: random.Random, first: int = 1) -> list[Entry]:
    """Jobs of one to 64 slots, half of them with a limit."""
    priorities = draw.choices((Priority.NORMAL, Priority.BEST_EFFORT), (1, 3), k=num_jobs)
    return [
        Entry(
            id=first + at,
            slots=draw.choice([1, 1, 1, 2, 2, 4, 8, 8, 16, 64]),
            priority=priority,
            queued_s=float(at),
            limit_s=draw.choice([None, 600.0 * draw.randint(1, 100)]),
            grace_s=30.0,
        )
        for at, priority in enumerate(priorities)
    ]


def begun(entries: Sequence[Entry], hosts: Sequence[Host], now_s: float) -> list[Entry]:
    """The same jobs after one tick, those that it placed started."""
    placed = dict(decide(now_s, hosts, entries).place)
    return [
        msgspec.structs.replace(one, places=placed[one.id], started_s=now_s)
        if one.id in placed
        else one
        for one in entries
    ]


def moments(num_hosts: int, num_jobs: int) -> Iterator[tuple[str, list[Host], list[Entry]]]:
    """What the scheduler is asked, and what the case is called."""
    draw = random.Random(SEED)
    hosts = [Host(f"host-{at:05}", tuple(range(SLOTS))) for at in range(num_hosts)]
    entries = waiting(num_jobs, draw)
    yield "empty", hosts, entries
    full = begun(begun(entries, hosts, 0.0), hosts, 1.0)
    yield "full", hosts, full
    running = [one for one in full if one.places]
    ended = {one.id for one in draw.sample(running, len(running) // 8)}
    head = Entry(0, num_hosts * SLOTS, Priority.NORMAL, -1.0, None, 30.0)
    yield "gaps", hosts, [head, *(one for one in full if one.id not in ended)]
    rush = [
        Entry(num_jobs + 1 + at, draw.randint(1, 4), Priority.HIGH, 1e6, None, 30.0)
        for at in range(num_hosts)
    ]
    yield "rush", hosts, [*full, *rush]
    small = begun([msgspec.structs.replace(one, slots=1) for one in entries], hosts, 0.0)
    ended = next(one.id for one in small if one.places)
    yield "small", hosts, [head, *(one for one in small if one.id != ended)]


def book_of(num_hosts: int, num_jobs: int) -> Book:
    """The book of a coordinator that all hosts have reported to, and no job was placed by."""
    jobs = [
        Job(
            id=one.id,
            spec=Spec(
                command=("python", "train.py"),
                gpus=one.slots,
                priority=one.priority,
                time_s=one.limit_s,
                grace_s=one.grace_s,
            ),
            submitted_s=one.queued_s,
        )
        for one in waiting(num_jobs, random.Random(SEED))
    ]
    book = Book(decide, now_s=0.0, lease_s=3600.0, margin_s=60.0, jobs=jobs, next_id=num_jobs + 1)
    slots = tuple(Slot(at, Kind.CPU, f"{at}") for at in range(SLOTS))
    for at in range(num_hosts):
        name = f"host-{at:05}"
        come = Hello(version="0", host=name, agent="agent", address=name, slots=slots, pid=1)
        book.hello(come, 0.0)
        book.status(name, Status(agent="agent"), 0.0)
        book.host(name, "agent", 0.0)
    book.keep()
    book.refresh()
    return book


def turn(book: Book) -> None:
    """All that a coordinator does for one tick, but for the transaction."""
    book.tick(1.0)
    book.drain()
    book.keep()
    book.refresh()


def timed(make: Callable[[], Callable[[], object]], turns: int) -> dict[str, float]:
    """How long what `make` gives takes; `make` itself is not counted."""
    times: list[float] = []
    cpu_s = 0.0
    for _ in range(turns):
        work = make()
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        work()
        times.append(time.perf_counter() - start_s)
        cpu_s += time.process_time() - start_cpu_s
    return {
        "median_s": statistics.median(times),
        "p10_s": sorted(times)[len(times) // 10],
        "p90_s": sorted(times)[len(times) * 9 // 10],
        "cpu_s": cpu_s / turns,
        "turns": turns,
    }


def measured(num_hosts: int, num_jobs: int, turns: int) -> Iterator[dict]:
    """A row for each moment; those of the whole book, not of a decision alone, are called so."""
    for name, hosts, entries in moments(num_hosts, num_jobs):
        decisions = decide(2.0, hosts, entries)
        yield {
            "moment": name,
            "hosts": num_hosts,
            "slots": num_hosts * SLOTS,
            "jobs": len(entries),
            "waiting": sum(not one.places for one in entries),
            "placed": len(decisions.place),
            "preempted": len(decisions.preempt),
            **timed(lambda h=hosts, e=entries: lambda: decide(2.0, h, e), turns),
        }
    full = book_of(num_hosts, num_jobs)
    for name, make in (
        ("book, empty", lambda: partial(turn, book_of(num_hosts, num_jobs))),
        ("book, full", lambda: partial(turn, full)),
    ):
        placed = len(full.placed)
        turn(full)
        yield {
            "moment": name,
            "hosts": num_hosts,
            "slots": num_hosts * SLOTS,
            "jobs": num_jobs,
            "waiting": num_jobs - placed,
            "placed": len(full.placed) - placed,
            "preempted": 0,
            **timed(make, turns),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description="One tick of the cluster's scheduler.")
    parser.add_argument("--hosts", default="100,1000", help="numbers of hosts (of 8 slots)")
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=15)
    options = parser.parse_args()
    for num_hosts in map(int, options.hosts.split(",")):
        for row in measured(num_hosts, options.jobs, options.turns):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
