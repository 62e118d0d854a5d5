"""How long an average of tensors takes, next to gloo and hivemind on the same machine.

    python benchmarks/allreduce.py --link hub,hub+tls,door,amqp,amqp+tls,gloo,bare,bare-amqp \\
        --peers 2,4 \\
        --mbytes 8,72 --wire fp32,bf16,int8 --json FILE

Every peer is a process, the meeting point is one too. The processes of one size have all links open
and take turns: a few rounds over one link, then over the next, so that a disturbance of the machine
meets them alike. Each round averages fresh numbers, begins with a barrier over gloo, and counts as
long as its slowest peer took. `engine`: `team` is what the torch backend does (fixed roster, in
place), `rounds` the elastic engine (any roster; a result of its own, kept until it is stable).
`cpu_s` is of all peers and the meeting point; `threads` says which of the peers' threads took how
much of it, in all and in the kernel, and how often they slept (gloo's are the barrier's, too).
`extra_peak_bytes`: what a peer's process grew by, at most, from before it opened this link until
the end of the first turn, without the tensor itself; the other links' memory is theirs, and what
the process had free was given back before. Code counts for whoever runs it first: up to 20 MB.
`bare` is the least that a relay does (bare_relay.py), `bare-amqp` the least that a client of a
broker does (bare_broker.py): what is above them is what windows, leases, resuming and checks cost.
After its clock each round is checked: if not every peer has the mean of what all gave, but for what
a codec may round off (`AVERAGED`; some values from all over the tensor), it is one of `void_rounds`
and its time is not counted; CPU and bytes are of all rounds. A few more of each turn are compared
whole: `identical`, `max_error`. Bytes that nobody counts (gloo's) are null.
hivemind runs if it is installed (extra `bench`), and after the others have ended: its processes are
busy while nobody asks for anything, and slowed all others down by a fifth.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import importlib.util
import json
import os
import socket
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path

from bare_broker import BareBrokerPeer
from bare_relay import BarePeer
from guardian import guarded
from harness import (
    Threads,
    Worker,
    bare_relay_process,
    cpu_of,
    forget_peaks,
    hub_process,
    machine,
    mean_of_threads,
    median_sent,
    memory_of,
    peaks_of,
    quantile,
    store,
    tls_broker,
)

from manyhands.testing.processes import end_tree

FOREIGN_TURN_S = 90.0  # hivemind may look for its group for good; a turn takes up to 40 s
WARM_UP = 3
CHECKED = 2  # more rounds of each turn, whose whole result is compared with the true mean
PICKED = 4096  # values of a round that are
AVERAGED = 0.25  # how far off they may be: no codec rounds so much off, and no two peers agree so


# -- one peer -------------------------------------------------------------------------------------


class GlooPeer:
    """dist.all_reduce over gloo."""

    def __init__(self, numel: int) -> None:
        import torch

        self.tensor = torch.zeros(numel)
        self.bytes_sent = None  # nobody counts

    def average(self) -> None:
        import torch.distributed as dist

        dist.all_reduce(self.tensor)
        self.tensor.div_(dist.get_world_size())


class TeamPeer:
    """The torch backend's all-reduce, with a codec."""

    def __init__(self, group, wire: str, numel: int) -> None:
        import torch

        self._group, self._wire = group, wire
        self.tensor = torch.zeros(numel)

    @property
    def bytes_sent(self) -> int:
        return self._group._session.team.link.bytes_sent

    def average(self) -> None:
        from manyhands.collectives.backend.hooks import average

        average(self.tensor, self._wire, self._group).wait()


class RoundsPeer:
    """The elastic engine, with everybody a member."""

    def __init__(self, url: str, run: str, size: int, wire: str, numel: int) -> None:
        import torch

        from manyhands.collectives.mail import Mail
        from manyhands.collectives.rounds import Rounds
        from manyhands.links.base import LinkSettings, open_link
        from manyhands.links.messages import Terms

        self.tensor = torch.zeros(numel)
        mail = Mail()
        # Whoever watches until it is taken in must not fall behind by more than this.
        settings = LinkSettings(terms=Terms(watch_bytes=8 * max(8 << 20, self.tensor.nbytes)))
        self._link = open_link(url, run=run, place=mail, settings=settings)
        self._rounds = Rounds(
            self._link, [self.tensor], num_samples=lambda r: size, wire=wire, mail=mail
        )
        self._rounds.start()
        self._rounds.offer_state(0, b"")
        self._task = None
        self._size = size

    @property
    def bytes_sent(self) -> int:
        return self._link.bytes_sent

    def gather(self) -> None:
        """Go round until all are members: they are taken in one by one."""
        deadline = time.monotonic() + 60
        while True:
            view = self._rounds.view
            if view is not None and len(view.roster) == self._size:
                break
            if time.monotonic() > deadline:
                raise RuntimeError("not all peers came")
            time.sleep(0.05)
        while len(self._rounds.members) < self._size or self._rounds.applied < 1:
            self._step()
        while self._task is None:
            self._step()

    def _step(self) -> bool:
        """One outcome; True if it was a commit."""
        from manyhands.collectives.outcomes import Committed, Stopped, Task

        match self._rounds.next(60):
            case Task() as task:
                if len(self._rounds.members) == self._size:
                    self._task = task
                else:
                    time.sleep(0.02)  # who goes round alone as fast as it can is hard to follow
                    self._rounds.contribute(task, [self.tensor], weight=len(task.ranges))
            case Committed() as committed:
                committed.result.read_into([self.tensor])
                committed.result.close()
                return True
            case Stopped() as stopped:
                raise RuntimeError(stopped.text)
        return False

    def average(self) -> None:
        task, self._task = self._task, None
        self._rounds.contribute(task, [self.tensor], weight=len(task.ranges))
        while not self._step():
            pass
        while self._task is None:
            self._step()


def peer(rank: int, size: int, numel: int, port: int) -> None:
    """Open links and take turns as told on standard input."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size
    )
    for module in ("backend.group", "backend.session", "mail", "rounds"):
        importlib.import_module(f"manyhands.collectives.{module}")  # else the first would pay
    groups: dict[str, object] = {}
    peers: dict[str, object] = {}
    for line in sys.stdin:
        words = json.loads(line)
        name = words["name"]
        if name not in peers:
            base = fresh_memory() + 4 * numel  # the tensor itself is not extra
            peers[name] = open_peer(words, groups, rank, size, numel)
            peers[name].base, peers[name].extra = base, None
        print(json.dumps(take_turn(peers[name], words["rounds"], rank, size, numel)), flush=True)
        if words.get("last"):
            del peers[name]
    os._exit(0)  # nobody waits for the goodbyes of so many links


def fresh_memory() -> int:
    """What this process has resident; all that it takes from here on shows in its peak.

    Without the first line it would use what others have left free in the heap, which is resident.
    """
    ctypes.CDLL(None).malloc_trim(0)
    forget_peaks(["self"])
    return memory_of("self", "VmRSS")


def open_peer(words: dict, groups: dict, rank: int, size: int, numel: int):
    from manyhands.collectives.backend.group import ManyhandsGroup
    from manyhands.collectives.backend.session import Session

    if words["engine"] == "gloo":
        return GlooPeer(numel)
    if words["engine"] == "bare":
        return BarePeer(int(words["url"]), rank, size, numel)
    url, run = words["url"], words["run"]
    if words["engine"] == "bare-amqp":
        return BareBrokerPeer(url, run, rank, size, numel, words["wire"])
    if words["engine"] == "rounds":
        opened = RoundsPeer(url, run, size, words["wire"], numel)
        opened.gather()
        return opened
    if run not in groups:
        os.environ["MANYHANDS_RUN"] = run
        session = Session(url, rank, size, 60.0)
        groups[run] = ManyhandsGroup(session, run, range(size), timedelta(seconds=60))
    return TeamPeer(groups[run], words["wire"], numel)


def take_turn(one, rounds: int, rank: int, size: int, numel: int) -> dict:
    import torch
    import torch.distributed as dist

    times, averaged, cpus, main = [], [], 0.0, 0.0
    identical, error = True, 0.0
    threads = Threads()
    for n in range(WARM_UP + rounds):
        if n == WARM_UP:
            threads, before = Threads(), one.bytes_sent
        mine = torch.Generator().manual_seed(1000 * n + rank)
        one.tensor.normal_(generator=mine)
        given = picked(one.tensor)
        dist.barrier()
        cpu, here = time.process_time(), time.thread_time()
        start = time.perf_counter()
        one.average()
        if n >= WARM_UP:
            times.append(time.perf_counter() - start)
            cpus += time.process_time() - cpu
            main += time.thread_time() - here
            averaged.append(have_the_mean(given, picked(one.tensor)))
    taken = threads.since()
    taken["main"] = {"cpu_s": main}  # without the fresh numbers, the barrier and the check
    sent = None if before is None else (one.bytes_sent - before) / rounds
    if one.extra is None:  # the first rounds of all take the memory that later ones use again
        one.extra = memory_of("self", "VmHWM") - one.base
    for n in range(CHECKED):
        mean = torch.zeros(numel, dtype=torch.float64)
        for r in range(size):
            values = torch.empty(numel).normal_(generator=torch.Generator().manual_seed(77 + n + r))
            mean += values
            if r == rank:
                one.tensor.copy_(values)
        dist.barrier()
        one.average()
        error = max(error, float((one.tensor - mean / size).abs().max()))
        digest = hashlib.sha256(one.tensor.numpy().tobytes()).digest()
        said = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        everybody = [torch.empty_like(said) for _ in range(size)]
        dist.all_gather(everybody, said)
        identical &= all(torch.equal(said, other) for other in everybody)
    return {
        "times": times,
        "averaged": averaged,
        "cpu": cpus,
        "threads": taken,
        "sent": sent,
        "identical": identical,
        "error": error,
        "extra": one.extra,
    }


def picked(tensor):
    """A copy of some of its values, from all over it."""
    return tensor[:: max(1, tensor.numel() // PICKED)].clone()


def have_the_mean(given, result) -> bool:
    """Whether all peers have it, by what was `picked` of what each gave and has. All call it."""
    import torch
    import torch.distributed as dist

    both = torch.stack([given, result])
    everybody = [torch.empty_like(both) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, both)
    given_by_all, results = torch.stack(everybody).double().unbind(1)
    return is_mean(given_by_all, results)


def is_mean(given, results) -> bool:
    """Whether each row of `results` is the mean of the rows of `given`; of a NaN nothing is."""
    return bool(((results - given.mean(0)).abs() <= AVERAGED).all())


# -- the whole ------------------------------------------------------------------------------------


def variants(links: list[str], wires: list[str], engines: list[str]) -> list[dict]:
    out = []
    for link in links:
        if link in ("gloo", "bare", "hivemind"):
            out.append({"link": link, "engine": link, "wire": "fp32"})
            continue
        if link == "bare-amqp":
            known = [wire for wire in wires if wire in ("fp32", "bf16")]
            out += [{"link": link, "engine": link, "wire": wire} for wire in known]
            continue
        for engine in engines:
            for wire in wires:
                if link.endswith("+tls") and (engine == "rounds" or wire != "fp32"):
                    continue
                out.append({"link": link, "engine": engine, "wire": wire})
    return out


def rounds_for(mbytes: int, quick: bool) -> int:
    return 3 if quick else max(5, min(16, 320 // mbytes))


def measure(size: int, mbytes: int, plan: list[dict], args, urls: dict, meeting: dict) -> list:
    """All rows of one number of peers and size."""
    ours = [v for v in plan if v["link"] != "hivemind"]
    rows = measure_in_turns(size, mbytes, ours, args, urls, meeting) if ours else []
    if len(ours) < len(plan):
        rows += measure_hivemind(size, mbytes, args)
    return rows


def measure_in_turns(
    size: int, mbytes: int, plan: list[dict], args, urls: dict, meeting: dict
) -> list:
    numel = mbytes * 250_000
    with contextlib.ExitStack() as stack:
        port = free_port()
        crew = [
            stack.enter_context(Worker(__file__, "--peer", rank, size, numel, port))
            for rank in range(size)
        ]
        if any(v["link"] == "bare" for v in plan):
            urls["bare"], pid = stack.enter_context(bare_relay_process(size))
            meeting["bare"] = [pid]
        said: list[list] = [[] for _ in plan]
        tag = os.urandom(3).hex()
        for turn in range(args.turns):
            for n, variant in enumerate(plan):
                pids = meeting.get(variant["link"], [])
                forget_peaks(pids)
                before = cpu_of(pids)
                for worker in crew:
                    worker.say(
                        **variant,
                        name=f"{n}",
                        url=urls.get(variant["link"]),
                        # One for each: links that share a run share memory.
                        run=f"bench-{tag}-{variant['link'].replace('+', '-')}-{variant['engine']}-"
                        + variant["wire"],
                        rounds=rounds_for(mbytes, args.quick),
                        last=turn == args.turns - 1,
                    )
                answers = [worker.hear(crew) for worker in crew]
                answers[0]["meeting_cpu"] = cpu_of(pids) - before
                answers[0]["meeting_peak"] = peaks_of(pids)
                said[n].append(answers)
                tell(size, mbytes, turn, variant, answers)
    rows = [row_of(size, mbytes, variant, turns) for variant, turns in zip(plan, said, strict=True)]
    return [row for row in rows if row is not None]


def measure_hivemind(size: int, mbytes: int, args) -> list:
    """Its row, if it gets that far; what it did before it was given up counts."""
    numel, script = mbytes * 250_000, str(Path(__file__).with_name("hivemind_peer.py"))
    variant = {"link": "hivemind", "engine": "hivemind", "wire": "fp32"}
    said = []
    with contextlib.ExitStack() as stack:
        crew = [
            stack.enter_context(Worker(script, rank, size, numel, free_port()))
            for rank in range(size)
        ]
        try:
            first = crew[0].hear(crew, FOREIGN_TURN_S)
            for worker in crew[1:]:
                worker.say(**first)
            for worker in crew:
                worker.hear(crew, FOREIGN_TURN_S)
            for turn in range(args.turns):
                for worker in crew:
                    worker.say(rounds=rounds_for(mbytes, args.quick), last=turn == args.turns - 1)
                answers = [worker.hear(crew, FOREIGN_TURN_S) for worker in crew]
                answers[0]["meeting_cpu"] = answers[0]["meeting_peak"] = 0  # it has none
                said.append(answers)
                tell(size, mbytes, turn, variant, answers)
        except (TimeoutError, RuntimeError) as error:
            print(f"hivemind is given up for {size} x {mbytes} MB: {error}", file=sys.stderr)
            for worker in crew:
                end_tree(worker.process, patience_s=0.0)
    row = row_of(size, mbytes, variant, said) if said else None
    return [] if row is None else [row]


def tell(size: int, mbytes: int, turn: int, variant: dict, answers: list) -> None:
    print(
        f"{size} peers {mbytes} MB turn {turn + 1} {variant}: "
        f"{1e3 * statistics.median(a['times'][0] for a in answers):.1f} ms",
        file=sys.stderr,
    )


def row_of(size: int, mbytes: int, variant: dict, turns: list) -> dict | None:
    """None if no round has averaged: there is nothing to time."""
    by_turn = [times_of(turn) for turn in turns]
    times = sorted(t for turn in by_turn for t in turn)
    if not times:
        print(f"{variant} averaged in no round of {size} x {mbytes} MB: no row", file=sys.stderr)
        return None
    rounds = sum(len(turn[0]["times"]) for turn in turns)
    all_rounds = rounds + len(turns) * (WARM_UP + CHECKED)
    return {
        "link": variant["link"].removesuffix("+tls"),
        "tls": variant["link"].endswith("+tls"),
        "engine": variant["engine"],
        "peers": size,
        "mbytes": mbytes,
        "wire": variant["wire"],
        "rounds": len(times),
        "void_rounds": rounds - len(times),
        "turns": len(turns),
        "median_s": statistics.median(times),
        "p10_s": quantile(times, 0.1),
        "p90_s": quantile(times, 0.9),
        "turn_medians_s": [statistics.median(turn) if turn else None for turn in by_turn],
        "cpu_s": sum(a["cpu"] for turn in turns for a in turn) / rounds
        + sum(turn[0]["meeting_cpu"] for turn in turns) / all_rounds,
        "meeting_point_cpu_s": sum(turn[0]["meeting_cpu"] for turn in turns) / all_rounds,
        "threads": mean_of_threads((a.get("threads", {}) for turn in turns for a in turn), rounds),
        "bytes_sent_per_peer": median_sent(a for turn in turns for a in turn),
        "identical": all(a["identical"] for turn in turns for a in turn),
        "max_error": max(a["error"] for turn in turns for a in turn),
        "extra_peak_bytes": max(a["extra"] for turn in turns for a in turn),
        "meeting_point_peak_bytes": max(turn[0]["meeting_peak"] for turn in turns),
    }


def times_of(turn: list) -> list[float]:
    """Of the rounds that averaged; each took as long as its slowest peer."""
    slowest = [max(times) for times in zip(*(a["times"] for a in turn), strict=True)]
    averaged = [all(said) for said in zip(*(a["averaged"] for a in turn), strict=True)]
    return [time for time, counts in zip(slowest, averaged, strict=True) if counts]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--link", default="gloo,bare,bare-amqp,hub,hub+tls,door,amqp,amqp+tls,hivemind"
    )
    parser.add_argument("--peers", default="2,4")
    parser.add_argument("--mbytes", default="8,72")
    parser.add_argument("--wire", default="fp32,bf16,int8")
    parser.add_argument("--engine", default="team,rounds")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run at all?")
    args = parser.parse_args()
    links = args.link.split(",")
    if "hivemind" in links and importlib.util.find_spec("hivemind") is None:
        print("hivemind is not installed and left out: pip install '.[bench]'", file=sys.stderr)
        links.remove("hivemind")
    plan = variants(links, args.wire.split(","), args.engine.split(","))
    rows = []
    with contextlib.ExitStack() as stack:
        urls: dict[str, str] = {}
        meeting: dict[str, list[int]] = {}
        for link in {"hub", "hub+tls", "door"} & set(links):
            urls[link], pid = stack.enter_context(
                hub_process(tls=link != "hub", door=link == "door")
            )
            meeting[link] = [pid]
        if {"bare-amqp", "amqp", "amqp+tls"} & set(links):
            urls["amqp"], urls["amqp+tls"], pids = stack.enter_context(tls_broker())
            urls["bare-amqp"] = urls["amqp"]
            meeting |= dict.fromkeys(("bare-amqp", "amqp", "amqp+tls"), pids)
        for mbytes in (int(n) for n in args.mbytes.split(",")):
            for size in (int(n) for n in args.peers.split(",")):
                rows += measure(size, mbytes, plan, args, urls, meeting)
    add_ratios(rows)
    show(rows)
    if args.json:
        result = {"bench": "allreduce", "machine": machine(), "rows": rows}
        store(args.json, result, asked=args.link.split(","))
    if wrong := [r for r in rows if r["link"] != "hivemind" and r["void_rounds"]]:
        sys.exit(f"in {len(wrong)} of {len(rows)} rows there are rounds that did not average")


def add_ratios(rows: list[dict]) -> None:
    """Next to gloo's fp32 of the same run."""
    gloo = {(r["peers"], r["mbytes"]): r["median_s"] for r in rows if r["link"] == "gloo"}
    for row in rows:
        base = gloo.get((row["peers"], row["mbytes"]))
        row["times_gloo"] = row["median_s"] / base if base else None


def show(rows: list[dict]) -> None:
    for r in rows:
        ratio = f"{r['times_gloo']:.2f}x gloo" if r["times_gloo"] else ""
        void = f" void {r['void_rounds']} rounds of {r['rounds'] + r['void_rounds']}"
        print(
            f"{r['link'] + ('+tls' if r['tls'] else ''):9}{r['engine']:8}{r['peers']:2} peers "
            f"{r['mbytes']:3} MB {r['wire']:5}{1e3 * r['median_s']:8.1f} ms "
            f"({1e3 * r['p10_s']:.1f}-{1e3 * r['p90_s']:.1f}) {ratio:12} cpu {r['cpu_s']:.3f} s "
            f"extra {r['extra_peak_bytes'] / 1e6:.0f} MB same {r['identical']} "
            f"error {r['max_error']:.1e}{void * bool(r['void_rounds'])}"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peer"]:
        peer(*(int(word) for word in sys.argv[2:]))
    else:
        with guarded():
            main()
