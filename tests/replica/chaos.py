"""A training under faults: what they cost, and that nothing else comes of them.

    python -m tests.replica.chaos --seconds 600 --link hub --seed 7 --json FILE

Eight processes train one net (`chaos_peer`). After a calm time there is a fault every `--every`
seconds. Whom, which and how long is drawn from the seed; every kind has its turn.

    kill        kill -9; another peer joins at once
    leave       SIGTERM; another peer joins at once
    blip        its connections break, and can be made again at once
    cut         its connections break, and for longer than its lease none can be made
    stall       its network lets nothing through, and says nothing, for longer than its lease
    stop        SIGSTOP, and SIGCONT after more than its lease
    stop+kill   SIGSTOP, kill -9 after more than its lease; then another peer joins

Goodput is what was committed of what could have been: samples / (alive time x fault-free rate).

- Alive is a peer that could compute: from the moment that its process was told to start (it has
  its imports) until it ended, but for the time that it was stopped, or cut off. So all counts as
  lost that the survivors wait for, or do again, and that a newcomer or one that comes back needs
  until it computes; what counts for nothing is only the time that a fault itself takes from one.
- The fault-free rate is that of this run in the calm time, for each peer. A pass waits in
  proportion to its samples, so it would be the same for fewer peers.
- A fault's time is from the last commit before it to the last one before the next.
- Seconds lost: of all peers alive, what is missing by the fault-free rate.
- Afterwards: goodput of the last third of a fault's time, when nothing goes on any more. It is
  no part of a promise: where it is not 100 %, the machine is not as fast as in the calm time.

Whatever happens, each sample of each epoch counts once, all peers have equal states after each
round, and the losses are those of one process: the run fails if not. What a fault may cost
(`PROMISES`) is judged by the command line alone, since it depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch

from manyhands.core.address import parse_address
from manyhands.testing.proxy import Proxy
from tests.collectives.chaos_links import meeting_point
from tests.collectives.rounds_peer import PeerProcess, Zygote
from tests.replica.chaos_peer import CALENDAR, NUM_PEERS, PASS_S, SAMPLE_S, alone

PROGRAM = "tests.replica.chaos_peer"
LEASE_S = 3.0
DECK = ("kill", "kill", "leave", "blip", "cut", "stall", "stop", "stop+kill")
SILENT = ("stall", "stop", "stop+kill")
KILL_GOODPUT = 0.97
SILENT_S = LEASE_S + 1.0
WARM_UP_S = 2.0  # until shares follow speeds
PATIENCE_S = 30.0  # without a commit
TOLERANCE = 1e-9  # of a loss
_LOOK_S = 0.02


@dataclass
class Hand:
    """One peer, and its network."""

    process: PeerProcess
    proxy: Proxy
    alive: list[list[float]] = field(default_factory=list)  # from, to
    dead: bool = False
    read: int = 0  # of what it has said

    def live(self, since_s: float | None = None) -> None:
        self.alive.append([since_s or time.monotonic(), float("inf")])

    def fall(self) -> None:
        self.alive[-1][1] = min(self.alive[-1][1], time.monotonic())

    @property
    def away(self) -> list[float]:
        """When each of its absences ended."""
        returns = [since_s for since_s, _ in self.alive[1:]]
        return [*returns, float("inf")] if self.dead else returns


@dataclass
class Fault:
    """One of them, and what has come of it."""

    kind: str
    victim: str
    start_s: float
    comes: str | None = None  # who is to compute next, or again
    pause_s: float = 0.0  # longest time without a commit
    back_s: float | None = None  # until who comes has computed
    samples: int = 0
    could_be: float = 0.0
    lost_s: float = 0.0
    after: float = 0.0  # goodput of the last third


@dataclass(frozen=True)
class Commit:
    """A round that is done, as one that was first to say so."""

    at_s: float
    shares: dict[str, list[list[int]]]


class Chaos:
    """One run under faults."""

    def __init__(
        self, zygote: Zygote, url: str, seed: int, deck: Sequence[str], stack: ExitStack
    ) -> None:
        self._zygote, self._url, self._stack = zygote, url, stack
        self._deck = deck
        self._run = f"chaos-{os.getpid()}-{time.monotonic_ns()}"
        self._dice = random.Random(seed)
        self.hands: dict[str, Hand] = {}
        self.commits: dict[int, Commit] = {}  # by round, in order
        self.faults: list[Fault] = []
        self.rate = 0.0  # samples a second and peer
        self._last_s = time.monotonic()  # of the newest commit

    def go(self, seconds: float, every_s: float) -> None:
        """All of it: returns when the last peer has ended, and nothing was wrong."""
        for _ in range(NUM_PEERS):
            self._join(min_peers=NUM_PEERS)
        while len(self._members()) < NUM_PEERS:
            self._rest(_LOOK_S)
        self._rest(WARM_UP_S)
        begin_s = time.monotonic()
        calm_s = self._last_s
        self._rest(every_s)
        while self._last_s <= calm_s:  # a rate needs two commits
            self._rest(_LOOK_S)
        self.rate = self._samples(calm_s, self._last_s) / self._alive(calm_s, self._last_s)
        best = 1 / SAMPLE_S
        print(f"calm: {self.rate:.0f} samples/s and peer; the waits alone would allow {best:.0f}")
        for number, kind in zip(range(2, int(seconds / every_s) + 1), self._kinds(), strict=False):
            self.faults.append(self._fault(kind, begin_s + number * every_s))
            print(f"{time.monotonic() - begin_s:6.1f} s  {told(self.faults[-1])}", flush=True)
        self._await_all()
        self._finish()
        check([History(h.process.name, h.process.said, h.away) for h in self.hands.values()])

    # -- faults ---------------------------------------------------------------------------------

    def _kinds(self) -> Iterator[str]:
        while True:
            yield from self._dice.sample(self._deck, len(self._deck))

    def _fault(self, kind: str, next_s: float) -> Fault:
        victim = self.hands[self._dice.choice(sorted(self._members()))]
        hold_s = LEASE_S + self._dice.uniform(0.5, 1.5)
        process, proxy = victim.process, victim.proxy
        fault = Fault(kind, process.name, self._last_s)
        match kind:
            case "kill":
                self._kill(victim)
                fault.comes = self._join()
            case "leave":
                process.tell("terminate")
                fault.comes = self._join()
            case "blip":
                proxy.cut()
            case "cut":
                victim.fall()
                proxy.refuse()
                proxy.cut()
                self._rest(hold_s)
                proxy.accept()
                victim.live()
                fault.comes = process.name
            case "stall":
                victim.fall()
                proxy.stall()
                self._rest(hold_s)
                proxy.go()
                victim.live()
                fault.comes = process.name
            case "stop" | "stop+kill":
                victim.fall()
                process.stop()
                self._rest(hold_s)
                if kind == "stop":
                    victim.live()
                    process.go_on()
                    fault.comes = process.name
                else:
                    self._kill(victim)
                    fault.comes = self._join()
        self._rest(max(0.0, next_s - time.monotonic()))
        self._measure(fault, self._last_s if self._last_s > fault.start_s else time.monotonic())
        return fault

    def _join(self, min_peers: int = 1) -> str:
        address = parse_address(self._url)
        proxy = self._stack.enter_context(Proxy(address.host, address.port))
        name = f"p{len(self.hands)}"
        orders = {
            "url": self._url.replace(f":{address.port}/", f":{proxy.port}/"),
            "run": self._run,
            "name": name,
            "min_peers": min_peers,
            "lease_s": LEASE_S,
        }
        since_s = time.monotonic()
        process = PeerProcess(self._zygote, name, program=PROGRAM, points=[], train=orders)
        self._stack.callback(process.close)
        self.hands[name] = Hand(process, proxy)
        self.hands[name].live(since_s)
        return name

    def _kill(self, hand: Hand) -> None:
        hand.dead = True
        hand.fall()
        hand.process.kill()

    def _await_all(self) -> None:
        """Whoever was away, or came in the place of another, computes again."""
        until_s = time.monotonic() + PATIENCE_S
        while len(members := self._members()) < NUM_PEERS:
            if time.monotonic() > until_s:
                away = {name for name, hand in self.hands.items() if not hand.process.ended}
                reports = [self.hands[name].process.report() for name in sorted(away - members)]
                raise AssertionError(f"not back after {PATIENCE_S:g} s\n{reports}")
            self._rest(_LOOK_S)

    def _finish(self) -> None:
        for hand in self.hands.values():
            if not hand.process.ended:
                hand.process.tell("terminate")
        for hand in self.hands.values():
            assert hand.dead or hand.process.wait(PATIENCE_S) == 0, hand.process.report()
        self._read()

    # -- what they say --------------------------------------------------------------------------

    def _rest(self, seconds: float) -> None:
        """Let them train; fails if they do not."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            time.sleep(min(_LOOK_S, max(0.0, until_s - time.monotonic())))
            self._read()
            if time.monotonic() > self._last_s + PATIENCE_S:
                self._give_up()

    def _give_up(self) -> None:
        for hand in self.hands.values():
            if not hand.dead and not hand.process.ended:
                hand.process.go_on()
                os.kill(hand.process.pid, signal.SIGUSR1)  # its stacks
        time.sleep(1.0)
        reports = "\n\n".join(h.process.report() for h in self.hands.values() if not h.dead)
        raise AssertionError(f"no commit for {PATIENCE_S:g} s\n{reports}")

    def _read(self) -> None:
        for hand in self.hands.values():
            news = hand.process.said[hand.read :]
            hand.read += len(news)
            for said in news:
                if "ended" in said:
                    hand.fall()
                if "round" in said:
                    self.commits.setdefault(said["round"], Commit(said["at_s"], said["shares"]))
            assert hand.dead or not hand.process.ended or _has_left(hand), hand.process.report()
        if self.commits:
            self._last_s = self.commits[max(self.commits)].at_s

    def _members(self) -> set[str]:
        """Who has computed the newest round, and is there."""
        if not self.commits:
            return set()
        shares = self.commits[max(self.commits)].shares
        return {n for n, spans in shares.items() if spans and not self.hands[n].process.ended}

    # -- what it cost ---------------------------------------------------------------------------

    def _samples(self, start_s: float, end_s: float) -> int:
        return committed_between(start_s, end_s, self.commits)

    def _alive(self, start_s: float, end_s: float) -> float:
        spans = [span for hand in self.hands.values() for span in hand.alive]
        return overlap_s(start_s, end_s, spans)

    def _measure(self, fault: Fault, end_s: float) -> None:
        start_s = fault.start_s
        alive_s = self._alive(start_s, end_s)
        fault.samples, fault.could_be = self._samples(start_s, end_s), self.rate * alive_s
        lost = fault.could_be - fault.samples
        fault.lost_s = lost / (self.rate * alive_s / (end_s - start_s))
        times = sorted(c.at_s for c in self.commits.values() if start_s <= c.at_s <= end_s)
        late_s = max(at_s for at_s in times if at_s <= end_s - (end_s - start_s) / 3)
        could_be = self.rate * self._alive(late_s, end_s)
        fault.after = self._samples(late_s, end_s) / could_be
        fault.pause_s = max(b - a for a, b in pairwise([*times, end_s]))
        if fault.comes:
            could_s = self.hands[fault.comes].alive[-1][0]
            mine = [c.at_s for c in self.commits.values() if c.shares.get(fault.comes)]
            fault.back_s = min((at_s - could_s for at_s in mine if at_s > could_s), default=None)

    def pauses(self, *kinds: str) -> list[float]:
        """After each fault of these kinds: the longest time without a commit that began before the
        next fault, however long after that it ended.
        """
        gaps = list(pairwise(commit.at_s for _, commit in sorted(self.commits.items())))
        ends = [*(fault.start_s for fault in self.faults[1:]), float("inf")]
        return [
            max(b - a for a, b in gaps if a == fault.start_s or fault.start_s < a < end_s)
            for fault, end_s in zip(self.faults, ends, strict=True)
            if fault.kind in kinds
        ]

    def rows(self) -> list[dict]:
        """Of each kind of fault."""
        rows = []
        for kind in dict.fromkeys(DECK):
            faults = [fault for fault in self.faults if fault.kind == kind]
            if faults:
                back = [f.back_s for f in faults if f.back_s is not None]
                rows.append(
                    {
                        "kind": kind,
                        "faults": len(faults),
                        "goodput": sum(f.samples for f in faults) / sum(f.could_be for f in faults),
                        "lost_s": statistics.mean(f.lost_s for f in faults),
                        "lost_most_s": max(f.lost_s for f in faults),
                        "pause_s": statistics.median(f.pause_s for f in faults),
                        "pause_most_s": max(f.pause_s for f in faults),
                        "back_s": statistics.median(back) if back else None,
                        "back_most_s": max(back) if back else None,
                        "after": statistics.mean(f.after for f in faults),
                        "never_back": sum(f.comes is not None and f.back_s is None for f in faults),
                    }
                )
        return rows


# -- what is made of it ---------------------------------------------------------------------------


@dataclass(frozen=True)
class History:
    """All that a peer has said.

    `away`: when each of its absences ended, which for the dead is never. Of the last round that it
    saw before one, it may have been the only one to have the result; the others then did it anew.
    """

    name: str
    said: Sequence[dict]
    away: Sequence[float] = ()


def check(histories: Sequence[History], losses: Sequence[float] | None = None) -> None:
    """The same run as one process's: its samples, its losses, one state after each round."""
    rounds = {one["round"] for history in histories for one in history.said if "round" in one}
    assert sorted(rounds) == list(range(len(rounds))), "a round is missing"
    losses = losses or alone(len(rounds))
    states: dict[int, str] = {}
    for history in histories:
        said = [one for one in history.said if "round" in one]
        before = [[one for one in said if one["at_s"] < back_s] for back_s in history.away]
        own = [seen[-1] for seen in before if seen]
        for one in said:
            number = one["round"]
            spans = [span for spans in one["shares"].values() for span in spans]
            counted = sorted(sample for span in spans for sample in range(*span))
            whole = list(range(CALENDAR.num_samples(number)))
            assert counted == whole, f"not all samples, or one twice: {history.name} {one}"
            off = abs(one["loss"] - losses[number])
            assert off < TOLERANCE, f"the loss is {off} off: {history.name} {one}"
            if not any(one is its for its in own):
                state = states.setdefault(number, one["state"])
                assert one["state"] == state, f"another state after it: {history.name} {one}"


def committed_between(start_s: float, end_s: float, commits: Mapping[int, Commit]) -> int:
    """Samples of the rounds that were committed after `start_s`, and not after `end_s`."""
    rounds = (number for number, commit in commits.items() if start_s < commit.at_s <= end_s)
    return sum(map(CALENDAR.num_samples, rounds))


def overlap_s(start_s: float, end_s: float, spans: Iterable[Sequence[float]]) -> float:
    """Seconds of these spans within that time, together."""
    return sum(max(0.0, min(end_s, to) - max(start_s, since)) for since, to in spans)


def _has_left(hand: Hand) -> bool:
    return any("ended" in said for said in hand.process.said[-2:])


def told(fault: Fault) -> str:
    goodput = fault.samples / fault.could_be
    text = f"{fault.kind:10}{fault.victim:4} goodput {goodput:6.1%}, {fault.lost_s:5.2f} s lost"
    text += f", longest pause {fault.pause_s:.2f} s"
    if fault.comes:
        when = "not back" if fault.back_s is None else f"back after {fault.back_s:.2f} s"
        text += f", {fault.comes} {when}"
    return f"{text}, afterwards {fault.after:.1%}"


def broken(rows: Sequence[dict]) -> list[str]:
    """What was promised and is not so."""
    found = []
    for row in rows:
        if row["kind"] == "kill" and row["goodput"] < KILL_GOODPUT:
            found.append(f"goodput of kill -9 is {row['goodput']:.1%}, not {KILL_GOODPUT:.0%}")
        if row["kind"] in SILENT and row["lost_most_s"] > SILENT_S:
            found.append(f"{row['kind']} cost {row['lost_most_s']:.2f} s, not {SILENT_S:g} at most")
        if row["never_back"]:
            found.append(f"{row['never_back']} of {row['faults']} {row['kind']}: nobody came back")
    return found


def show(rows: Sequence[dict]) -> None:
    print(f"{'':10}faults  goodput  afterwards  s lost (most)  pause s (most)  back after s (most)")
    for row in rows:
        back = "" if row["back_s"] is None else f"{row['back_s']:8.2f} ({row['back_most_s']:.2f})"
        print(
            f"{row['kind']:10}{row['faults']:6}{row['goodput']:9.1%}{row['after']:12.1%}"
            f"{row['lost_s']:8.2f} ({row['lost_most_s']:.2f})"
            f"{row['pause_s']:9.2f} ({row['pause_most_s']:.2f}){back:>16}"
        )


def play(
    zygote: Zygote,
    url: str,
    *,
    seed: int,
    seconds: float,
    every_s: float,
    deck: Sequence[str] = DECK,
) -> Chaos:
    """Faults of all kinds in the deck, those that come twice in it twice as often."""
    with ExitStack() as stack:
        chaos = Chaos(zygote, url, seed, deck, stack)
        chaos.go(seconds, every_s)
    return chaos


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--every", type=float, default=15, help="seconds from fault to fault")
    parser.add_argument("--link", choices=("hub", "amqp"), default="hub")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    seed = random.randrange(1 << 31) if given.seed is None else given.seed
    print(f"--link {given.link} --seed {seed}", flush=True)
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    zygote = Zygote(PROGRAM, "torch._dynamo")
    try:
        with meeting_point(given.link) as url:
            chaos = play(zygote, url, seed=seed, seconds=given.seconds, every_s=given.every)
    finally:
        zygote.close()
    rows = chaos.rows()
    print(f"{len(chaos.commits)} rounds: each sample once, equal states, the losses of one process")
    show(rows)
    if given.json:
        given.json.write_text(json.dumps(result(given.link, seed, chaos, rows), indent=1) + "\n")
    if found := broken(rows):
        sys.exit("\n".join(found))


def result(link: str, seed: int, chaos: Chaos, rows: list[dict]) -> dict:
    machine = {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    calm = {"peers": NUM_PEERS, "pass_s": PASS_S, "samples_per_s_and_peer": chaos.rate}
    rows = [{"link": link, "seed": seed, "lease_s": LEASE_S, **calm, **row} for row in rows]
    return {"bench": "chaos", "machine": machine, "rows": rows}


if __name__ == "__main__":
    main()
