"""Random deaths, stops, departures and arrivals among peers over a real link.

    python -m tests.collectives.chaos_links --seconds 60 --link hub --seed 7

Four processes take part at a time. The dice are seeded, so a schedule can be repeated; what it
meets depends on the machine. The oracle is that of all tests of rounds: whatever was committed
anywhere is what one process would have computed, and equal rounds have equal chains.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from contextlib import ExitStack, contextmanager, suppress

import msgspec

from manyhands.links.hub import Hub
from manyhands.testing.broker import Broker
from tests.collectives.rounds_kit import STEADY, check_histories
from tests.collectives.rounds_peer import PeerProcess, Zygote

# A lease that a busy machine does not miss by itself, and that a stopped peer soon does.
TERMS = msgspec.structs.replace(STEADY, lease_s=3.0)
NUM_PEERS = 4
PATIENCE_S = 60.0


class Chaos:
    """One run under random faults."""

    def __init__(self, zygote: Zygote, url: str, run: str, seed: int, stack: ExitStack) -> None:
        self._zygote, self._url, self._run, self._stack = zygote, url, run, stack
        self._dice = random.Random(seed)
        self.peers: list[PeerProcess] = []
        self._stopped: list[tuple[float, PeerProcess]] = []  # and until when
        self._leaving: set[str] = set()
        self.counts = dict.fromkeys(("kill", "stop", "leave", "join"), 0)

    def go(self, seconds: float, num_faults: int) -> None:
        """Play for so long, and until there were so many; let the rest finish, ask the oracle."""
        self._join(brings=True)
        self.peers[0].until(lambda said: "task" in said)
        start_s = time.monotonic()
        while time.monotonic() < start_s + seconds or sum(self.counts.values()) < num_faults:
            assert time.monotonic() < start_s + seconds + PATIENCE_S, self.counts
            time.sleep(self._dice.uniform(0.05, 0.8))
            self._wake(time.monotonic())
            self._play()
        self._wake(float("inf"))
        self._finish()

    def _finish(self) -> None:
        while not self._members():  # whoever was taken in last may not have committed yet
            time.sleep(0.05)
        for peer in self._alive():
            with suppress(OSError):  # stopped for too long, and woken: it has just found out
                peer.tell("leave")
        left = 0
        for peer in self.peers:
            if not peer.ended or peer.history.stopped:
                said = peer.until(lambda said: "stopped" in said, PATIENCE_S)
                peer.wait(PATIENCE_S)
                left += said["stopped"] in ("left", "finished")
        assert left, "somebody must be left at the end"
        dead = [p.name for p in self.peers if not self._ended_well(p)]
        check_histories([p.history for p in self.peers], None, dead=dead)

    def _ended_well(self, peer: PeerProcess) -> bool:
        stopped = peer.history.stopped
        return stopped is not None and stopped["stopped"] in ("left", "finished")

    def _join(self, *, brings: bool = False) -> None:
        self.counts["join"] += 1
        peer = PeerProcess(
            self._zygote,
            f"p{len(self.peers)}",
            url=self._url,
            run=self._run,
            points=(),
            pace_s=self._dice.uniform(0.02, 0.15),
            terms=msgspec.to_builtins(TERMS),
            taker={"num_rounds": None, "brings": brings},
        )
        self._stack.callback(peer.close)
        self.peers.append(peer)

    def _alive(self) -> list[PeerProcess]:
        return [p for p in self.peers if not p.ended and p.history.stopped is None]

    def _members(self) -> list[PeerProcess]:
        """Those that are well, and have the state."""
        away = {peer.name for _, peer in self._stopped} | self._leaving
        well = [p for p in self._alive() if p.name not in away]
        return [p for p in well if p.history.committed and p.history.committed[-1]["member"]]

    def _play(self) -> None:
        if len(self._alive()) < NUM_PEERS:
            return self._join()
        members = self._members()
        if len(members) < 3:  # two must stay, or the run is lost, which is another test's matter
            return None
        victim = self._dice.choice(members)
        what = self._dice.choice(("kill", "kill", "stop", "stop", "leave"))
        self.counts[what] += 1
        if what == "kill":
            victim.kill()
        elif what == "leave":
            self._leaving.add(victim.name)
            victim.tell("leave")
        else:  # sometimes past its lease
            victim.stop()
            self._stopped.append((time.monotonic() + self._dice.uniform(0.2, 5.0), victim))
        return None

    def _wake(self, now: float) -> None:
        for until, peer in list(self._stopped):
            if now >= until:
                peer.go_on()
                self._stopped.remove((until, peer))


def play(zygote: Zygote, url: str, seed: int, seconds: float, num_faults: int = 0) -> Chaos:
    with ExitStack() as stack:
        chaos = Chaos(zygote, url, f"chaos-{os.getpid()}-{time.monotonic_ns()}", seed, stack)
        chaos.go(seconds, num_faults)
    return chaos


@contextmanager
def meeting_point(link: str):
    if link == "hub":
        with Hub("127.0.0.1:0", insecure=True) as hub:
            yield f"{hub.address}?insecure=1"
    else:
        with Broker() as broker:
            yield broker.url()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--link", choices=("hub", "amqp"), default="hub")
    parser.add_argument("--seed", type=int, default=None)
    given = parser.parse_args()
    seed = random.randrange(1 << 31) if given.seed is None else given.seed
    deadline = time.monotonic() + given.seconds
    zygote = Zygote()
    try:
        with meeting_point(given.link) as url:
            while (left := deadline - time.monotonic()) > 0:
                print(f"{given.link} --seed {seed}", end=" ", flush=True)
                chaos = play(zygote, url, seed, min(30.0, left))
                rounds = max(len(peer.history.rounds) for peer in chaos.peers)
                print(f"at most {rounds} rounds in one life; {chaos.counts}", flush=True)
                seed += 1
    finally:
        zygote.close()


if __name__ == "__main__":
    main()
