"""`manyhands logs ID`: what a rank wrote; the first failure on top."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from manyhands.cli.cluster import Coordinator, JobId, StateFolder, connect, say
from manyhands.cli.listing import failure_lines
from manyhands.cluster.follow import Follower, to
from manyhands.cluster.job import State
from manyhands.core.text import printable

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
def logs(
    id: JobId,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the job is over.")
    ] = False,
    rank: Annotated[
        int | None,
        typer.Option(min=0, metavar="R", help="(default: the first that failed, else 0)"),
    ] = None,
    attempt: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="(default: the last one)")
    ] = None,
    coordinator: Coordinator = None,
    state: StateFolder = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="A JSON object a line on stdout, the rest on stderr.")
    ] = False,
) -> None:
    """Show what one rank of a job wrote, to stdout and stderr together.

    If the job has failed, the first failing rank's error comes first, on stderr; if it fails while
    it is followed, last.
    """
    with connect(coordinator, state) as cluster:
        job = cluster.job(id)
        if job.failure is not None:
            say("\n".join(failure_lines(job.failure)))
            if rank is None and attempt in (None, job.attempt):
                rank = job.failure.rank
                say(f"all that rank {rank} wrote:")
        shown = 0 if rank is None else rank
        printer = _JsonLines(shown) if json_output else None
        write = to(sys.stdout.buffer) if printer is None else printer.feed
        over = job
        if follow:
            follower = Follower(cluster, id, rank=shown, write=write, say=say)
            over = follower.run(first=attempt, last=attempt)
        else:
            for piece in cluster.logs(id, rank=shown, attempt=attempt):
                write(piece)
        if printer is not None:
            printer.finish()
        if over.is_over and not job.is_over and over.state is not State.SUCCEEDED:
            if over.failure is not None:
                say("\n".join(failure_lines(over.failure)))
            say(f"job {over.id}: {over.state}; {printable(over.reason)}")


class _JsonLines:
    """A line of the log as a line of JSON."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._begun: list[bytes] = []
        """Pieces of a line that has not ended."""

    def feed(self, piece: bytes) -> None:
        *whole, rest = piece.split(b"\n")
        for line in whole:
            self._print(b"".join((*self._begun, line)))
            self._begun = []
        if rest:
            self._begun.append(rest)

    def finish(self) -> None:
        if self._begun:
            self._print(b"".join(self._begun))

    def _print(self, line: bytes) -> None:
        text = line.decode(errors="replace")
        print(json.dumps({"rank": self._rank, "line": text}), flush=True)
