"""Jobs, histories and hosts as text for people; logs as JSON."""

from __future__ import annotations

import json

from manyhands.cli.listing import failure_lines, job_lines, job_rows, node_rows
from manyhands.cli.logs import _JsonLines
from manyhands.cluster.hosts import Node
from manyhands.cluster.job import Ending, Failure, Job, Place, Spec, State, Step
from manyhands.cluster.messages import Kind, Origin, Slot


def test_lines_of_json_are_those_of_the_log_however_it_comes(capsys):
    text = b"one\n\ntwo\nthree"
    for size in (1, 2, 5, 100):
        printer = _JsonLines(3)
        for start in range(0, len(text), size):
            printer.feed(text[start : start + size])
        printer.finish()
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert lines == [{"rank": 3, "line": line} for line in ("one", "", "two", "three")]


def test_nothing_that_a_terminal_would_obey_is_shown():
    """Of what jobs and agents of others say."""
    evil = "\x1b]0;x\x07\x9b2J\u202e\r"
    spec = Spec(command=("x", evil), name="x", workdir=f"/{evil}")
    failure = Failure(rank=0, host="h", exit_code=1, words=f"a{evil}\nb\tc")
    job = Job(id=1, spec=spec, submitted_s=0.0, state=State.FAILED, reason=evil, failure=failure)
    step = Step(job=1, seq=1, state=State.FAILED, reason=evil, at_s=0.0)
    node = Node(name="h", address=evil, state="here", slots=(), origin="user", heard_s=0.0)
    lines = [*job_rows([job], 1.0), *job_lines(job, [step], 1.0), *node_rows([node], 1.0)]
    assert all(line.isprintable() for line in lines), lines
    assert "    b c" in lines


def test_listings_of_what_waits_runs_and_ends():
    spec = Spec(command=("python", "train.py"), name="t" * 40, gpus=2)
    waits = Job(id=1, spec=spec, submitted_s=100.0, reason="waits for 2 slots\nin line")
    runs = Job(
        id=2,
        spec=spec,
        state=State.RUNNING,
        submitted_s=0.0,
        started_s=40.0,
        places=(Place("a", (0,)), Place("b", (1,))),
    )
    ends = Job(
        id=3,
        spec=spec,
        state=State.RUNNING,
        submitted_s=0.0,
        started_s=0.0,
        places=(Place("a", (0,)),),
        ending=Ending(into=State.CANCELLED, reason="cancelled by a user", since_s=1.0),
    )
    _, *rows = job_rows([waits, runs, ends], 160.0)
    assert [row[: len("10")].strip() for row in rows] == ["1", "2", "3"]
    assert "PENDING" in rows[0]
    assert rows[0].endswith("waits for 2 slots in line")
    assert "1m00s" in rows[0]
    assert rows[1].endswith("a (1), b (1)")
    assert "2m00s" in rows[1]
    assert "RUNNING, ending" in rows[2]
    assert rows[2].endswith("cancelled by a user")
    assert all("t" * 23 + "…" in row for row in rows)


def test_a_job_in_full_tells_no_value_of_its_environment():
    spec = Spec(command=("x",), name="x", env={"API_KEY": "hush"})
    job = Job(
        id=1,
        spec=spec,
        state=State.FAILED,
        submitted_s=0.0,
        exit_code=3,
        failure=Failure(rank=4, host="h", exit_code=3, words="a\nb"),
    )
    step = Step(job=1, seq=0, state=State.PENDING, reason="submitted", at_s=0.0)
    text = "\n".join(job_lines(job, [step], 1.0))
    assert "API_KEY" in text
    assert "hush" not in text
    assert list(failure_lines(job.failure))[1:] == ["    a", "    b"]


def test_listing_of_hosts():
    slots = (Slot(0, Kind.GPU, "GPU-1"), Slot(1, Kind.GPU, "GPU-2"))
    node = Node(
        name="a",
        address="10.0.0.1",
        state="silent",
        slots=slots,
        origin=Origin.UP,
        heard_s=0.0,
        busy={"1": 7},
    )
    _, row = node_rows([node], 61.0)
    assert row.split() == ["a", "silent", "2", "gpu", "1", "7", "10.0.0.1", "1m01s", "ago"]
