"""What one tick of the cluster's scheduler costs.

    python benchmarks/cluster_tick.py --hosts 100,1000 --jobs 10000

Hosts of 8 slots, all full or nearly so, and a line of waiting jobs behind them. Five moments:
`empty`, the first tick, which fills everything; `full`, nothing can be done; `gaps`, one job in
eight has ended, behind a head that wants all slots, so that everybody is a candidate for backfill;
`rush`, as many high jobs as there are hosts arrive at once and preempt; `small`, every slot but
one has a job of its own, behind such a head. One row each, as JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence

import msgspec

from manyhands.cluster.job import Priority
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


def measured(num_hosts: int, num_jobs: int, turns: int) -> Iterator[dict]:
    """A row for each moment."""
    for name, hosts, entries in moments(num_hosts, num_jobs):
        times: list[float] = []
        decisions = decide(2.0, hosts, entries)
        cpu_s = time.process_time()
        for _ in range(turns):
            start_s = time.perf_counter()
            decide(2.0, hosts, entries)
            times.append(time.perf_counter() - start_s)
        yield {
            "moment": name,
            "hosts": num_hosts,
            "slots": num_hosts * SLOTS,
            "jobs": len(entries),
            "waiting": sum(not one.places for one in entries),
            "placed": len(decisions.place),
            "preempted": len(decisions.preempt),
            "median_s": statistics.median(times),
            "p10_s": sorted(times)[len(times) // 10],
            "p90_s": sorted(times)[len(times) * 9 // 10],
            "cpu_s": (time.process_time() - cpu_s) / turns,
            "turns": turns,
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
