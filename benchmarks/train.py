"""How many samples a second the elastic loop trains, next to a plain one, DDP and other software.

    python benchmarks/train.py --link plain,alone,gloo,hub,door,amqp,hivemind,torchft \\
        --peers 1,2,4 --json FILE

Everybody trains the same model (that of ddp.py with tanh, fp32; `--parameters` in millions) by the
same loop, on the same samples in the same order, with the same global batch. `plain` is one process
without anything of ours, `alone` the same with `manyhands.join` and nobody else; both are what
`--peers 1` means. `gloo` is DDP; `hub` (TCP without TLS), `door` (the hub of the same machine, by
its door) and `amqp` are `manyhands.join` with others.
Every peer is a process with one torch thread, the meeting point is one too. They stay alive and
take turns, each an epoch of some steps, so that a disturbance of the machine meets all alike.
`manyhands.join` has malloc keep what a step frees (replica/heap.py), by which the plain loop gains
as much: so here all links do it (`heap_kept`), and ratios are of overhead alone.

`samples_per_s`, and the seconds of a step, are of whole turns: reading samples, forward, backward,
averaging, optimizer. Ratios are medians over turns, each next to the other's of the same moment.
`loss` is over all samples at the end, and `difference_to_plain` the most that a parameter differs
from the plain loop's then: a row that has trained something else fails the benchmark. `cpu_s` (a
step) includes the meeting point. `peak_bytes`: a peer's resident memory at most;
`extra_peak_bytes`: what it grew by from the beginning of a turn.

With `--device cuda`, for `plain` and `alone`, model and optimizer are on a GPU. Samples stay with
the CPU, and the loop copies each batch, whoever has read it.

hivemind (extra `bench`) and torchft (`pip install torchft==0.2.0`: x86-64 Linux, Python up to 3.13)
run if they are installed, after the others have ended (see allreduce.py), as hivemind_trainer.py
and torchft_trainer.py say; their rows are not asked to be right.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddp import CLASSES, model_of
from foreign import ForeignCrew
from guardian import guarded
from harness import (
    Worker,
    cpu_of,
    forget_peaks,
    machine,
    median_sent,
    meeting_points,
    memory_of,
    peaks_of,
    quantile,
    run_at,
    store,
)

SEED = 5  # of the order of the samples
WARM_UP = 2  # steps of each turn that do not count
TOLERANCE = 1e-5  # of a parameter and of the loss: sums of other orders, over all steps
ALONE = ("plain", "alone")  # links of one peer
FOREIGN = ("hivemind", "torchft")  # after the others
JUDGED = ("plain", "alone", "gloo", "hub", "door", "amqp")


# -- one peer -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a peer is to do."""

    link: str
    rank: int
    size: int
    millions: float
    batch: int  # of all peers together
    steps: int  # of a turn
    turns: int
    where: str | None = None
    device: str = "cpu"

    @property
    def samples(self) -> int:
        """Of an epoch, which is a turn."""
        return self.steps * self.batch


@dataclass
class Trainer:
    """A loop over epochs, ready to run."""

    module: Any  # without what a link has put around it
    model: Any
    optimizer: Any
    loader: Any
    heap_kept: bool
    bytes_sent: Callable[[], int | None] = lambda: None  # nobody counts

    def epoch(self) -> Iterator[None]:
        """The loop that everybody runs; yields after each step."""
        from torch.nn.functional import cross_entropy

        device = next(self.module.parameters()).device
        for inputs, labels in self.loader:
            inputs, labels = inputs.to(device), labels.to(device)
            self.optimizer.zero_grad()
            cross_entropy(self.model(inputs), labels).backward()
            self.optimizer.step()
            yield


def smooth_model_of(millions: float):
    """A ReLU that rounding turns on would make all that follows differ, and hide what is wrong."""
    return model_of(millions, "Tanh")


def samples_of(job: Job, width: int):
    """Points, and which of their first numbers is the greatest: something that can be learnt."""
    import torch
    from torch.utils.data import TensorDataset

    inputs = torch.randn(job.samples, width, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs[:, :CLASSES].argmax(1))


class Shares:
    """A batch sampler: each iteration the next epoch in manyhands' order, a rank's part of it."""

    def __init__(self, job: Job) -> None:
        self._job, self._epoch = job, 0

    def __iter__(self) -> Iterator[list[int]]:
        from manyhands.data.order import Order

        job = self._job
        places = Order(job.samples, seed=SEED, epoch=self._epoch).indices(0, job.samples).tolist()
        self._epoch += 1
        share = job.batch // job.size
        for start in range(job.rank * share, job.samples, job.batch):
            yield places[start : start + share]


def trainer_of(job: Job, stack: contextlib.ExitStack) -> Trainer:
    """Join the others."""
    import torch
    from torch.utils.data import DataLoader

    module, width = smooth_model_of(job.millions)
    module.to(job.device)
    heap_kept = keep_heap(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    data = samples_of(job, width)
    if job.link in ("plain", "gloo"):
        loader = DataLoader(data, batch_sampler=Shares(job))
        model = distributed(module, job) if job.link == "gloo" else module
        sent = lambda: None if job.link == "gloo" else 0  # noqa: E731
        return Trainer(module, model, optimizer, loader, heap_kept, sent)

    import manyhands as mh

    run = stack.enter_context(mh.join(job.where, min_peers=job.size, seed=SEED))
    given = DataLoader(data, job.batch, shuffle=True)
    model, optimizer, loader, _ = run.wrap(module, optimizer, given, epochs=job.turns)
    sent = lambda: run._session._link.bytes_sent  # noqa: E731
    return Trainer(module, model, optimizer, loader, heap_kept, sent)


def keep_heap(module) -> bool:
    """What `manyhands.join` does to malloc, whoever this peer is; whether it could be done."""
    from manyhands.replica.heap import keep_freed

    num_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
    return keep_freed(num_bytes, next(module.parameters()).device, os.environ)


def distributed(module, job: Job):
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", init_method=job.where, rank=job.rank, world_size=job.size)
    return DistributedDataParallel(module)


def peer(job: Job) -> None:
    """Train as told on standard input."""
    import torch

    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        trainer = trainer_of(job, stack)
        print(json.dumps({"parameters": count_of(trainer.module)}), flush=True)
        for line in sys.stdin:
            answer = take_turn(trainer, job)
            if save_to := json.loads(line)["save_to"]:
                answer |= final(trainer.module, job, save_to)
            print(json.dumps(answer), flush=True)
        if job.link == "gloo":
            os._exit(0)  # gloo aborts a process whose peers have ended first


def take_turn(trainer: Trainer, job: Job) -> dict:
    forget_peaks(["self"])
    base = memory_of("self", "VmRSS")
    before, cpu, first = trainer.bytes_sent(), 0.0, 0.0
    for n, _ in enumerate(trainer.epoch(), 1):
        if n == WARM_UP:
            wait_for(job.device)
            before, cpu, first = trainer.bytes_sent(), time.process_time(), time.perf_counter()
    wait_for(job.device)
    counted = job.steps - WARM_UP
    return {
        "step_s": (time.perf_counter() - first) / counted,
        "cpu": (time.process_time() - cpu) / counted,
        "sent": None if before is None else (trainer.bytes_sent() - before) / counted,
        "taken": job.batch / job.size,
        "peak": memory_of("self", "VmHWM"),
        "extra": max(0, memory_of("self", "VmHWM") - base),
        "heap_kept": trainer.heap_kept,
    }


def wait_for(device: str) -> None:
    """Until a GPU has done what it was given; the CPU has by then."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def count_of(module) -> int:
    return sum(p.numel() for p in module.parameters())


def final(module, job: Job, save_to: str) -> dict:
    """What has come out: the parameters, in a file of the first peer's, and their loss."""
    import torch
    from torch.nn.functional import cross_entropy

    flat = torch.cat([p.detach().view(-1) for p in module.parameters()]).cpu()
    if job.rank == 0:
        torch.save(flat, save_to)
    data = samples_of(job, module[0].in_features)
    inputs, labels = (tensor.to(job.device) for tensor in data.tensors)
    with torch.no_grad():
        loss = float(cross_entropy(module(inputs), labels))
    return {"digest": hashlib.sha256(flat.numpy().tobytes()).hexdigest(), "loss": loss}


# -- the whole ------------------------------------------------------------------------------------


class Bench:
    """One model: rows for every number of peers, and the parameters that each has come to."""

    def __init__(self, millions: float, args, urls: dict, meeting: dict, folder: Path) -> None:
        self._args, self._millions = args, millions
        self._urls, self._meeting, self._folder = urls, meeting, folder

    def measure(self, size: int, links: list[str]) -> list[dict]:
        """All rows of one number of peers."""
        rows = self._in_turns(size, [link for link in links if link not in FOREIGN])
        for link in FOREIGN:
            rows += self._foreign(link, size) if link in links else []
        return rows

    def _jobs(self, link: str, size: int) -> list[Job]:
        args, where = self._args, where_of(link, self._urls, self._folder)
        common = {"link": link, "size": size, "millions": self._millions, "where": where}
        common |= {"batch": args.batch, "steps": WARM_UP + args.steps, "turns": args.turns}
        common["device"] = args.device
        return [Job(rank=rank, **common) for rank in range(size)]

    def _in_turns(self, size: int, links: list[str]) -> list[dict]:
        with contextlib.ExitStack() as stack:
            crews = {
                link: [
                    stack.enter_context(Worker(__file__, "--peer", json.dumps(asdict(job))))
                    for job in self._jobs(link, size)
                ]
                for link in links
            }
            count = {w.hear(crew)["parameters"] for crew in crews.values() for w in crew}
            said: dict[str, list] = {link: [] for link in links}
            for turn in range(self._args.turns):
                for link, crew in crews.items():
                    said[link].append(self._turn(turn, link, crew))
        return [self._row(link, size, *count, said) for link in links]

    def _turn(self, turn: int, link: str, crew: list[Worker]) -> list[dict]:
        pids = self._meeting.get(link, [])
        forget_peaks(pids)
        before = cpu_of(pids)
        last = turn == self._args.turns - 1
        for worker in crew:
            worker.say(save_to=str(self._saved(link, len(crew))) if last else None)
        answers = [worker.hear(crew) for worker in crew]
        answers[0]["meeting_cpu"] = (cpu_of(pids) - before) / (WARM_UP + self._args.steps)
        answers[0]["meeting_peak"] = peaks_of(pids)
        tell(link, len(crew), self._millions, turn, self._args.batch, answers)
        return answers

    def _saved(self, link: str, size: int) -> Path:
        return self._folder / f"{link}-{size}-{self._millions:g}.pt"

    def _foreign(self, link: str, size: int) -> list[dict]:
        """Its row, if it gets that far."""
        crew = ForeignCrew(link, [json.dumps(asdict(job)) for job in self._jobs(link, size)])

        def heard(turn: int, answers: list[dict]) -> None:
            tell(link, size, self._millions, turn, self._args.batch, answers)

        said = crew.turns(self._args.turns, str(self._saved(link, size)), heard)
        return [self._row(link, size, crew.parameters, {link: said})] if said else []

    def _row(self, link: str, size: int, count: int, said: dict[str, list]) -> dict:
        turns = said[link]
        rates = rates_of(turns, self._args.batch)
        ranked, seconds = sorted(rates), sorted(self._args.batch / rate for rate in rates)
        meeting_cpu = statistics.median(turn[0]["meeting_cpu"] for turn in turns)
        return {
            "link": link,
            "tls": False,
            "peers": size,
            "parameters": count,
            "mbytes": count * 4 / 1e6,
            "wire": "fp32",
            "device": self._args.device,
            "batch": self._args.batch,
            "heap_kept": all(a["heap_kept"] for turn in turns for a in turn),
            "turns": len(turns),
            "median_s": statistics.median(seconds),
            "p10_s": quantile(seconds, 0.1),
            "p90_s": quantile(seconds, 0.9),
            "samples_per_s": statistics.median(rates),
            "samples_per_s_p10": quantile(ranked, 0.1),
            "samples_per_s_p90": quantile(ranked, 0.9),
            "turn_samples_per_s": rates,
            "ratio_to_plain": paired(rates, said.get("plain"), self._args.batch),
            "ratio_to_gloo": paired(rates, said.get("gloo"), self._args.batch),
            "samples_taken": statistics.median(sum(a["taken"] for a in turn) for turn in turns),
            "cpu_s": statistics.median(sum(a["cpu"] for a in turn) for turn in turns) + meeting_cpu,
            "meeting_point_cpu_s": meeting_cpu,
            "bytes_sent_per_peer": median_sent(a for turn in turns for a in turn),
            "identical": len({a["digest"] for a in turns[-1]}) == 1,
            "loss": turns[-1][0]["loss"],
            "difference_to_plain": difference(self._saved(link, size), self._saved("plain", 1)),
            "peak_bytes": max(a["peak"] for turn in turns for a in turn),
            "extra_peak_bytes": max(a["extra"] for turn in turns for a in turn),
            "meeting_point_peak_bytes": max(turn[0]["meeting_peak"] for turn in turns),
        }


def where_of(link: str, urls: dict[str, str], folder: Path) -> str | None:
    """What a user would write, with a run of its own."""
    run = f"train-{os.urandom(4).hex()}"
    match link:
        case "gloo":
            return f"file://{folder / run}"
        case "alone":
            return f"local:///{run}"  # what `join` without an address does
        case "hub" | "door" | "amqp":
            return run_at(link, urls, run)
    return None


def rates_of(turns: list, batch: int) -> list[float]:
    """Samples a second; a step takes as long as its slowest peer."""
    return [batch / max(a["step_s"] for a in turn) for turn in turns]


def paired(rates: list[float], others: list | None, batch: int) -> float | None:
    """The median over turns of how fast it was next to another link in the same turn."""
    if not others:
        return None
    return statistics.median(a / b for a, b in zip(rates, rates_of(others, batch), strict=True))


def difference(mine: Path, plain: Path) -> float | None:
    """The most that a parameter differs."""
    import torch

    if not plain.exists():
        return None
    return float((torch.load(mine) - torch.load(plain)).abs().max())


def tell(link: str, size: int, millions: float, turn: int, batch: int, answers: list) -> None:
    (rate,) = rates_of([answers], batch)
    print(
        f"{size} peers {millions:g} M turn {turn + 1} {link}: {rate:.0f} samples/s", file=sys.stderr
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--link", default="plain,alone,gloo,hub,door,amqp,hivemind,torchft")
    parser.add_argument("--peers", default="1,2,4", help="1: the links plain and alone")
    parser.add_argument("--parameters", default="2", help="millions")
    parser.add_argument("--batch", type=int, default=128, help="samples of a step, of all peers")
    parser.add_argument("--turns", type=int)
    parser.add_argument("--steps", type=int, help="of a turn, that count")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="few steps: does it run at all?")
    args = parser.parse_args()
    args.turns = args.turns or (2 if args.quick else 10)
    args.steps = args.steps or (3 if args.quick else 20)
    sizes = sorted(int(n) for n in args.peers.split(","))  # plain first: others are compared to it
    if any(args.batch % size for size in sizes):
        parser.error(f"a batch of {args.batch} cannot be shared equally, as DDP needs it")
    links = args.link.split(",")
    if args.device == "cuda" and (others := [link for link in links if link not in ALONE]):
        parser.error(f"--device cuda is for {' and '.join(ALONE)}, not for {', '.join(others)}")
    links = installed(links)
    rows = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls, meeting = meeting_points(stack, links)
        for millions in (float(n) for n in args.parameters.split(",")):
            bench = Bench(millions, args, urls, meeting, folder)
            for size in sizes:
                rows += bench.measure(size, [x for x in links if (x in ALONE) == (size == 1)])
    show(rows)
    if args.json:
        result = {"bench": "train", "machine": machine(args.device), "rows": rows}
        store(args.json, result, asked=args.link.split(","))
    if wrong := [row for row in rows if not is_right(row, rows)]:
        sys.exit(f"{len(wrong)} of {len(rows)} rows trained something else than they should")


def installed(links: list[str]) -> list[str]:
    """Those that can run here; says why the others are left out."""
    remedies = {"hivemind": "pip install '.[bench]'", "torchft": "pip install torchft==0.2.0"}
    for link, remedy in remedies.items():
        if link in links and importlib.util.find_spec(link) is None:
            print(f"{link} is not installed and left out: {remedy}", file=sys.stderr)
            links = [other for other in links if other != link]
    return links


def is_right(row: dict, rows: list[dict]) -> bool:
    """All peers agree with each other and, but for rounding, with the plain loop."""
    if row["link"] not in JUDGED:
        return True
    same = [
        r["loss"] for r in rows if r["link"] == "plain" and r["parameters"] == row["parameters"]
    ]
    off = [abs(row["loss"] - loss) for loss in same] + [row["difference_to_plain"] or 0.0]
    return row["identical"] and max(off) <= TOLERANCE


def show(rows: list[dict]) -> None:
    for r in rows:
        ratios = [f"{r[f'ratio_to_{x}']:.3f}x {x}" for x in ("plain", "gloo") if r[f"ratio_to_{x}"]]
        off = r["difference_to_plain"]
        print(
            f"{r['link']:9}{r['peers']:2} peers {r['parameters'] / 1e6:5.2f} M "
            f"{r['samples_per_s']:6.0f} samples/s "
            f"({r['samples_per_s_p10']:.0f}-{r['samples_per_s_p90']:.0f}) {' '.join(ratios):12} "
            f"step {1e3 * r['median_s']:.1f} ms cpu {r['cpu_s']:.3f} s "
            f"peak {r['peak_bytes'] / 1e6:.0f} MB same {r['identical']} loss {r['loss']:.5f}"
            + ("" if off is None else f" off {off:.1e}")
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peer"]:
        peer(Job(**json.loads(sys.argv[2])))
    else:
        with guarded():
            main()
