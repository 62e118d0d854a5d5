"""Jobs, their histories and hosts as text for people. Pure: values and a clock's time in."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from manyhands.cli.duration import show_duration
from manyhands.cluster.job import Failure, Job, Step
from manyhands.core.text import printable

if TYPE_CHECKING:
    from manyhands.cluster.hosts import Node
    from manyhands.cluster.messages import Slot

_NAME_WIDTH = 24
_REASON_WIDTH = 70


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns under their heads, as wide as what is in them; the last is not filled up."""
    widths = [max(len(cell) for cell in column) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        yield "  ".join(
            f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)
        ).rstrip()


def job_rows(jobs: Sequence[Job], now_s: float) -> Iterator[str]:
    """One line a job."""
    head = ("ID", "NAME", "STATE", "GPUS", "PRIORITY", "TIME", "WHERE OR WHY")
    rows = [
        (
            str(job.id),
            cut(job.spec.name, _NAME_WIDTH),
            state_of(job),
            str(job.spec.gpus),
            str(job.spec.priority),
            time_of(job, now_s),
            cut(where_or_why(job), _REASON_WIDTH),
        )
        for job in jobs
    ]
    return table(head, rows)


def state_of(job: Job) -> str:
    """Its state; one that is being ended says so."""
    return str(job.state) if job.ending is None else f"{job.state}, ending"


def time_of(job: Job, now_s: float) -> str:
    """How long it has waited, if it waits; else how long it has run, or did."""
    if job.started_s is None:
        return show_duration((job.ended_s or now_s) - job.submitted_s)
    return show_duration((job.ended_s or now_s) - job.started_s)


def where_or_why(job: Job) -> str:
    """Hosts of one that runs, the reason of one that does not."""
    if job.ending is not None:
        return job.ending.reason
    if job.places and not job.is_over:
        return ", ".join(f"{place.host} ({len(place.slots)})" for place in job.places)
    return job.reason


def failure_lines(failure: Failure) -> Iterator[str]:
    """Who failed first, and the last words, indented."""
    yield f"rank {failure.rank} on {failure.host} failed first, with exit code {failure.exit_code}:"
    words = failure.words.splitlines() or ["(it said nothing)"]
    yield from (f"    {printable(line)}" for line in words)


def job_lines(job: Job, history: Sequence[Step], now_s: float) -> Iterator[str]:
    """All that is known of one job, a failure on top."""
    spec = job.spec
    code = "" if job.exit_code is None else f", exit code {job.exit_code}"
    yield f"job {job.id}  {spec.name}  {state_of(job)}{code}"
    if why := (job.ending.reason if job.ending is not None else job.reason):
        yield f"  {printable(why)}"
    if job.failure is not None:
        yield from failure_lines(job.failure)
    yield ""
    facts: list[tuple[str, str]] = [
        ("command", shlex.join(spec.command)),
        ("workdir", spec.workdir or "(a folder of the job's own)"),
        ("gpus", str(spec.gpus) + ("" if spec.batch is None else f", batch {spec.batch}")),
        ("priority", str(spec.priority)),
        ("limits", limits_of(job)),
        ("env", " ".join(sorted(spec.env)) or "-"),
        ("where", places_of(job) or "-"),
        ("attempt", f"{job.attempt}, {job.node_failures} hosts lost, {job.preemptions} preempted"),
        ("time", f"{time_of(job, now_s)}; submitted {clock(job.submitted_s)}"),
    ]
    yield from (f"  {name:<9} {printable(value)}" for name, value in facts)
    yield ""
    yield from history_lines(history)


def limits_of(job: Job) -> str:
    """What it may take."""
    spec = job.spec
    limit = "no time limit" if spec.time_s is None else f"{show_duration(spec.time_s)} an attempt"
    grace = f"{show_duration(spec.grace_s)} to end"
    return f"{limit}, {grace}, {spec.max_restarts} restarts"


def places_of(job: Job) -> str:
    """Hosts and their slots."""
    return "; ".join(
        f"{place.host} slots {', '.join(map(str, place.slots))}" for place in job.places
    )


def history_lines(history: Sequence[Step]) -> Iterator[str]:
    """Every step with its time and reason."""
    width = max((len(step.state) for step in history), default=0)
    for step in history:
        reason = printable(step.reason)
        yield f"  {clock(step.at_s)}  {step.state:<{width}}  {reason}".rstrip()


def node_rows(nodes: Sequence[Node], now_s: float) -> Iterator[str]:
    """One line a host."""
    head = ("HOST", "STATE", "SLOTS", "BUSY", "JOBS", "ADDRESS", "HEARD")
    rows = [
        (
            node.name,
            node.state,
            slots_of(node.slots),
            str(len(node.busy)),
            " ".join(map(str, sorted(set(node.busy.values())))) or "-",
            printable(node.address),
            f"{show_duration(now_s - node.heard_s)} ago",
        )
        for node in nodes
    ]
    return table(head, rows)


def slots_of(slots: Sequence[Slot]) -> str:
    """How many, and of what kind."""
    kinds = sorted({str(slot.kind) for slot in slots})
    return f"{len(slots)} {'+'.join(kinds)}".strip()


def clock(at_s: float) -> str:
    """A time as the clock on this machine's wall says it."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))


def cut(text: str, width: int) -> str:
    """One line of at most `width` letters."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= width else line[: width - 1] + "…"
