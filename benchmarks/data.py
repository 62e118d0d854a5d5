"""How many images a second a Loader reads, next to torch's DataLoader with the same workers.

    python benchmarks/data.py --way direct,thread,process,torch-direct,torch --json FILE

scikit-learn's digits are written as a tree of PNG files, 8 x 8, a folder a class; everybody reads
them from there by the same table (ImageTree), in batches of `--batch`, shuffled. Ways:
    direct, thread, process   our Loader: without workers, with `--workers` threads or processes
    torch-direct, torch       torch's DataLoader without workers, with as many processes, that stay
    photos-WAY                the same of photographs (scikit-learn's, 640 x 427), 4 in a batch
Each way has a process with one torch thread, and they take turns of some epochs, so that a
disturbance of the machine meets all alike. The first one of a turn does not count: our Loader reads
ahead into the next epoch, and what it read while others had their turn was read for nothing. The
seconds of a row are of an epoch. Ratios are medians
over turns, each next to the other's of the same moment: to `torch`, or without workers to
`torch-direct`. `identical`: every epoch had each image once, with its label. `cpu_per_sample_s`: of
all its processes. Python's part of that is done by one thread at a time, and is much the same for
an image of any size; a decoder lets others run meanwhile.

Rows `overlap-thread` and `overlap-process`: one worker decodes photographs while the loop
multiplies matrices for as long as that takes. `decode_s` and `step_s` are of a batch, each alone;
`ratio_to_larger` is what a batch takes of the loop, over the larger of the two: 1.0 means that one
is hidden behind the other, 2.0 that they take turns. `wait_s`: of it, waiting for data.
With `--device cuda` that loop is on a GPU, which gets the photographs too (`device=` of the Loader,
also where decoding is timed alone), and a step ends when the GPU has.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil
from guardian import guarded
from harness import Worker, cpu_of, machine, quantile

_LOADERS = ("direct", "thread", "process", "torch-direct", "torch")
WAYS = ",".join(
    (*_LOADERS, *(f"photos-{way}" for way in _LOADERS), "overlap-thread", "overlap-process")
)
SEED = 5
PHOTOS = 24  # files of the tree of photographs
PHOTO_BATCH = 4
EPOCHS = 3  # of a turn that count
WARM_UP = 2  # batches of an overlap's turn that do not count


# -- one process ----------------------------------------------------------------------------------


def write_digits(folder: Path) -> None:
    """A folder a class, a PNG file a digit."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        target = folder / f"{label}" / f"{number}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 15).astype("uint8")).save(target)


def write_photos(folder: Path) -> None:
    from PIL import Image
    from sklearn.datasets import load_sample_images

    written = []
    for image in load_sample_images().images:
        Image.fromarray(image).save(file := io.BytesIO(), "png")  # which takes longer than to read
        written.append(file.getvalue())
    for number in range(PHOTOS):
        target = folder / f"{number % 2}" / f"{number}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(written[number % len(written)])


def loader_of(way: str, folder: str, batch: int, workers: int):
    from torch.utils.data import DataLoader

    from manyhands.data import ImageTree, Loader

    table = ImageTree(folder)
    if way == "torch":
        return DataLoader(table, batch, shuffle=True, num_workers=workers, persistent_workers=True)
    if way == "torch-direct":
        return DataLoader(table, batch, shuffle=True)
    if way == "direct":
        return Loader(table, batch, seed=SEED)
    return Loader(table, batch, seed=SEED, workers=workers, kind=way)


def read_turn(loader) -> dict:
    """Means of its epochs, one right after the other."""
    _, *counted = (read_epoch(loader) for _ in range(1 + EPOCHS))
    said = {what: statistics.mean(one[what] for one in counted) for what in ("time", "wait")}
    return {**said, "seen": [one["seen"] for one in counted]}


def read_epoch(loader) -> dict:
    """How long it took, and what of it says whether all were there."""
    before_s = getattr(loader, "wait_s", 0.0)
    began_s = time.perf_counter()
    seen, total, labelled = 0, 0, 0
    for images, labels in loader:
        seen += len(labels)
        brightness = images.sum((1, 2, 3))
        total += int(brightness.sum())
        labelled += int((brightness * (labels + 1)).sum())
    took_s = time.perf_counter() - began_s
    waited_s = getattr(loader, "wait_s", 0.0) - before_s
    return {"time": took_s, "wait": waited_s, "seen": [seen, total, labelled]}


def read_main(way: str, folder: str, batch: int, workers: int) -> None:
    import torch

    torch.set_num_threads(1)
    loader = loader_of(way.removeprefix("photos-"), folder, batch, workers)
    read_epoch(loader)  # workers start, files are in the page cache
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        print(json.dumps(read_turn(loader)), flush=True)
    if hasattr(loader, "close"):
        loader.close()


def overlap_main(way: str, folder: str, device: str) -> None:
    import torch

    from manyhands.data import ImageTree, Loader

    torch.set_num_threads(1)
    on_gpu = device != "cpu"
    table = ImageTree(folder)
    direct = Loader(table, PHOTO_BATCH, seed=SEED, device=device)
    matrix = torch.rand(*([2048 if on_gpu else 256] * 2), device=device)

    def timed(work) -> float:
        began_s = time.perf_counter()
        work()
        return time.perf_counter() - began_s

    def step(times: int) -> None:
        for _ in range(times):
            torch.mm(matrix, matrix)
        if on_gpu:
            torch.cuda.synchronize()

    def decode_s() -> float:
        return timed(lambda: [None for _ in direct]) / len(direct)

    decode_s()
    step(100)
    once_s = statistics.median(timed(lambda: step(50)) / 50 for _ in range(9))
    kind = way.removeprefix("overlap-")
    loader = Loader(table, PHOTO_BATCH, seed=SEED, workers=1, kind=kind, device=device)
    next(iter(loader))
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        alone_s = decode_s()
        times = max(1, round(alone_s / once_s))
        step_s = statistics.median(timed(lambda n=times: step(n)) for _ in range(5))
        taken: list[float] = []
        waited_s, began_s = 0.0, time.perf_counter()
        for number, _ in enumerate(loader):
            if number == WARM_UP:
                waited_s, began_s = loader.wait_s, time.perf_counter()
            step(times)
            if number > WARM_UP:
                taken.append(time.perf_counter())
        took_s = (taken[-1] - began_s) / (len(loader) - WARM_UP)
        waited_s = (loader.wait_s - waited_s) / (len(loader) - WARM_UP)
        said = {"time": took_s, "wait": waited_s, "decode": alone_s, "step": step_s}
        print(json.dumps(said), flush=True)
    loader.close()


# -- all of them ----------------------------------------------------------------------------------


def family(worker: Worker) -> list[int]:
    root = psutil.Process(worker.process.pid)
    return [root.pid, *(child.pid for child in root.children(recursive=True))]


def measure(args, ways: list[str]) -> list[dict]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_digits(folder / "digits")
        write_photos(folder / "photos")
        crew: dict[str, Worker] = {}
        for way in ways:
            data = folder / ("photos" if of_photos(way) else "digits")
            shape = (way, data, batch_of(way, args), args.workers, args.device)
            crew[way] = stack.enter_context(Worker(__file__, "--reader", *shape))
            crew[way].hear()  # one after the other: they are not to disturb each other's start
        said: dict[str, list[dict]] = {way: [] for way in ways}
        for turn in range(args.turns):
            for way in ways:
                pids = family(crew[way])
                before = cpu_of(pids)
                crew[way].say(go=True)
                answer = crew[way].hear()
                said[way].append({**answer, "cpu": cpu_of(pids) - before})
                print(f"turn {turn + 1} {way}: {1e3 * answer['time']:.1f} ms", file=sys.stderr)
    return [row_of(way, args, said[way]) for way in ways]


def of_photos(way: str) -> bool:
    return way.startswith(("photos-", "overlap-"))


def batch_of(way: str, args) -> int:
    return PHOTO_BATCH if of_photos(way) else args.batch


def row_of(way: str, args, turns: list[dict]) -> dict:
    times = sorted(turn["time"] for turn in turns)
    overlaps = way.startswith("overlap")
    row = {
        "way": way,
        "link": "none",
        "tls": False,
        "peers": 1,
        "workers": 1 if overlaps else 0 if "direct" in way else args.workers,
        "batch": batch_of(way, args),
        "turns": len(turns),
        "median_s": statistics.median(times),
        "p10_s": quantile(times, 0.1),
        "p90_s": quantile(times, 0.9),
        "cpu_s": statistics.median(turn["cpu"] for turn in turns),
        "wait_s": statistics.median(turn["wait"] for turn in turns),
        "turn_s": [turn["time"] for turn in turns],
    }
    if overlaps:
        row["device"] = args.device
        larger = [turn["time"] / max(turn["decode"], turn["step"]) for turn in turns]
        row["decode_s"] = statistics.median(turn["decode"] for turn in turns)
        row["step_s"] = statistics.median(turn["step"] for turn in turns)
        row["ratio_to_larger"] = statistics.median(larger)
        return row
    row["cpu_s"] /= 1 + EPOCHS
    row["seen"] = turns[0]["seen"][0]
    row["samples"] = row["seen"][0]
    row["samples_per_s"] = row["samples"] / row["median_s"]
    # A turn's is counted in hundredths of a second.
    cpu_s = statistics.mean(turn["cpu"] for turn in turns) / (1 + EPOCHS)
    row["cpu_per_sample_s"] = cpu_s / row["samples"]
    row["identical"] = all(seen == row["seen"] for turn in turns for seen in turn["seen"])
    return row


def add_ratios(rows: list[dict]) -> None:
    """How many times as fast, turn by turn, as torch with the same workers."""
    by_way = {row["way"]: row for row in rows}
    for row in rows:
        of = "photos-" if row["way"].startswith("photos-") else ""
        base = by_way.get(of + ("torch-direct" if "direct" in row["way"] else "torch"))
        row["ratio_to_torch"] = None
        if base is not None and "seen" in row:
            pairs = zip(base["turn_s"], row["turn_s"], strict=True)
            row["ratio_to_torch"] = statistics.median(theirs / own for theirs, own in pairs)
            row["identical"] &= row["seen"] == base["seen"]


def show(rows: list[dict]) -> None:
    for r in rows:
        line = (
            f"{r['way']:20}{r['workers']} workers {1e3 * r['median_s']:8.1f} ms "
            f"({1e3 * r['p10_s']:.1f}-{1e3 * r['p90_s']:.1f}) cpu {r['cpu_s']:.3f} s "
        )
        if "ratio_to_larger" in r:
            line += (
                f"{r['ratio_to_larger']:.2f}x the larger of decode {1e3 * r['decode_s']:.1f} ms "
                f"and step {1e3 * r['step_s']:.1f} ms, waits {1e3 * r['wait_s']:.1f} ms"
            )
        else:
            line += (
                f"({1e3 * r['cpu_per_sample_s']:.3f} ms an image) {r['samples_per_s']:.0f} images/s"
            )
            line += "" if r["ratio_to_torch"] is None else f" {r['ratio_to_torch']:.2f}x torch"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--way", default=WAYS)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--device", default="cpu", help="of the overlap rows")
    parser.add_argument("--turns", type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="few turns: does it run at all?")
    args = parser.parse_args()
    args.turns = args.turns or (2 if args.quick else 15)
    rows = measure(args, args.way.split(","))
    add_ratios(rows)
    show(rows)
    if args.json:
        result = {"bench": "data", "machine": machine(), "rows": rows}
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if wrong := [r["way"] for r in rows if not r.get("identical", True)]:
        sys.exit(f"{', '.join(wrong)}: not each image once, with its label")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--reader"]:
        way, folder, batch, workers, device = sys.argv[2:7]
        if way.startswith("overlap"):
            overlap_main(way, folder, device)
        else:
            read_main(way, folder, int(batch), int(workers))
    else:
        with guarded():
            main()
