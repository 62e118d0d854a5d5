"""What rounds cost in memory, from the first one on: one result, and 128 MiB for all else.

Whoever only follows holds two: docs/rounds.md, Memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.links.hub import Hub

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


def measure(mib, num_rounds, *, num=2, wire="fp32", late_s=0.0, dtype="float32", url=None):
    """Members in processes of their own; the last one contributes that much later.

    At a hub, if there is no `url`.
    """
    with Hub("127.0.0.1:0", insecure=True) as hub:
        url = url or f"{hub.address}?insecure=1"
        members = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.collectives.rounds_memory", url, "run"),
                    *(f"p{k}", str(num), str(mib), str(num_rounds), wire),
                    *(str(late_s * (k == num - 1)), dtype),
                ],
                cwd=ROOT,
                stdout=subprocess.PIPE,
            )
            for k in range(num)
        ]
        try:
            said = [json.loads(member.communicate(timeout=200)[0]) for member in members]
        finally:
            for member in members:
                member.kill()
                member.communicate()
    for one in said:
        assert one["right"], one["text"]
        assert one["text"] == "the run is finished"
        one["extra"] = [peak - one["base"] for peak in one["peaks"]]
    assert [one["founder"] for one in said].count(True) == 1
    return said


def check(said, result_mib, state_mib=0):
    """Members hold one result, followers two; nobody more than 128 MiB besides."""
    followed = 0
    for one in said:
        for round_, (extra, member) in enumerate(zip(one["extra"], one["member"], strict=True)):
            bound = (1 if member else 2) * result_mib + state_mib + 128
            place = "member" if member else "follower"
            print(f"round {round_}, {place}: {extra / MIB:.0f} MiB, at most {bound:.0f}")
            assert extra <= bound * MIB, (round_, place)
            followed += not member
    assert followed >= 2


@pytest.mark.parametrize("late_s", [0.0, 2.0], ids=["all in time", "one is late"])
def test_the_extra_memory_of_a_round(late_s):
    """Whoever is late holds no more of the others' contributions than it allows them."""
    check(measure(256, 4, late_s=late_s), 256)


def test_the_extra_memory_of_a_round_of_several():
    """Whoever is late owes all others room, and has it in equal shares."""
    check(measure(128, 4, num=4, late_s=2.0), 128)


def test_the_extra_memory_of_a_round_at_a_broker(broker):
    check(measure(256, 4, url=broker.url()), 256)


def test_a_result_is_kept_as_it_travelled():
    check(measure(128, 4, wire="bf16"), 64)


def test_what_int8_owes_is_memory_too():
    """The residual is half as large as the tensors, what was sent as large as a result (see
    feedback). With the result that is no more than what any codec may take: one of their size.
    """
    coded = 256 * (1 / 4 + 1 / 256)
    said = measure(256, 4, wire="int8")
    check(said, coded, state_mib=256 * (1 / 2 + 1 / 256) + coded)
    for one in said:
        as_member = zip(one["extra"], one["member"], strict=True)
        assert max(extra for extra, member in as_member if member) <= (256 + 128) * MIB


def test_what_int8_owes_of_narrow_floats_is_more_than_a_result_of_their_size():
    """The bound that docs/rounds.md says for them: twice as many values in the same memory."""
    coded, owed = 128 * (1 / 2 + 1 / 128), 128 * (1 + 1 / 128)
    check(measure(128, 4, wire="int8", dtype="bfloat16"), coded, state_mib=owed + coded)


def test_memory_is_used_again():
    """No growth over many rounds. What a round needs depends on who waits for whom, so those that
    need least are compared: what is lost in each round is missing in them too."""
    for one in measure(16, 60):
        early, late = min(one["extra"][5:20]), min(one["extra"][-15:])
        print(f"in the first rounds {early / MIB:.1f}, in the last {late / MIB:.1f} MiB")
        assert late <= early + 16 * MIB  # one block that is lost in each round would be 40
