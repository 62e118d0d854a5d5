"""`manyhands down`: take the cluster down, and wait until it is."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Annotated

import typer

from manyhands.cli.cluster import AsJson, Coordinator, StateFolder, connect, say, show
from manyhands.cli.duration import parse_duration
from manyhands.cluster.client import Cluster
from manyhands.cluster.dial import CoordinatorRefused, CoordinatorUnreachable, OtherVersion
from manyhands.cluster.errors import ClusterError
from manyhands.cluster.holder import Holder
from manyhands.cluster.identity import ADDRESS, default_state
from manyhands.cluster.remains import Remains
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
    when `manyhands up` has ended; if that was killed, when the agents that it left on this machine
    have (those of other machines end with their lease). Exit code: 1 if they had not in time.
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
            gone = _ask(cluster, holder, None if is_named else folder, limit_s)
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


def _ask(cluster: Cluster, holder: Holder | None, folder: Path | None, limit_s: float) -> bool:
    """Whether it was taken down within the limit; one that was not up is down, once its agents
    are. `folder`: its own, where it is one of this machine.
    """
    try:
        cluster.shut_down()
    except (CoordinatorUnreachable, CoordinatorRefused, OtherVersion) as error:
        # Where nobody holds its store, somebody else may have come to its address.
        may_be_left = holder is None and folder is not None and _is_anothers(error)
        if not may_be_left and not isinstance(error, CoordinatorUnreachable):
            raise
        say(f"it was not up: {error.message}")
        if holder is not None:
            return holder.wait(limit_s)
        return folder is None or _end_remains(folder, limit_s)
    say("jobs and agents are told to end...")
    return _until_silent(cluster, limit_s) if holder is None else holder.wait(limit_s)


def _is_anothers(error: ClusterError) -> bool:
    """Whether who answers is not the coordinator that was meant: it has another certificate, or
    is none at all.
    """
    is_other = isinstance(error, CoordinatorRefused) and error.status == 0
    return is_other or isinstance(error, OtherVersion)


def _end_remains(folder: Path, limit_s: float) -> bool:
    """Whether the agents that a killed `up` left have gone within the limit."""
    with Remains(folder) as remains:
        if remains:
            agents = "agent" if len(remains) == 1 else "agents"
            say(f"{len(remains)} {agents} of it are told to end, and their jobs...")
        return remains.end(limit_s)


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
