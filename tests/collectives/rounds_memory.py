"""One member that measures what rounds cost it in memory, besides the tensors themselves.

    python -m tests.collectives.rounds_memory URL RUN NAME NUM MIB NUM_ROUNDS WIRE LATE_S DTYPE

It is one of NUM, with tensors of MIB and DTYPE. Prints one JSON object: `base` is what the process
has resident with the tensors and the engine in place, before any round; `peaks` the most it had
resident during each round since, in bytes; `member` of each round whether this peer took part in
it, or just followed; `founder`: it was the member of the first rounds, which the others followed.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from manyhands.collectives.mail import Mail
from manyhands.collectives.outcomes import Committed, Stopped, Task
from manyhands.collectives.rounds import Rounds
from manyhands.core.peers import PeerState
from manyhands.links.base import LinkSettings, open_link
from manyhands.links.messages import Terms

PATIENCE_S = 60.0
WARM_UP = 2  # rounds of the founder alone


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def resident(line: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(each.split()[1]) for each in lines if each.startswith(line)) << 10


def wait_for_the_others(rounds: Rounds, round_: int, num: int) -> None:
    states = (PeerState.ACTIVE,) if round_ else ()
    deadline = time.monotonic() + PATIENCE_S
    while round_ < WARM_UP and len(rounds.view.peers(*states)) < num:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def wait_for_the_end(rounds: Rounds, num_rounds: int) -> None:
    """The closing round needs no user: it may be over before the last result is read."""
    deadline = time.monotonic() + PATIENCE_S
    while rounds.applied <= num_rounds:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def main(
    url: str,
    run: str,
    name: str,
    num: int,
    mib: int,
    num_rounds: int,
    wire: str,
    late_s: float,
    dtype: torch.dtype,
):
    torch.set_num_threads(1)
    mail = Mail()
    # Many layers, of which some are large: as in a model.
    numel = mib * (1 << 20) // dtype.itemsize
    sizes = [numel // 2, numel // 4, *[numel // 4 // 64] * 64]
    tensors = [torch.ones(size, dtype=dtype) for size in sizes]
    # The second follows the first's rounds before it takes part: it must not fall behind.
    settings = LinkSettings(terms=Terms(watch_bytes=1 << 30))
    with open_link(url, run=run, name=name, place=mail, settings=settings) as link:
        rounds = Rounds(
            link, tensors, num_samples=lambda r: 8, num_rounds=num_rounds, wire=wire, mail=mail
        )
        base, peaks, member, right = resident("VmRSS"), [], [], True
        rounds.start()
        rounds.offer_state(0, b"")
        while True:
            match rounds.next(PATIENCE_S):
                case Task() as task:
                    wait_for_the_others(rounds, task.round, num)
                    if task.round >= WARM_UP:
                        time.sleep(late_s)
                    for tensor in tensors:
                        tensor.fill_(float(len(task.ranges)))
                    rounds.contribute(task, tensors, weight=float(len(task.ranges)))
                case Committed() as committed:
                    if committed.round == num_rounds - 1:
                        wait_for_the_end(rounds, num_rounds)
                    committed.result.read_into(tensors)
                    committed.result.close()
                    member.append(committed.member)
                    want = 1.0 if committed.weight else 0.0
                    extremes = (extreme for tensor in tensors for extreme in tensor.aminmax())
                    error = 0.02 if wire == "int8" else 0.0
                    right &= all(abs(float(extreme) - want) <= error for extreme in extremes)
                    peaks.append(resident("VmHWM"))
                    forget_peak()
                case Stopped() as stopped:
                    break
                case _:
                    pass
        rounds.close()
    facts = {"base": base, "peaks": peaks, "member": member, "right": right, "founder": member[0]}
    print(json.dumps(facts | {"text": stopped.text}))


if __name__ == "__main__":
    url, run, name, num, mib, num_rounds, wire, late_s, dtype = sys.argv[1:]
    what = (int(num), int(mib), int(num_rounds), wire, float(late_s), getattr(torch, dtype))
    main(url, run, name, *what)
