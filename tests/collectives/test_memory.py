"""What rounds cost in memory: one result of the tensors' size, and little more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.links.hub import Hub

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


def measure(mib, num_rounds, *, wire="fp32", late_s=0.0):
    """Two members in processes of their own; the second contributes that much later."""
    with Hub("127.0.0.1:0", insecure=True) as hub:
        url = f"{hub.address}?insecure=1"
        members = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.collectives.rounds_memory", url, "run"),
                    *(f"p{k}", str(mib), str(num_rounds), wire, str(late_s * k)),
                ],
                cwd=ROOT,
                stdout=subprocess.PIPE,
            )
            for k in range(2)
        ]
        try:
            said = [json.loads(member.communicate(timeout=90)[0]) for member in members]
        finally:
            for member in members:
                member.kill()
                member.communicate()
    for one in said:
        assert one["right"], one["text"]
        assert one["text"] == "the run is finished"
        # One follows two rounds of the other before it is a member: it cannot know when a result
        # is of no more use to others, and holds two until then.
        first = 0 if one["founder"] else 3
        one["extra"] = [peak - one["base"] for peak in one["peaks"][first:]]
    assert [one["founder"] for one in said].count(True) == 1
    return said


def most_extra(said, what):
    most = max(extra for one in said for extra in one["extra"])
    print(f"extra memory of a round of {what}: {most / MIB:.0f} MiB")
    return most


@pytest.mark.parametrize("late_s", [0.0, 2.0], ids=["all in time", "one is late"])
def test_the_extra_memory_of_a_round(late_s):
    """Whoever is late holds no more of the others' contributions than it allows them."""
    most = most_extra(measure(256, 4, late_s=late_s), f"256 MiB, one member {late_s:g} s late")
    assert most <= (256 + 128) * MIB


@pytest.mark.parametrize(("wire", "most"), [("bf16", 64 + 128), ("int8", 33 + 33 + 128 + 128)])
def test_a_result_is_kept_as_it_travelled(wire, most):
    """int8 also keeps what it has sent, and what it owes: that is state, like an optimizer's."""
    assert most_extra(measure(128, 4, wire=wire), f"128 MiB, {wire}") <= most * MIB


def test_memory_is_used_again():
    """No growth over many rounds; what a round needs at most depends on who waits for whom."""
    for one in measure(16, 60):
        early, late = max(one["extra"][5:20]), max(one["extra"][-15:])
        print(f"in the first rounds {early / MIB:.1f}, in the last {late / MIB:.1f} MiB")
        assert late <= early + 16 * MIB  # one block that is lost in each round would be 40
