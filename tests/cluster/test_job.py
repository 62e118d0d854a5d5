"""Values of jobs: the only steps there are, and what a submission must be."""

from __future__ import annotations

import itertools
import math

import msgspec
import pytest

from manyhands.cluster.errors import BadJob
from manyhands.cluster.job import (
    NEXT,
    TERMINAL,
    Ending,
    IllegalStep,
    Job,
    Priority,
    Spec,
    State,
    moved,
    noted,
)
from manyhands.cluster.submission import OURS, checked, checked_key

PAIRS = list(itertools.product(State, State))


def job(state=State.PENDING, **changes):
    return Job(id=1, spec=Spec(command=("true",)), state=state, submitted_s=0.0, **changes)


LEGAL = {
    "PENDING STARTING",
    "PENDING CANCELLED",
    *(f"STARTING {to}" for to in ("RUNNING", "FAILED", "TIMEOUT", "CANCELLED", "PREEMPTED")),
    "STARTING NODE_FAIL",
    *(f"RUNNING {to}" for to in ("SUCCEEDED", "FAILED", "TIMEOUT", "CANCELLED", "PREEMPTED")),
    "RUNNING NODE_FAIL",
    "PREEMPTED PENDING",
    "NODE_FAIL PENDING",
    "NODE_FAIL FAILED",
}


@pytest.mark.parametrize(("before", "to"), PAIRS, ids=[f"{a}-{b}" for a, b in PAIRS])
def test_a_job_goes_where_a_way_leads_and_nowhere_else(before, to):
    old = job(before, seq=4)
    if f"{before} {to}" in LEGAL:
        new = moved(old, to, "why", exit_code=3)
        assert (new.state, new.reason, new.seq, new.exit_code) == (to, "why", 5, 3)
    else:
        with pytest.raises(IllegalStep, match=f"from {before} to {to}") as caught:
            moved(old, to, "why")
        assert (caught.value.job, caught.value.to) == (old, to)


def test_what_is_over_cannot_even_be_noted():
    assert {State.SUCCEEDED, State.FAILED, State.TIMEOUT, State.CANCELLED} == TERMINAL
    for state in State:
        if NEXT[state]:
            ending = Ending(into=State.CANCELLED, reason="x", since_s=1.0)
            assert noted(job(state), ending=ending).seq == 1
        else:
            with pytest.raises(IllegalStep):
                noted(job(state), reason="x")
    with pytest.raises(IllegalStep):
        noted(job(), state=State.RUNNING)


def test_priorities_have_an_order():
    ranks = [p.rank for p in (Priority.HIGH, Priority.NORMAL, Priority.BEST_EFFORT)]
    assert ranks == sorted(ranks, reverse=True)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"command": ()}, "command is empty"),
        ({"command": ("",)}, "command is empty"),
        ({"command": ("a\0b",)}, "NUL"),
        ({"command": ("x",) * 5000}, "5000 parts"),
        ({"command": ("x" * 200_000,)}, "200000 bytes"),
        ({"command": (7,)}, "Expected `str`"),
        ({"command": ("\udc80",)}, "not a job"),
        ({"name": "../x"}, "cannot be named"),
        ({"name": "x" * 65}, "cannot be named"),
        ({"name": "x\n"}, "cannot be named"),
        ({"gpus": 0}, "gpus is 0"),
        ({"gpus": 5000}, "from 1 to 4096"),
        ({"gpus": "many"}, "Expected `int`"),
        ({"batch": 0}, "batch is 0"),
        ({"gpus": 4, "batch": 3}, "at least one sample"),
        ({"max_restarts": -1}, "max_restarts is -1"),
        ({"time_s": 0.0}, "time_s is 0"),
        ({"time_s": -1.0}, "time_s is -1"),
        ({"time_s": math.inf}, "time_s is inf"),
        ({"grace_s": math.nan}, "grace_s is nan"),
        ({"grace_s": -1.0}, "grace_s is -1"),
        ({"env": {"A=B": "c"}}, "'A=B' cannot be the name"),
        ({"env": {"A": "\0"}}, "NUL"),
        ({"env": {"A": "x" * 200_000}}, "env is"),
        ({"env": {f"V{i}": "" for i in range(600)}}, "600 variables"),
        ({"workdir": "here"}, "absolute path"),
        ({"workdir": "/" + "x" * 5000}, "5001 bytes"),
        ({"priority": "urgent"}, "Invalid enum value"),
        *(({"env": {name: "1"}}, f"{name} is set by the cluster") for name in sorted(OURS)),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_can_never_run_is_refused_with_what_is_wrong(changes, says):
    with pytest.raises(BadJob, match=says):
        checked(Spec(**{"command": ("python", "train.py"), **changes}))


def test_what_is_checked_is_what_is_stored():
    spec = checked(Spec(command=["/usr/bin/python3", "train.py"], gpus=3, batch=7, time_s=5))
    assert spec.command == ("/usr/bin/python3", "train.py")
    assert spec.name == "python3"
    assert checked(spec) == spec == msgspec.json.decode(msgspec.json.encode(spec), type=Spec)
    assert checked(Spec(command=("./.my job!",))).name == "my-job-"
    assert checked(Spec(command=("/",))).name == "job"
    assert checked(Spec(command=("x",), env={"MANYHANDS_DATA_PATH": "/d"})).env


def test_keys():
    assert checked_key("") == ""
    assert checked_key("a:b-1.2_3") == "a:b-1.2_3"
    for bad in ("-a", "a b", "a\n", "x" * 129, "ä"):
        with pytest.raises(BadJob, match="cannot be the key"):
            checked_key(bad)
