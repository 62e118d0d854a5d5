"""`manyhands submit`: a job for the cluster; with --wait, its output and its exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from manyhands.cli.cluster import AsJson, Coordinator, StateFolder, connect, say, show
from manyhands.cli.duration import parse_duration
from manyhands.cli.listing import failure_lines
from manyhands.cli.program import check_command, script_of
from manyhands.cluster.follow import Follower, goes_on, same_cluster, to
from manyhands.cluster.job import Priority, Spec
from manyhands.cluster.submission import MAX_GRACE_S
from manyhands.core.errors import SettingsError
from manyhands.core.text import printable

if TYPE_CHECKING:
    from manyhands.cluster.client import Cluster
    from manyhands.cluster.job import Job

app = typer.Typer(add_completion=False)


@app.command(
    context_settings={
        "help_option_names": ["-h", "--help"],
        "allow_interspersed_args": False,  # what follows COMMAND is the command's
    }
)
def submit(
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND", help="Run once for each of --gpus. No shell is used."),
    ],
    name: Annotated[
        str | None, typer.Option(help="For people. (default: the script's or program's)")
    ] = None,
    gpus: Annotated[
        int, typer.Option(min=1, metavar="N", help="Slots: GPUs, or CPU shares where none are.")
    ] = 1,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="B", help="The global batch: MANYHANDS_BATCH, for COMMAND to read."
        ),
    ] = None,
    priority: Annotated[
        Priority, typer.Option(help="Higher ones go first, and preempt lower ones.")
    ] = Priority.NORMAL,
    max_restarts: Annotated[
        int, typer.Option(min=0, metavar="N", help="How often it may begin again: lost hosts.")
    ] = 3,
    time_limit: Annotated[
        str | None,
        typer.Option("--time", metavar="LIMIT", help="Of one attempt: 90, 30m, 2h, 1:30:00."),
    ] = None,
    grace: Annotated[
        str, typer.Option(metavar="TIME", help="Between SIGTERM and SIGKILL, to save and end.")
    ] = "30s",
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="K=V", help="A variable for every process; repeatable."),
    ] = None,
    workdir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where it runs, on every host. (default: this folder)"),
    ] = None,
    key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Submitted twice with one key, it is one job.")
    ] = None,
    wait: Annotated[
        bool,
        typer.Option("--wait", help="Show rank 0's output, and exit as the job does."),
    ] = False,
    no_check: Annotated[
        bool,
        typer.Option("--no-check", help="Do not look for COMMAND here: it is on the hosts."),
    ] = False,
    coordinator: Coordinator = None,
    state: StateFolder = None,
    json_output: AsJson = False,
) -> None:
    """Submit a job: any command that torchrun could start, run once for each slot.

    Each process finds torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR...). Write -- before
    COMMAND. It is looked for here first, so that a slip of the hand is told at once.

    Exit code: 0 submitted; with --wait, that of the job: 0, its first failing rank's, 124 for a
    time limit, 143 if it was cancelled, 1 if a host was lost once more than --max-restarts. Ctrl-C
    in --wait leaves the job as it is. 1 for an error of manyhands, 2 for something you typed.
    """
    if key is not None and not key.strip():
        # A script that tries again with a variable that is not set would submit a job each time.
        raise SettingsError("--key is empty", hint="is its variable set? Or leave --key out")
    folder = Path.cwd() if workdir is None else Path(workdir).expanduser().absolute()
    if not no_check:
        check_command(command, folder, search_path(os.environ))
    spec = Spec(
        command=tuple(command),
        name=name or default_name(command),
        gpus=gpus,
        batch=batch,
        priority=priority,
        max_restarts=max_restarts,
        time_s=None if time_limit is None else parse_duration(time_limit, what="--time"),
        grace_s=parse_duration(grace, what="--grace", zero=True, most_s=MAX_GRACE_S),
        env=variables(env or ()),
        workdir=str(folder),
    )
    more = same_cluster(coordinator, state)
    with connect(coordinator, state) as cluster:
        job = cluster.submit(key=key or "", **msgspec.structs.asdict(spec))
        if not wait:
            tell(job, json_output=json_output, more=more)
            return
        code = await_end(cluster, job, json_output=json_output, more=more)
    raise typer.Exit(code)


def default_name(command: Sequence[str]) -> str:
    """`train.py` of `python train.py`; else '' for the coordinator's own: the program's."""
    script = script_of(command[1:]) if PurePath(command[0]).name.startswith("python") else None
    name = PurePath(script or command[0]).name
    fits = "".join(c if c.isascii() and (c.isalnum() or c in "_.-") else "-" for c in name)
    return fits.lstrip("_.-")[:64]


def variables(given: Sequence[str]) -> dict[str, str]:
    """Of --env K=V. Raises SettingsError."""
    found: dict[str, str] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key:
            # The value may be a secret: only the name is said again.
            raise SettingsError(f"--env {key[:80]!r} has no value", hint="--env NAME=VALUE")
        found[key] = value
    return found


def search_path(environ: Mapping[str, str]) -> str:
    """PATH as agents make it for jobs: the folder of their Python comes first."""
    path = environ.get("PATH", os.defpath)
    return os.pathsep.join([os.path.dirname(sys.executable), path])


def tell(job: Job, *, json_output: bool, more: str) -> None:
    """The id, and what to type next; `more` says to which cluster."""
    if json_output:
        show(job)
        return
    print(
        f"job {job.id} ({job.spec.name}): {job.state}" + (f", {job.reason}" if job.reason else "")
    )
    print(f"  output  manyhands logs{more} {job.id} -f")
    print(f"  state   manyhands status{more} {job.id}")
    print(f"  end it  manyhands cancel{more} {job.id}")


def await_end(cluster: Cluster, job: Job, *, json_output: bool, more: str) -> int:
    """Show the output of rank 0 until the job is over; its exit code."""
    say(f"job {job.id} ({job.spec.name}) is submitted; Ctrl-C leaves it as it is")
    stream = (sys.stderr if json_output else sys.stdout).buffer
    follower = Follower(cluster, job.id, rank=0, write=to(stream), say=say)
    try:
        over = follower.run(first=0)
    except KeyboardInterrupt:
        say(goes_on(job.id, more))
        raise
    if over.failure is not None:
        say("\n".join(failure_lines(over.failure)))
    code = 1 if over.exit_code is None else over.exit_code
    say(
        f"job {over.id}: {over.state}, exit code {code}"
        + (f"; {printable(over.reason)}" if over.reason else "")
    )
    if json_output:
        show(over)
    return code
