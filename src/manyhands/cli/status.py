"""`manyhands status ID`: all that is known of one job."""

from __future__ import annotations

import time

import typer

from manyhands.cli.cluster import AsJson, Coordinator, JobId, StateFolder, connect, show
from manyhands.cli.listing import job_lines

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
def status(
    id: JobId,
    coordinator: Coordinator = None,
    state: StateFolder = None,
    json_output: AsJson = False,
) -> None:
    """Show one job: its failure, if it has one, where it is, and every step with its reason.

    Exit code: 0 if there is such a job, whatever its state; 2 if there is none.
    """
    with connect(coordinator, state) as cluster:
        job, history = cluster.job(id), cluster.history(id)
    if json_output:
        show({"job": job, "history": history})
    else:
        print("\n".join(job_lines(job, history, time.time())))
