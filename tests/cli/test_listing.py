"""Jobs, histories and hosts as text for people; a log from a point on."""

from __future__ import annotations

from manyhands.cli.follow import after
from manyhands.cli.listing import failure_lines, job_lines, job_rows, node_rows
from manyhands.cluster.hosts import Node
from manyhands.cluster.job import Ending, Failure, Job, Place, Spec, State, Step
from manyhands.cluster.messages import Kind, Origin, Slot


def test_a_log_from_a_point_on():
    assert list(after(0, iter([b"ab", b"cd"]))) == [b"ab", b"cd"]
    assert list(after(3, iter([b"ab", b"cd", b"e"]))) == [b"d", b"e"]
    assert list(after(9, iter([b"ab"]))) == []


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
