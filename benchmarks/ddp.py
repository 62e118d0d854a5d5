"""How many steps a second DDP trains over manyhands, next to DDP over gloo on the same machine.

    python benchmarks/ddp.py --backend gloo,bare,hub,door,amqp --ranks 2,4 \\
        --parameters 2,18 --json FILE

Each backend has processes of its own, one a rank with one torch thread, that train the same model
(four square layers and a small one, fp32; `--parameters` in millions) on the same numbers: batches
of 32 a rank, new ones for every step. They stay alive and take turns: some steps over one backend,
then over the next, so that a disturbance of the machine meets them alike. A step is forward,
backward with DDP's all-reduce, and SGD; it counts as long as its slowest rank took, `steps_per_s`
is of whole turns. The meeting point is a process too, without TLS, and `cpu_s` (a step) includes
it; `threads` says which of the ranks' threads took how much of it, in all and in the kernel, and
how often they slept. `identical`: all ranks have the same bits at the end; `difference_to_gloo`:
the most that a parameter differs from gloo's then. `extra_peak_bytes`: what a rank's memory grew by
from the beginning of a turn; in the first this includes the gradients. `bare` is DDP whose hook
averages over a bare relay (bare_relay.py), while backward goes on: the least that any relay costs.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import statistics
import struct
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path

from bare_relay import BarePeer
from guardian import guarded
from harness import (
    Threads,
    Worker,
    bare_relay_process,
    cpu_of,
    forget_peaks,
    machine,
    mean_of_threads,
    median_sent,
    meeting_points,
    memory_of,
    peaks_of,
    quantile,
    run_at,
)

BATCH = 32
CLASSES = 10
LAYERS = 4
WARM_UP = 2  # steps of each turn that do not count
TOLERANCE = 1e-5  # between backends: they add in different orders


# -- one rank -------------------------------------------------------------------------------------


def model_of(millions: float, activation: str = "ReLU"):
    """About that many parameters."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    width = max(8, round((millions * 1e6 / LAYERS) ** 0.5 / 8) * 8)
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(width, width), getattr(nn, activation)()]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES)), width


def rank_main(rank: int, size: int, millions: float, init_method: str) -> None:
    """Train as told on standard input."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    *ports, init_method = init_method.split(",")  # ports are those of bare relays
    backend = "gloo" if init_method.startswith(("tcp:", "file:")) else "manyhands"
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=size)
    model, width = model_of(millions)
    replica = DistributedDataParallel(model)
    if ports:
        replica.register_comm_hook(None, bare_hook([int(p) for p in ports], rank, size))
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.01)
    numbers = torch.Generator().manual_seed(1 + rank)
    print(json.dumps({"parameters": sum(p.numel() for p in model.parameters())}), flush=True)
    for line in sys.stdin:
        words = json.loads(line)
        answer = take_turn(replica, optimizer, numbers, width, words["steps"])
        if words["save_to"]:
            flat = torch.cat([p.detach().view(-1) for p in model.parameters()])
            answer["digest"] = hashlib.sha256(flat.numpy().tobytes()).hexdigest()
            if rank == 0:
                torch.save(flat, words["save_to"])
        print(json.dumps(answer), flush=True)
    if backend == "gloo":
        os._exit(0)  # gloo aborts a process whose peers have ended first
    dist.destroy_process_group()


def bare_hook(ports: list[int], rank: int, size: int):
    """Averages a bucket in a thread, over the next relay.

    A bare relay does not tell the pieces of one average from the next's, which a peer may begin
    while others still read this one. Two relays by turns do: nobody is two averages ahead.
    """
    import torch

    peers = cycle([BarePeer(port, rank, size, size) for port in ports])
    thread = ThreadPoolExecutor(1)

    def average(bucket, averaged) -> None:
        try:
            peer = next(peers)
            peer.take(bucket)
            peer.average()
        except (OSError, struct.error) as error:  # the relay is gone
            averaged.set_exception(error)
        else:
            averaged.set_result(bucket)

    def hook(_, bucket):
        averaged = torch.futures.Future()
        thread.submit(average, bucket.buffer(), averaged)
        return averaged

    return hook


def take_turn(replica, optimizer, numbers, width: int, steps: int) -> dict:
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy

    total = WARM_UP + steps
    inputs = torch.randn(total, BATCH, width, generator=numbers)
    labels = torch.randint(CLASSES, (total, BATCH), generator=numbers)
    forget_peaks(["self"])
    base = memory_of("self", "VmRSS")
    times = []
    dist.barrier()
    threads, cpu, first = Threads(), 0.0, 0.0
    for n in range(total):
        if n == WARM_UP:
            counted, threads = bytes_sent(), Threads()
            cpu, first = time.process_time(), time.perf_counter()
        start = time.perf_counter()
        loss = cross_entropy(replica(inputs[n]), labels[n])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
    elapsed, cpu = time.perf_counter() - first, time.process_time() - cpu
    sent = None if counted is None else (bytes_sent() - counted) / steps
    return {
        "times": times[WARM_UP:],
        "elapsed": elapsed,
        "cpu": cpu,
        "threads": threads.since(),
        "sent": sent,
        "extra": max(0, memory_of("self", "VmHWM") - base),
        "loss": float(loss.detach()),
    }


def bytes_sent() -> int | None:
    """What this rank has sent over its link; of gloo and a bare relay nobody counts."""
    import torch
    import torch.distributed as dist

    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    session = getattr(backend, "_session", None)
    return None if session is None else session.team.link.bytes_sent


# -- the whole ------------------------------------------------------------------------------------


def init_method_of(backend: str, urls: dict[str, str], folder: Path) -> str:
    """What a user would write, with a run of its own."""
    run = f"ddp-{os.urandom(4).hex()}"
    if backend == "bare":
        return f"{urls['bare']},file://{folder / run}"
    return f"file://{folder / run}" if backend == "gloo" else run_at(backend, urls, run)


def measure(size: int, millions: float, args, urls: dict, meeting: dict) -> list[dict]:
    """All rows of one number of ranks and parameters."""
    backends = args.backend.split(",")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if "bare" in backends:
            relays = [stack.enter_context(bare_relay_process(size)) for _ in range(2)]
            urls["bare"] = ",".join(port for port, _ in relays)
            meeting["bare"] = [pid for _, pid in relays]
        crews = {}
        for backend in backends:
            where = init_method_of(backend, urls, folder)
            crews[backend] = [
                stack.enter_context(Worker(__file__, "--rank", r, size, millions, where))
                for r in range(size)
            ]
        parameters = {w.hear()["parameters"] for crew in crews.values() for w in crew}
        (count,) = parameters
        said: dict[str, list] = {backend: [] for backend in backends}
        saved = {backend: folder / f"{backend}.pt" for backend in backends}
        for turn in range(args.turns):
            for backend in backends:
                pids = meeting.get(backend, [])
                forget_peaks(pids)
                before = cpu_of(pids)
                last = turn == args.turns - 1
                for worker in crews[backend]:
                    worker.say(steps=args.steps, save_to=str(saved[backend]) if last else None)
                answers = [worker.hear() for worker in crews[backend]]
                answers[0]["meeting_cpu"] = cpu_of(pids) - before
                answers[0]["meeting_peak"] = peaks_of(pids)
                said[backend].append(answers)
                print(
                    f"{size} ranks {millions:g} M turn {turn + 1} {backend}: "
                    f"{args.steps / max(a['elapsed'] for a in answers):.1f} steps/s, "
                    f"loss {answers[0]['loss']:.4f}",
                    file=sys.stderr,
                )
        differences = compare(saved)
    return [
        row_of(backend, size, count, said[backend], differences[backend]) for backend in backends
    ]


def compare(saved: dict[str, Path]) -> dict[str, float | None]:
    """The most that each backend's parameters differ from gloo's."""
    import torch

    if "gloo" not in saved:
        return dict.fromkeys(saved)
    gloo = torch.load(saved["gloo"])
    return {name: float((torch.load(path) - gloo).abs().max()) for name, path in saved.items()}


def row_of(backend: str, size: int, count: int, turns: list, difference: float | None) -> dict:
    # A step takes as long as its slowest rank.
    by_turn = [[max(t) for t in zip(*(a["times"] for a in turn), strict=True)] for turn in turns]
    times = sorted(t for turn in by_turn for t in turn)
    rates = [len(turn[0]["times"]) / max(a["elapsed"] for a in turn) for turn in turns]
    all_steps = sum(len(turn[0]["times"]) + WARM_UP for turn in turns)
    meeting_cpu = sum(turn[0]["meeting_cpu"] for turn in turns) / all_steps
    return {
        "link": backend,
        "tls": False,
        "peers": size,
        "parameters": count,
        "mbytes": count * 4 / 1e6,
        "wire": "fp32",
        "batch": BATCH,
        "steps": len(times),
        "turns": len(turns),
        "median_s": statistics.median(times),
        "p10_s": quantile(times, 0.1),
        "p90_s": quantile(times, 0.9),
        "steps_per_s": statistics.median(rates),
        "turn_steps_per_s": rates,
        "cpu_s": sum(a["cpu"] for turn in turns for a in turn) / len(times) + meeting_cpu,
        "meeting_point_cpu_s": meeting_cpu,
        "threads": mean_of_threads((a["threads"] for turn in turns for a in turn), len(times)),
        "bytes_sent_per_peer": median_sent(a for turn in turns for a in turn),
        "identical": len({a["digest"] for a in turns[-1]}) == 1,
        "difference_to_gloo": difference,
        "extra_peak_bytes": max(a["extra"] for turn in turns for a in turn),
        "meeting_point_peak_bytes": max(turn[0]["meeting_peak"] for turn in turns),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="gloo,bare,hub,door,amqp")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--parameters", default="2,18", help="millions")
    parser.add_argument("--turns", type=int)
    parser.add_argument("--steps", type=int, help="of a turn")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="few steps: does it run at all?")
    args = parser.parse_args()
    args.turns = args.turns or (2 if args.quick else 5)
    args.steps = args.steps or (3 if args.quick else 20)
    backends = args.backend.split(",")
    rows = []
    with contextlib.ExitStack() as stack:
        urls, meeting = meeting_points(stack, backends)
        for millions in (float(n) for n in args.parameters.split(",")):
            for size in (int(n) for n in args.ranks.split(",")):
                rows += measure(size, millions, args, urls, meeting)
    add_ratios(rows)
    show(rows)
    if args.json:
        result = {"bench": "ddp", "machine": machine(), "rows": rows}
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if wrong := [r for r in rows if not is_right(r)]:
        sys.exit(f"{len(wrong)} of {len(rows)} rows trained something else than they should")


def add_ratios(rows: list[dict]) -> None:
    """Steps a second, next to gloo's of the same run."""
    gloo = {(r["peers"], r["parameters"]): r["steps_per_s"] for r in rows if r["link"] == "gloo"}
    for row in rows:
        base = gloo.get((row["peers"], row["parameters"]))
        row["ratio_to_gloo"] = row["steps_per_s"] / base if base else None


def is_right(row: dict) -> bool:
    """All ranks agree with each other and, but for rounding, with gloo."""
    return row["identical"] and (row["difference_to_gloo"] or 0.0) <= TOLERANCE


def show(rows: list[dict]) -> None:
    for r in rows:
        ratio = f"{r['ratio_to_gloo']:.2f}x gloo" if r["ratio_to_gloo"] else ""
        off = "" if r["difference_to_gloo"] is None else f" off {r['difference_to_gloo']:.1e}"
        print(
            f"{r['link']:6}{r['peers']:2} ranks {r['parameters'] / 1e6:5.2f} M "
            f"{1e3 * r['median_s']:7.1f} ms ({1e3 * r['p10_s']:.1f}-{1e3 * r['p90_s']:.1f}) "
            f"{r['steps_per_s']:6.2f} steps/s {ratio:11} cpu {r['cpu_s']:.3f} s "
            f"same {r['identical']}{off}"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), sys.argv[5])
    else:
        with guarded():
            main()
