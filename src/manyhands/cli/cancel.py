"""`manyhands cancel ID...`: end jobs."""

from __future__ import annotations

from typing import Annotated

import typer

from manyhands.cli.cluster import AsJson, Coordinator, StateFolder, connect, say, show
from manyhands.cli.listing import state_of
from manyhands.cluster.job import Job
from manyhands.core.errors import UsageError

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
def cancel(
    ids: Annotated[list[int], typer.Argument(metavar="ID...", min=1, help="Jobs' numbers.")],
    wait: Annotated[
        bool, typer.Option("--wait", help="Until they are over, which takes their grace.")
    ] = False,
    coordinator: Coordinator = None,
    state: StateFolder = None,
    json_output: AsJson = False,
) -> None:
    """End jobs: SIGTERM to every process, SIGKILL after the job's grace.

    A job that is over stays what it is. Exit code: 2 if there is no job of one of the numbers;
    the others are ended all the same.
    """
    unknown: list[UsageError] = []
    done: list[Job] = []
    for id in ids:
        try:
            with connect(coordinator, state) as cluster:
                was_over = cluster.job(id).is_over
                job = cluster.cancel(id)
                done.append(cluster.wait(id) if wait else job)
        except UsageError as error:
            unknown.append(error)
            continue
        if not json_output:
            more = "; it was over already, and stays as it is" if was_over else ""
            print(f"job {id}: {state_of(done[-1])}{more}")
    if json_output:
        show(done)
    for error in unknown[1:]:
        say(f"error: {error.message}")
    if unknown:
        raise unknown[0]
