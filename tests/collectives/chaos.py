"""Random schedules against the round machine, as many as you like.

python -m tests.collectives.chaos --schedules 100000 [--seed 0] [--unordered] [--lengths 3,5,7]
python -m tests.collectives.chaos --trace 1234 [--unordered]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.collectives.world import Violation, World


def run_one(seed, *, unordered):
    """Run one schedule; returns its counts, or what went wrong as text."""
    try:
        return World(seed, unordered=unordered).run()
    except Violation as violation:
        return str(violation)
    except Exception as error:  # noqa: BLE001 - a machine that breaks is a finding like any other
        return f"{type(error).__name__}: {error}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule")
    parser.add_argument("--unordered", action="store_true", help="no order between two peers")
    parser.add_argument("--lengths", help="of runs, in rounds, as 3,5,7")
    parser.add_argument("--trace", type=int, metavar="SEED", help="show one schedule, step by step")
    arguments = parser.parse_args()
    if arguments.lengths:
        World.lengths = tuple(map(int, arguments.lengths.split(",")))
    if arguments.trace is not None:
        print(World(arguments.trace, unordered=arguments.unordered, trace=True).run())
        return 0
    total, start = Counter(), time.monotonic()
    for seed in range(arguments.seed, arguments.seed + arguments.schedules):
        result = run_one(seed, unordered=arguments.unordered)
        if isinstance(result, str):
            mode = " --unordered" if arguments.unordered else ""
            print(f"seed {seed}: {result}")
            print(f"look at it: python -m tests.collectives.chaos --trace {seed}{mode}")
            return 1
        total += result
    print(f"{arguments.schedules} schedules, {time.monotonic() - start:.0f} s, no violation")
    for name, number in sorted(total.items()):
        print(f"{number:10} {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
