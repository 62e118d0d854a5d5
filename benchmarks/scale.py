"""Whether a round of a large model keeps within its memory, through a RabbitMQ on this machine.

    python benchmarks/scale.py --parameters 1.4e9 --rounds 5 --json FILE

Two peers, each a process with 30 bfloat16 tensors of that many parameters together, average them
in each round with the elastic engine (raw: bytes travel as they lie in memory). A peer's memory is
counted from the moment when its tensors are filled and nothing else is there: `extra_peak_bytes` is
what it has had more than then, from the first round with all members until the last one's mean has
been read back into the tensors, with link, queues and threads. It may be one result buffer of the
tensors' size and 128 MiB. The broker may take 1 GiB in all, joining included. Contributions are
simple functions of the index, so the mean is known, and every value is compared.

The second peer joins as any does: it follows a round of the founder's, which confirms its state,
and the next, which takes it in. `joining_peak_bytes` is the most extra memory until then: one that
follows may hold two results (docs/rounds.md, Memory). It only watches the first of these, and who
watches holds nobody up: so that it does not fall behind, the founder contributes tensor by tensor,
at `FOLLOWED_BYTES_PER_S`. Neither is timed. Ends with an error if a bound or a value is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from pathlib import Path

from guardian import guarded
from harness import Worker, cpu_of, forget_peaks, machine, memory_of, peaks_of, quantile

PEERS = 2
TENSORS = 30
SPARE_BYTES = 128 << 20  # what a peer may take besides one result
BROKER_BYTES = 1 << 30
FOLLOWED_BYTES_PER_S = 200e6
WATCH_BYTES = 256 << 20  # must hold the largest tensor: that is sent in one go
PERIODS = (127, 113)  # of the two contributions: no two parts of a tensor look alike
JOIN_S = 120.0
ROUND_S = 600.0


# -- one peer -------------------------------------------------------------------------------------


class Pattern:
    """A function of the index with a period, as bfloat16 values that are all exact."""

    CHUNK = 1 << 18

    def __init__(self, which: int | None) -> None:
        """Of that rank's contribution; without one, of the mean."""
        import torch

        period = PERIODS[0] * PERIODS[1]
        index = torch.arange(period)
        parts = (index % PERIODS[0], index // PERIODS[0])
        values = sum(parts) / PEERS if which is None else parts[which]
        self._period = period
        self._values = values.to(torch.bfloat16).repeat(self.CHUNK // period + 2)

    def chunks(self, tensors):
        """Pieces of the tensors, each with what the pattern is there."""
        start = 0
        for tensor in tensors:
            for piece in tensor.split(self.CHUNK):
                at = start % self._period
                yield piece, self._values[at : at + piece.numel()]
                start += piece.numel()


def fill(tensors, rank: int) -> None:
    for piece, values in Pattern(rank).chunks(tensors):
        piece.copy_(values)


def count_wrong(tensors) -> int:
    """Values that are not the mean."""
    return sum(int((piece != values).sum()) for piece, values in Pattern(None).chunks(tensors))


def sizes_of(parameters: int) -> list[int]:
    """Tensors of unequal sizes, as those of a model are."""
    shares = [1 + n % 3 for n in range(TENSORS)]
    sizes = [parameters * share // sum(shares) for share in shares]
    sizes[-1] += parameters - sum(sizes)
    return sizes


class ScalePeer:
    """Its tensors, and the engine that averages them."""

    def __init__(self, rank: int, parameters: int) -> None:
        import torch

        torch.set_num_threads(1)
        self._rank = rank
        self._tensors = [torch.empty(n, dtype=torch.bfloat16) for n in sizes_of(parameters)]
        self.num_bytes = sum(tensor.nbytes for tensor in self._tensors)
        fill(self._tensors, rank)

    def join(self, url: str, run: str) -> None:
        """From here on memory counts."""
        from manyhands.collectives.mail import Mail
        from manyhands.collectives.rounds import Rounds
        from manyhands.links.base import LinkSettings, open_link
        from manyhands.links.messages import Terms

        forget_peaks(["self"])
        self._base = memory_of("self", "VmRSS")
        mail = Mail()
        settings = LinkSettings(terms=Terms(watch_bytes=WATCH_BYTES))
        self._link = open_link(url, run=run, place=mail, settings=settings)
        self._rounds = Rounds(
            self._link, self._tensors, num_samples=lambda r: PEERS, wire="fp32", mail=mail
        )
        self._rounds.start()
        self._rounds.offer_state(0, b"")

    def wait_for(self, peers: int, *states) -> None:
        """Until so many are there, in one of these states; in any, if none is given."""
        deadline = time.monotonic() + JOIN_S
        while self._rounds.view is None or len(self._rounds.view.peers(*states)) < peers:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{peers} peers were to be there by now")
            time.sleep(0.02)

    def begin(self) -> int:
        """Until everybody is a member; returns the most extra memory until then."""
        self._seek_task()
        extra = self._extra()
        forget_peaks(["self"])
        return extra

    def _extra(self) -> int:
        return memory_of("self", "VmHWM") - self._base

    def _seek_task(self) -> None:
        self._task = None
        while self._task is None:
            self._step()

    def _step(self):
        """One outcome; a commit is returned."""
        from manyhands.collectives.outcomes import Committed, Stopped, Task

        match self._rounds.next(ROUND_S):
            case Task() as task if len(self._rounds.members) == PEERS:
                self._task = task
            case Task() as task:  # the founder's
                self._be_followed(task)
            case Committed() as committed if len(committed.sums[0].contributions) == PEERS:
                return committed
            case Committed() as committed:
                committed.result.close()
            case Stopped() as stopped:
                raise RuntimeError(stopped.text)
        return None

    def _be_followed(self, task) -> None:
        """A round alone: the first at the pace of one that watches, the next as fast as can be."""
        from manyhands.core.peers import PeerState

        opened = self._rounds.open_pass(task, self._tensors, weight=1.0)
        if task.round == 0:
            for n in reversed(range(TENSORS)):
                opened.ready(n)
                time.sleep(self._tensors[n].nbytes / FOLLOWED_BYTES_PER_S)
        else:
            self.wait_for(PEERS, PeerState.ACTIVE)
        opened.done()

    def average(self) -> dict:
        """One round; the tensors are what is averaged, and then the mean."""
        fill(self._tensors, self._rank)
        sent, cpu, start = self._link.bytes_sent, time.process_time(), time.perf_counter()
        self._rounds.contribute(self._task, self._tensors, weight=1.0)
        while (committed := self._step()) is None:
            pass
        committed.result.read_into(self._tensors)
        committed.result.close()
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        sent = self._link.bytes_sent - sent
        extra = self._extra()
        wrong = count_wrong(self._tensors)
        self._seek_task()
        return {"seconds": seconds, "cpu": cpu, "sent": sent, "extra": extra, "wrong": wrong}


def peer(rank: int, parameters: int, url: str, run: str) -> None:
    """Go on with each line of standard input."""

    def say(**words: object) -> None:
        print(json.dumps(words), flush=True)

    one = ScalePeer(rank, parameters)
    say(num_bytes=one.num_bytes)
    sys.stdin.readline()
    one.join(url, run)
    one.wait_for(rank + 1)
    say(joined=True)
    sys.stdin.readline()
    say(extra=one.begin())
    for _ in sys.stdin:
        say(**one.average())
    os._exit(0)  # nobody is left to say goodbye to


# -- the whole ------------------------------------------------------------------------------------


def measure(parameters: int, rounds: int, url: str, broker_pids: list[int]) -> dict:
    run = f"scale-{os.urandom(4).hex()}"
    with contextlib.ExitStack() as stack:
        forget_peaks(broker_pids)
        crew = [
            stack.enter_context(Worker(__file__, "--peer", rank, parameters, url, run))
            for rank in range(PEERS)
        ]
        (num_bytes,) = {worker.hear()["num_bytes"] for worker in crew}
        for worker in crew:  # one after the other: the first founds the run
            worker.say(join=True)
            worker.hear()
        for worker in crew:
            worker.say(begin=True)
        joining = max(worker.hear(crew)["extra"] for worker in crew)
        turns, broker_cpu = [], cpu_of(broker_pids)
        for n in range(rounds):
            for worker in crew:
                worker.say(round=n)
            turns.append([worker.hear() for worker in crew])
            print(
                f"round {n + 1}: {max(a['seconds'] for a in turns[-1]):.2f} s, extra "
                f"{[round(a['extra'] / 2**20) for a in turns[-1]]} MiB",
                file=sys.stderr,
            )
        broker_cpu = (cpu_of(broker_pids) - broker_cpu) / rounds
        broker_peak = peaks_of(broker_pids)
    times = sorted(max(a["seconds"] for a in turn) for turn in turns)
    return {
        "link": "amqp",
        "tls": False,
        "engine": "rounds",
        "peers": PEERS,
        "parameters": parameters,
        "tensors": TENSORS,
        "dtype": "bfloat16",
        "mbytes": num_bytes / 1e6,
        "wire": "raw bf16",
        "rounds": rounds,
        "median_s": statistics.median(times),
        "p10_s": quantile(times, 0.1),
        "p90_s": quantile(times, 0.9),
        "round_s": [max(a["seconds"] for a in turn) for turn in turns],
        "cpu_s": sum(a["cpu"] for turn in turns for a in turn) / rounds + broker_cpu,
        "meeting_point_cpu_s": broker_cpu,
        "bytes_sent_per_peer": statistics.median(a["sent"] for turn in turns for a in turn),
        "identical": not any(a["wrong"] for turn in turns for a in turn),
        "wrong_values": sum(a["wrong"] for turn in turns for a in turn),
        "extra_peak_bytes": max(a["extra"] for turn in turns for a in turn),
        "extra_bound_bytes": num_bytes + SPARE_BYTES,
        "joining_peak_bytes": joining,
        "joining_bound_bytes": 2 * num_bytes + SPARE_BYTES,
        "meeting_point_peak_bytes": broker_peak,
        "meeting_point_bound_bytes": BROKER_BYTES,
    }


def verdicts(row: dict) -> dict[str, bool]:
    """What has to hold."""
    return {
        "every value is the mean": row["wrong_values"] == 0,
        "a peer's extra memory": row["extra_peak_bytes"] <= row["extra_bound_bytes"],
        "a newcomer's": row["joining_peak_bytes"] <= row["joining_bound_bytes"],
        "the broker's memory": row["meeting_point_peak_bytes"] < row["meeting_point_bound_bytes"],
    }


def show(row: dict) -> None:
    print(
        f"{row['peers']} peers, {row['parameters'] / 1e6:g} M parameters in bfloat16, "
        f"{row['mbytes']:.0f} MB: {row['median_s']:.2f} s a round ({row['p10_s']:.2f} to "
        f"{row['p90_s']:.2f}, {row['rounds']} rounds), cpu {row['cpu_s']:.2f} s"
    )
    details = {
        "every value is the mean": f"{row['wrong_values']} wrong",
        "a peer's extra memory": mib(row["extra_peak_bytes"], row["extra_bound_bytes"]),
        "a newcomer's": mib(row["joining_peak_bytes"], row["joining_bound_bytes"]),
        "the broker's memory": mib(
            row["meeting_point_peak_bytes"], row["meeting_point_bound_bytes"]
        ),
    }
    for what, holds in verdicts(row).items():
        print(f"{'PASS' if holds else 'FAIL'}  {what}: {details[what]}")


def mib(value: int, bound: int) -> str:
    return f"{value / 2**20:.0f} MiB of {bound / 2**20:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="a small model: does it run at all?")
    args = parser.parse_args()
    parameters = int(args.parameters or (2e7 if args.quick else 1.4e9))
    from manyhands.testing.broker import Broker

    with Broker() as broker:
        row = measure(parameters, args.rounds, broker.url(), list(broker.process_ids()))
    show(row)
    if args.json:
        result = {"bench": "scale", "machine": machine(), "rows": [row]}
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(0 if all(verdicts(row).values()) else 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peer"]:
        peer(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
    else:
        with guarded():
            main()
