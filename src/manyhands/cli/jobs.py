"""`manyhands jobs`: what was submitted, and where it is."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from manyhands.cli.cluster import AsJson, Coordinator, StateFolder, connect, show
from manyhands.cli.listing import job_rows
from manyhands.cluster.job import State

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
def jobs(
    state_wanted: Annotated[
        State | None,
        typer.Option("--in", metavar="STATE", case_sensitive=False, help="Only those in it."),
    ] = None,
    limit: Annotated[
        int, typer.Option(min=1, max=100_000, metavar="N", help="The newest N of them.")
    ] = 50,
    coordinator: Coordinator = None,
    state: StateFolder = None,
    json_output: AsJson = False,
) -> None:
    """List jobs, the newest first."""
    with connect(coordinator, state) as cluster:
        found = cluster.jobs(state=state_wanted, limit=limit)
    if json_output:
        show(found)
    elif found:
        print("\n".join(job_rows(found, time.time())))
    elif state_wanted is not None:
        print(f"no job is {state_wanted}; manyhands jobs, without --in, lists all")
    else:
        print("no jobs; manyhands submit -- python train.py makes one")
