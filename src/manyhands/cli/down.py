"""`manyhands down`: take the cluster down, and wait until it is."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Annotated

import typer

from manyhands.cli.cluster import AsJson, Coordinator, StateFolder, connect, say, show
from manyhands.cli.duration import parse_duration
from manyhands.cluster.client import Cluster
from manyhands.cluster.dial import CoordinatorUnreachable
from manyhands.cluster.holder import Holder
from manyhands.cluster.identity import ADDRESS, default_state
from manyhands.cluster.up import STORE
from manyhands.core.errors import ManyhandsError, UsageError

_LOOK_S = 0.1
app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
def down(
    timeout: Annotated[
        str, typer.Option(metavar="TIME", help="How long to wait for it: jobs have their graces.")
    ] = "5m",
    coordinator: Coordinator = None,
    state: StateFolder = None,
    json_output: AsJson = False,
) -> None:
    """Take the cluster down: end its jobs, its agents, and `manyhands up`.

    Jobs that ran wait in the store, and begin again at the next `manyhands up`. Agents that
    were started by `manyhands agent` stay, and dial until there is a cluster again. It returns
    when `manyhands up` has ended. Exit code: 1 if it had not in time.
    """
    limit_s = parse_duration(timeout, what="--timeout")
    folder = default_state() if state is None else state.expanduser()
    # The cluster that is asked need not be the one of the folder.
    is_named = coordinator is not None or (state is None and "MANYHANDS_COORDINATOR" in os.environ)
    with contextlib.ExitStack() as stack:
        holder = None if is_named else Holder.of(folder / f"{STORE}.lock")
        if holder is not None:
            stack.callback(holder.close)
        elif not is_named and not folder.joinpath(ADDRESS).exists():
            raise UsageError(
                f"no cluster was ever up with its state in {folder}",
                hint="--state DIR, as `manyhands up` had it, or --coordinator HOST:PORT",
            )
        with connect(coordinator, state) as cluster:
            gone = _ask(cluster, holder, limit_s)
    if not gone:
        raise ManyhandsError(
            f"the cluster has begun to go down, but is not after {limit_s:g} s",
            hint="jobs may take their grace; `manyhands down` again waits again; "
            "a second Ctrl-C where `manyhands up` runs kills",
        )
    if json_output:
        show({"state": "down"})
    else:
        print("the cluster is down")


def _ask(cluster: Cluster, holder: Holder | None, limit_s: float) -> bool:
    """Whether it was taken down within the limit; one that was not up is down."""
    try:
        cluster.shut_down()
    except CoordinatorUnreachable as error:
        say(f"it was not up: {error.message}")
        return holder is None or holder.wait(limit_s)
    say("jobs and agents are told to end...")
    return _until_silent(cluster, limit_s) if holder is None else holder.wait(limit_s)


def _until_silent(cluster: Cluster, limit_s: float) -> bool:
    """A cluster elsewhere: whether it has stopped answering."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        try:
            cluster.info()
        except CoordinatorUnreachable:
            return True
        time.sleep(_LOOK_S)  # it can say that it is up, not that it is down
    return False
