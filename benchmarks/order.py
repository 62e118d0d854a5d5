"""What it costs to begin at any position of an epoch, and to read any line of a JSONL file.

    python benchmarks/order.py --samples 1e8 --lines 1e6 --json FILE

`resume`: a process that knows seed, epoch and position makes its first batch of 512 numbers of
samples. Ours computes them; torch's (`RandomSampler` in a `BatchSampler`, passed over up to the
position, as every loader does that has no state of its own) permutes all and counts. Ours are drawn
around the position, and the positions take turns. `Loader resume`: a Loader is made, its state
loaded, and the first batch read. `jsonl`: the
index of a file of so many lines is made, found again by another table, and used for one line at a
time, at random. `extra_peak_bytes` is the most memory of
the process above what it had before.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from guardian import guarded
from harness import forget_peaks, machine, memory_of, quantile

BATCH = 512
SEED = 3
PARTS = (0.0, 0.5, 0.999)  # of an epoch that are behind


def ours(samples: int, position: int) -> list[int]:
    from manyhands.data.order import Order

    return Order(samples, seed=SEED, epoch=1).indices(position, position + BATCH).tolist()


def mixed(samples: int, position: int) -> list[int]:
    """Two tables of half as many samples, nine to one."""
    from manyhands.data.mixture import Mixture

    mixture = Mixture([range(samples // 2), range(samples // 2)], [0.9, 0.1], seed=SEED)
    return [mixture[p] for p in range(position, position + BATCH)]


def torchs(samples: int, position: int) -> list[int]:
    import torch
    from torch.utils.data import BatchSampler, RandomSampler

    generator = torch.Generator().manual_seed(SEED)
    sampler = BatchSampler(RandomSampler(range(samples), generator=generator), BATCH, False)
    return next(itertools.islice(sampler, position // BATCH, None))


def measured(work: Callable[[], object], turns: int) -> dict:
    """Time of a turn, and the most memory above what there was."""
    work()  # what is loaded and allocated once
    mine = os.getpid()
    forget_peaks([mine])
    before = memory_of(mine, "VmRSS")
    times: list[float] = []
    cpu_s = time.process_time()
    for _ in range(turns):
        start_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - start_s)
    times.sort()
    return {
        "median_s": statistics.median(times),
        "p10_s": quantile(times, 0.1),
        "p90_s": quantile(times, 0.9),
        "cpu_s": (time.process_time() - cpu_s) / turns,
        "extra_peak_bytes": max(0, memory_of(mine, "VmHWM") - before),
        "turns": turns,
    }


def resumed(samples: int, position: int) -> object:
    """A Loader loads a state and reads its first batch, of a table whose samples are numbers."""
    from manyhands.data.loader import Loader

    with Loader(range(samples), BATCH, seed=SEED, collate=list) as loader:
        state = loader.state_dict()
        loader.load_state_dict({**state, "epoch": 1, "consumed": position})
        return next(iter(loader))


def around(part: float, size: int, dice: random.Random) -> int:
    """A position near this part of an epoch: within a hundredth of it, at the first of a batch."""
    room = size // 100
    place = int(part * size) + dice.randint(-room, room)
    return min(max(0, place), size - BATCH) // BATCH * BATCH


def resumes(samples: int, torch_samples: int, turns: int) -> Iterator[dict]:
    """Positions take turns, several around each part: a machine that slows down slows all alike."""
    dice = random.Random(SEED)
    for what, name, make, size, number in (
        ("resume", "manyhands", ours, samples, turns),
        ("resume", "manyhands mixture", mixed, samples, turns),
        ("resume", "torch", torchs, torch_samples, 1),
        ("Loader resume", "manyhands", resumed, samples, turns),
    ):
        rows: list[dict] = []
        for part in PARTS:  # memory first, of one position after another
            position = int(part * size) // BATCH * BATCH
            work = lambda make=make, size=size, at=position: make(size, at)  # noqa: E731
            row = {"what": what, "order": name, "samples": size, "position": position}
            rows.append({**row, **measured(work, 1)})
        if number > 1:
            taken: list[list[tuple[float, float]]] = [[] for _ in PARTS]
            for _ in range(number):
                for part, times in zip(PARTS, taken, strict=True):
                    at = around(part, size, dice)
                    start_s, cpu_s = time.perf_counter(), time.process_time()
                    make(size, at)
                    times.append((time.perf_counter() - start_s, time.process_time() - cpu_s))
            for row, times in zip(rows, taken, strict=True):
                walls = sorted(wall for wall, _ in times)
                row["median_s"] = statistics.median(walls)
                row["p10_s"], row["p90_s"] = quantile(walls, 0.1), quantile(walls, 0.9)
                row["cpu_s"], row["turns"] = sum(cpu for _, cpu in times) / number, number
        yield from rows


def lines(number: int, turns: int) -> Iterator[dict]:
    from manyhands.data.jsonl import JsonlTable

    dice = random.Random(SEED)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lines.jsonl"
        with path.open("w") as file:
            for i in range(number):
                file.write(f'{{"id": {i}, "text": "{"x" * (i % 61)}"}}\n')
        row = {"samples": number, "file_bytes": path.stat().st_size}
        index = path.with_name(path.name + ".mhindex")

        def build() -> None:
            index.unlink(missing_ok=True)
            JsonlTable(path)

        yield {"what": "jsonl index made", **row, **measured(build, max(1, turns // 20))}
        yield {"what": "jsonl index found", **row, **measured(lambda: JsonlTable(path), turns)}
        table = JsonlTable(path)
        place = iter(lambda: dice.randrange(number), -1)
        for what, choose in (
            ("jsonl line at random", lambda: table[next(place)]),
            ("jsonl first line", lambda: table[0]),
            ("jsonl last line", lambda: table[number - 1]),
        ):
            yield {"what": what, **row, **measured(choose, 20 * turns)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=float, default=1e8)
    parser.add_argument("--torch-samples", type=float, default=1e7, help="1e8 take it gigabytes")
    parser.add_argument("--lines", type=float, default=1e6)
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="see that it works")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()
    sizes = [int(options.samples), int(options.torch_samples), int(options.lines)]
    turns = options.turns
    if options.quick:
        sizes, turns = [sizes[0], 100_000, 1000], 3
    rows = []
    for row in itertools.chain(resumes(sizes[0], sizes[1], turns), lines(sizes[2], turns)):
        rows.append(row)
        name = " ".join(str(row[k]) for k in ("what", "order", "samples", "position") if k in row)
        memory = row["extra_peak_bytes"] / 1e6
        print(f"{name:60} {row['median_s'] * 1e3:12.3f} ms {memory:9.1f} MB", flush=True)
    if options.json:
        result = {"bench": "order", "machine": machine(), "rows": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    with guarded():
        main()
