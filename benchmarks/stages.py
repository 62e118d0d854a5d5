"""How fast a model cut in two trains, next to one process and torch.distributed.pipelining.

    python benchmarks/stages.py --way plain,alone,naive,afab,1f1b,torch --json FILE

One model (layers of equal cost, fp32), one batch size, SGD, one torch thread a process. Each layer
is a norm, a convolution and a ReLU: by the norm's parameters the first convolution, too, has to
give a gradient of its input, so that its backward costs what all others do. Ways:
    plain        one process, a plain loop over the microbatches
    alone        the same as a plan of one stage
    halves       two peers, each with half of the layers and all microbatches, and nothing to say to
                 each other: what the machine lets two of them have at once
    naive        two stages, one microbatch: one peer computes, the other waits
    afab, 1f1b   two stages, `--microbatches` of them, over gloo; interleaved has two stages a peer
    1f1b@hub     ... over a hub without TLS; 1f1b@door by its door; 1f1b@amqp over RabbitMQ
    torch        torch.distributed.pipelining's Schedule1F1B, two stages, over gloo
Each way has processes of its own that stay alive and take turns of some steps each; malloc keeps
what a step frees in all of them alike (`heap_kept`), so that ratios are of overhead. A step counts
as long as its slowest peer took, on a GPU until it has finished. `bubble`: the part of the steps'
time in which a peer used no CPU, so waited (null on a GPU, where that says nothing);
`bubble_in_theory` is that of the schedule, whose messages take no time and whose stages all take
the same; `bubble_of_busy` the same for stages that take what each peer's CPU took in each step.
`queued`: the part of the time in which the computing thread could have gone on and had no core;
`threads` says which of the peers' threads took how much CPU a step, in all and in the kernel, and
how often they slept (gloo's are those of the barrier between steps, too). What halves, of the same
microbatches, lack to twice plain is the machine's, where two compute at once; what a pipeline lacks
to 1 - `bubble_in_theory` times halves (`ratio_to_halves`) is the pipeline's.
`difference_to_plain`: the most that a parameter differs at the end from plain's, who saw the same
batches; halves saw others.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from guardian import guarded
from harness import (
    Threads,
    Worker,
    cpu_of,
    machine,
    mean_of_threads,
    meeting_points,
    quantile,
    run_at,
)

WAYS = "plain,alone,halves,naive,afab,1f1b,interleaved,torch,1f1b@hub,1f1b@door,1f1b@amqp"
BASES = ("plain", "halves", "naive", "torch")
WARM_UP = 2  # steps of each turn that do not count
LAYERS = 8
SIDE = 16
TOLERANCE = 1e-5
OTHER_SUMS_TOLERANCE = 1e-3  # of other microbatches, whose rounding grows from step to step
GPU_TOLERANCE = 1e-3  # convolutions in TF32, whose order of sums is the library's choice
SCHEDSTAT = Path("/proc/thread-self/schedstat")


def model_of(channels: int):
    """A list of layers of equal cost, forward and backward."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    return [
        nn.Sequential(
            nn.GroupNorm(1, channels), nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU()
        )
        for _ in range(LAYERS)
    ]


def plan_of(way: str, microbatches: int):
    from manyhands.core.plan import Plan

    kind = way.partition("@")[0]
    if kind == "alone":
        return Plan.of_stages([(LAYERS, [0])], microbatches=microbatches)
    half = LAYERS // 2
    if kind == "interleaved":
        stages = [(half // 2, [peer]) for _ in range(2) for peer in range(2)]
        return Plan.of_stages(stages, microbatches=microbatches, schedule=kind)
    stages = [(half, [0]), (half, [1])]
    if kind == "naive":
        return Plan.of_stages(stages, schedule="afab")
    return Plan.of_stages(stages, microbatches=microbatches, schedule=kind)


# -- one peer -------------------------------------------------------------------------------------


def peer_main(way: str, rank: int, where: str, args) -> None:
    """Train as told on standard input."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if where:
        backend = "gloo" if where.startswith("file:") else "manyhands"
        dist.init_process_group(backend, init_method=where, rank=rank, world_size=2)
    layers = [layer.to(args.device) for layer in model_of(args.channels)]
    heap_kept = keep_heap(layers, args.device)
    step, owned = maker_of(way)(layers, args)
    wait = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    numbers = torch.Generator(args.device).manual_seed(1)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        words = json.loads(line)
        shape = (args.batch, args.channels, SIDE, SIDE)
        times, cpu, queued, main = [], [], [], 0.0
        for n in range(WARM_UP + words["steps"]):
            if n == WARM_UP:
                threads, main = Threads(), 0.0
            x = torch.randn(shape, generator=numbers, device=args.device)
            y = torch.randn(shape, generator=numbers, device=args.device)
            wait()
            if where:
                dist.barrier()
            start, used, stood = time.perf_counter(), time.process_time(), queued_s()
            here = time.thread_time()
            step(x, y)
            wait()
            times.append(time.perf_counter() - start)
            main += time.thread_time() - here
            cpu.append(time.process_time() - used)
            queued.append(queued_s() - stood)
        answer = {"times": times[WARM_UP:], "cpu": cpu[WARM_UP:], "heap_kept": heap_kept}
        answer["queued"] = queued[WARM_UP:]
        answer["threads"] = threads.since() | {"main": {"cpu_s": main}}  # without fresh numbers
        if words["save_to"]:
            torch.save({index: layers[index].state_dict() for index in owned}, words["save_to"])
        print(json.dumps(answer), flush=True)
    if where.startswith("file:"):
        os._exit(0)  # gloo aborts a process whose peers have ended first
    if where:
        dist.destroy_process_group()


def queued_s() -> float:
    """How long this thread could run so far and had no core; 0 where the kernel does not say."""
    return int(SCHEDSTAT.read_text().split()[1]) / 1e9 if SCHEDSTAT.exists() else 0.0


def keep_heap(layers, device: str) -> bool:
    """The same malloc for all ways; whether it could be done."""
    import torch

    from manyhands.replica.heap import keep_freed

    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    num_bytes = sum(p.numel() * p.element_size() for p in parameters)
    return keep_freed(num_bytes, torch.device(device), os.environ)


def maker_of(way: str):
    others = {"plain": plain, "halves": halves, "torch": torch_pipelining}
    return others.get(way, lambda *a: planned(way, *a))


def optimizer_of(parameters):
    import torch

    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def plain(layers, args):
    from torch import nn
    from torch.nn.functional import mse_loss

    model = nn.Sequential(*layers)
    optimizer = optimizer_of(model.parameters())

    def step(x, y):
        parts = zip(x.chunk(args.microbatches), y.chunk(args.microbatches), strict=True)
        for part, target in parts:
            (mse_loss(model(part), target) * (len(part) / len(x))).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, range(LAYERS)


def halves(layers, args):
    """What a peer of two stages computes, of its own numbers: the first half has no loss, and the
    second an input with a gradient.
    """
    import torch.distributed as dist
    from torch import nn
    from torch.nn.functional import mse_loss

    rank, half = dist.get_rank(), LAYERS // 2
    owned = range(rank * half, rank * half + half)
    model = nn.Sequential(*(layers[index] for index in owned))
    optimizer = optimizer_of(model.parameters())

    def step(x, y):
        parts = zip(x.chunk(args.microbatches), y.chunk(args.microbatches), strict=True)
        for part, target in parts:
            if rank == 0:
                model(part).backward(target / y.numel())
            else:
                output = model(part.detach().requires_grad_())
                (mse_loss(output, target) * (len(part) / len(x))).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, owned


def planned(way, layers, args):
    from torch.nn.functional import mse_loss

    from manyhands.stages.pipeline import Pipeline

    pipe = Pipeline(
        layers,
        plan_of(way, args.microbatches),
        loss_fn=mse_loss,
        optimizer=optimizer_of,
        device=args.device,
    )
    return pipe.step, [layer.index for layer in pipe.layers()]


def torch_pipelining(layers, args):
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.nn.functional import mse_loss

    rank, half = dist.get_rank(), LAYERS // 2
    owned = range(rank * half, rank * half + half)
    model = nn.Sequential(*(layers[index] for index in owned))
    optimizer = optimizer_of(model.parameters())
    stage = PipelineStage(model, rank, 2, torch.device(args.device))
    schedule = Schedule1F1B(stage, args.microbatches, loss_fn=mse_loss)

    def step(x, y):
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=[])
        optimizer.step()
        optimizer.zero_grad()

    return step, owned


# -- the whole ------------------------------------------------------------------------------------


def where_of(way: str, urls: dict[str, str], folder: Path) -> str:
    if way in ("plain", "alone"):
        return ""
    run = f"stages-{os.urandom(4).hex()}"
    link = way.partition("@")[2]
    return run_at(link, urls, run) if link else f"file://{folder / run}"


def measure(args, ways: list[str], urls: dict, meeting: dict) -> list[dict]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        crews: dict[str, list[Worker]] = {}
        shape = (args.batch, args.channels, args.microbatches, args.device)
        for way in ways:
            where = where_of(way, urls, folder)
            crews[way] = [
                stack.enter_context(Worker(__file__, "--peer", way, rank, where, *shape))
                for rank in range(2 if where else 1)
            ]
        for crew in crews.values():
            for worker in crew:
                worker.hear(crew)
        said: dict[str, list] = {way: [] for way in ways}
        for turn in range(args.turns):
            for way in ways:
                pids = meeting.get(way.partition("@")[2], [])
                before = cpu_of(pids)
                last = turn == args.turns - 1
                for rank, worker in enumerate(crews[way]):
                    path = str(folder / f"{way.replace('@', '-')}-{rank}.pt") if last else None
                    worker.say(steps=args.steps, save_to=path)
                answers = [worker.hear(crews[way]) for worker in crews[way]]
                answers[0]["meeting_cpu"] = cpu_of(pids) - before
                said[way].append(answers)
                median = statistics.median(max(t) for t in _steps(answers))
                print(f"turn {turn + 1} {way}: {1e3 * median:.1f} ms", file=sys.stderr)
        saved = {way: load(folder, way, len(crews[way])) for way in ways}
    return [row_of(way, args, said[way], difference(saved, way)) for way in ways]


def _steps(answers: list[dict], what: str = "times"):
    """By step: what each peer said of it."""
    return zip(*(answer[what] for answer in answers), strict=True)


def load(folder: Path, way: str, size: int) -> dict:
    """The parameters of all layers, by index."""
    import torch

    whole: dict = {}
    for rank in range(size):
        path = folder / f"{way.replace('@', '-')}-{rank}.pt"
        whole |= torch.load(path, map_location="cpu")
    return whole


def difference(saved: dict, way: str) -> float | None:
    if "plain" not in saved or way == "halves":
        return None
    pairs = [
        (value, saved["plain"][index][name])
        for index, state in saved[way].items()
        for name, value in state.items()
    ]
    assert len(saved[way]) == LAYERS
    return max(float((a - b).abs().max()) for a, b in pairs)


def bubble_of_busy(plan, steps: list) -> float:
    """What peers would wait in these steps, given the CPU time of each in each of them, if messages
    took none; a backward counts as two forwards.
    """
    from manyhands.stages.schedule import orders_of, play

    orders, stages, peers = orders_of(plan), plan.stages, range(len(plan.peers))
    turns = [plan.microbatches * len(plan.stages_of(peer)) for peer in peers]
    whole = 0.0
    for busy in steps:
        forward = [busy[stage.lead] / (3 * turns[stage.lead]) for stage in stages]
        backward = [2 * time_s for time_s in forward]
        whole += play(orders, stages, forward=forward, backward=backward).length
    return 1 - sum(map(sum, steps)) / (len(plan.peers) * whole)


def row_of(way: str, args, turns: list, off: float | None) -> dict:
    from manyhands.stages.schedule import bubble_of

    times = sorted(max(t) for answers in turns for t in _steps(answers))
    peers = len(turns[0])
    all_steps = sum(len(turn[0]["times"]) + WARM_UP for turn in turns)
    meeting_cpu = sum(turn[0]["meeting_cpu"] for turn in turns) / all_steps
    ours = way not in ("plain", "halves", "torch")
    plan = plan_of(way if ours else "1f1b", args.microbatches)
    waits = peers > 1 and way != "halves"
    busy = [step for answers in turns for step in _steps(answers, "cpu")]
    queued = sum(sum(answer["queued"]) for answers in turns for answer in answers)
    on_cpu = args.device == "cpu"
    return {
        "way": way,
        "link": way.partition("@")[2] or ("gloo" if peers > 1 else "none"),
        "tls": False,
        "peers": peers,
        "stages": 1 if peers == 1 else len(plan.stages),
        "microbatches": plan.microbatches,
        "device": args.device,
        "batch": args.batch,
        "channels": args.channels,
        "steps": len(times),
        "turns": len(turns),
        "heap_kept": all(answer["heap_kept"] for turn in turns for answer in turn),
        "median_s": statistics.median(times),
        "mean_s": statistics.mean(times),
        "p10_s": quantile(times, 0.1),
        "p90_s": quantile(times, 0.9),
        "turn_median_s": [statistics.median(max(t) for t in _steps(a)) for a in turns],
        "cpu_s": sum(map(sum, busy)) / len(times) + meeting_cpu,
        "meeting_point_cpu_s": meeting_cpu,
        "threads": mean_of_threads((a["threads"] for turn in turns for a in turn), len(times)),
        "bubble_in_theory": bubble_of(plan) if waits else 0.0,
        "bubble_of_busy": bubble_of_busy(plan, busy) if waits and on_cpu else None,
        "queued": queued / (peers * sum(times)) if SCHEDSTAT.exists() else None,
        "difference_to_plain": off,
    }


def tolerance(row: dict, rows: list[dict]) -> float:
    """How far a way may be from plain's parameters."""
    if row["device"] != "cpu":
        return GPU_TOLERANCE
    alike = {other["microbatches"] for other in rows if other["way"] == "plain"}
    return TOLERANCE if row["microbatches"] in alike else OTHER_SUMS_TOLERANCE


def add_ratios(rows: list[dict]) -> None:
    """How many times as fast, turn by turn, as each way that others are compared with."""
    by_way = {row["way"]: row for row in rows}
    for row in rows:
        for base in BASES:
            row[f"ratio_to_{base}"] = None
            if base in by_way:
                pairs = zip(by_way[base]["turn_median_s"], row["turn_median_s"], strict=True)
                row[f"ratio_to_{base}"] = statistics.median(b / own for b, own in pairs)
        computing = row["cpu_s"] - row["meeting_point_cpu_s"]
        on_cpu = row["device"] == "cpu"
        row["bubble"] = 1 - computing / (row["peers"] * row["mean_s"]) if on_cpu else None


def show(rows: list[dict]) -> None:
    for r in rows:
        ratios = " ".join(
            f"{r[f'ratio_to_{base}']:.2f}x {base}" for base in BASES if r[f"ratio_to_{base}"]
        )
        waits = "" if r["bubble"] is None else f"waits {r['bubble']:.1%} "
        theory = f"{r['bubble_in_theory']:.1%}"
        if r["bubble_of_busy"] is not None:
            theory += f", of what the peers took {r['bubble_of_busy']:.1%}"
        queued = "" if r["queued"] is None else f"; for a core {r['queued']:.1%}"
        print(
            f"{r['way']:12}{r['peers']} peers {1e3 * r['median_s']:7.1f} ms "
            f"({1e3 * r['p10_s']:.1f}-{1e3 * r['p90_s']:.1f}) {ratios} "
            f"{waits}(theory {theory}{queued}) cpu {r['cpu_s']:.3f} s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--way", default=WAYS)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--device", default="cpu", help="cuda: all peers on one GPU")
    parser.add_argument("--turns", type=int)
    parser.add_argument("--steps", type=int, help="of a turn")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="few steps: does it run at all?")
    args = parser.parse_args()
    args.turns = args.turns or (2 if args.quick else 7)
    args.steps = args.steps or (2 if args.quick else 10)
    ways = args.way.split(",")
    with contextlib.ExitStack() as stack:
        urls, meeting = meeting_points(stack, [way.partition("@")[2] for way in ways])
        rows = measure(args, ways, urls, meeting)
    add_ratios(rows)
    show(rows)
    if args.json:
        result = {"bench": "stages", "machine": machine(), "rows": rows}
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if wrong := [r for r in rows if (r["difference_to_plain"] or 0.0) > tolerance(r, rows)]:
        sys.exit(f"{len(wrong)} of {len(rows)} ways trained something else than they should")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peer"]:
        batch, channels, microbatches = (int(word) for word in sys.argv[5:8])
        shape = argparse.Namespace(
            batch=batch, channels=channels, microbatches=microbatches, device=sys.argv[8]
        )
        peer_main(sys.argv[2], int(sys.argv[3]), sys.argv[4], shape)
    else:
        with guarded():
            main()
