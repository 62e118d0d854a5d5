"""What a tick costs, in steps and not in seconds: four times as much cluster, about four times."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

TICK = Path(__file__).parents[2] / "benchmarks" / "cluster_tick.py"
SMALL, LARGE = (25, 250), (100, 1000)
MOST = 4 * 1.5
"""Times as many steps: sorting costs a little more than in proportion. Going through all jobs for
every job, or all hosts for every host, would take sixteen times as many.
"""


@pytest.fixture(scope="module")
def tick():
    """The benchmark that asks the same of 1,000 hosts and 10,000 jobs, with a clock."""
    spec = importlib.util.spec_from_file_location("cluster_tick", TICK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def steps_of(work):
    """The bytecodes of the cluster's modules that it takes; the same on any machine."""
    count = 0

    def step(frame, event, argument):
        nonlocal count
        count += event == "opcode"
        return step

    def enter(frame, event, argument):
        if "/manyhands/cluster/" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return step

    before = sys.gettrace()
    # From Python 3.12 on opcodes are traced if a frame wants them by the time of settrace.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(enter)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def decisions(tick, size):
    return {
        name: steps_of(lambda hosts=hosts, entries=entries: tick.decide(2.0, hosts, entries))
        for name, hosts, entries in tick.moments(*size)
    }


def turns(tick, size):
    book = tick.book_of(*size)
    return {name: steps_of(lambda: tick.turn(book)) for name in ("empty", "full")}


@pytest.mark.parametrize("counted", [decisions, turns])
def test_a_tick_grows_with_the_cluster_and_not_with_its_square(tick, counted):
    small, large = counted(tick, SMALL), counted(tick, LARGE)
    assert min(small.values()) > SMALL[1], "nothing was counted"
    ratios = {name: large[name] / small[name] for name in small}
    assert max(ratios.values()) < MOST, ratios
