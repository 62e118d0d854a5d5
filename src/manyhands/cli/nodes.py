"""`manyhands nodes`: the hosts of the cluster and what they give."""

from __future__ import annotations

import time

import typer

from manyhands.cli.cluster import AsJson, Coordinator, StateFolder, connect, show
from manyhands.cli.listing import node_rows

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
def nodes(
    coordinator: Coordinator = None,
    state: StateFolder = None,
    json_output: AsJson = False,
) -> None:
    """List the hosts: their slots, how many are busy, with which jobs, when they were heard."""
    with connect(coordinator, state) as cluster:
        found = cluster.nodes()
    if json_output:
        show(found)
    elif found:
        print("\n".join(node_rows(found, time.time())))
    else:
        print("no hosts; manyhands agent CODE, on any machine, offers one")
