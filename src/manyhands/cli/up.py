"""`manyhands up`: a cluster on this machine and those of a hostfile, until it is taken down."""

from __future__ import annotations

import json
import logging
import os
import shlex
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from manyhands.cli.duration import parse_duration
from manyhands.cli.listing import slots_of
from manyhands.cluster.foreground import READY_LINE, serve, tell
from manyhands.cluster.hostfile import HostLine, read_hostfile
from manyhands.cluster.identity import CODE, default_state
from manyhands.cluster.job import MAX_SLOTS
from manyhands.cluster.server import PORT
from manyhands.cluster.starters import SSH, parse_ssh
from manyhands.cluster.up import LEASE_S, Ready, Up, UpSettings

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
def up(
    bind: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Where the coordinator listens; port 0 is any.",
        ),
    ] = f"127.0.0.1:{PORT}",
    hostfile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Hosts, one a line: ADDRESS,GPU or HOST or HOST slots=N. Those that are not "
            "this machine are reached by ssh. (default: this machine alone)",
        ),
    ] = None,
    logdir: Annotated[
        Path, typer.Option(metavar="DIR", help="For what jobs and agents write.")
    ] = Path("logs"),
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="For jobs, tokens and keys: with the same folder it is the same cluster. "
            "(default: manyhands/cluster in $XDG_STATE_HOME or ~/.local/state)",
        ),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(metavar="HOST[:PORT]", help="What other machines reach it by. (a guess)"),
    ] = None,
    lease: Annotated[
        str,
        typer.Option(metavar="TIME", help="How long a host may be silent before it is lost."),
    ] = f"{LEASE_S:g}s",
    ssh: Annotated[
        str, typer.Option(metavar="COMMAND", help="How to get to other hosts: 'ssh -i KEY'.")
    ] = SSH,
    python: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="The Python with manyhands on other hosts. (default: this path)"
        ),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=MAX_SLOTS,
            metavar="N",
            help="Of this machine, or of each host for which the hostfile says nothing; 0 "
            "without a hostfile: no agent here. (default: GPUs; without GPUs, 1)",
        ),
    ] = None,
    user: Annotated[
        str | None, typer.Option(metavar="NAME", help="Run jobs as this user, where root is.")
    ] = None,
    plain: Annotated[
        bool,
        typer.Option("--plain", help="No TLS, for other programs on this machine; see the docs."),
    ] = False,
    json_output: Annotated[
        bool, typer.Option("--json", help="One JSON line on stdout when it is ready.")
    ] = False,
) -> None:
    """Start a cluster: a coordinator, a hub for its jobs, and the agents of the hosts.

    It says "Now, cluster is ready to accept training jobs." when it is. Ctrl-C, SIGTERM and
    `manyhands down` end everything that it started: jobs get their grace, wait in the store, and
    begin again at the next `manyhands up` with the same --state. A second Ctrl-C does not wait
    for them. If it is killed, its agents and their jobs live on for a lease, and are taken up
    again if it is started within.

    Exit code: 0 taken down; 1 for an error of manyhands; 2 for something you typed.
    """
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", stream=sys.stderr)
    settings = UpSettings(
        state=(default_state() if state is None else state).expanduser().absolute(),
        logdir=logdir.expanduser().absolute(),
        bind=bind,
        advertise=advertise,
        hosts=hosts_of(hostfile, slots),
        lease_s=parse_duration(lease, what="--lease"),
        ssh=parse_ssh(ssh),
        python=python or "",
        user=user,
        plain=plain,
    )
    if os.geteuid() == 0 and user is None and settings.hosts:
        _say("warning: jobs run as root; --user NAME has them run as somebody else")
    serve(Up(settings, say=_say), lambda up, ready: announce(up, ready, json_output), _say)
    if not json_output:
        _out("the cluster is down")


def hosts_of(hostfile: Path | None, slots: int | None) -> tuple[HostLine, ...]:
    """Where agents are started. Raises SettingsError."""
    if hostfile is None:
        if slots == 0:
            return ()
        name = socket.gethostname().split(".")[0]
        name = "".join(c if c.isascii() and (c.isalnum() or c in "_.-") else "-" for c in name)
        return (HostLine(address="127.0.0.1", name=name.lstrip("_.-")[:64] or "here", slots=slots),)
    return tuple(
        host
        if host.gpus or host.slots is not None or not slots
        else HostLine(address=host.address, name=host.name, slots=slots, line=host.line)
        for host in read_hostfile(hostfile)
    )


def announce(up: Up, ready: Ready, json_output: bool) -> None:
    """Say that it is ready, and what to type. The code is a secret, told here by intent."""
    settings = up.settings
    if json_output:
        said = {
            "url": up.url,
            "code": up.join_code,
            "hub": up.hub_at,
            "state": str(settings.state),
            "logdir": str(settings.logdir),
            "hosts": {node.name: len(node.slots) for node in ready.nodes},
            "missing": [trouble.host for trouble in ready.missing],
        }
        _out(json.dumps(said))
        return
    more = (
        "" if settings.state == default_state() else f" --state {shlex.quote(str(settings.state))}"
    )
    where = " (this machine only; for others: --bind 0.0.0.0)" if settings.is_local else ""
    _out(f"coordinator  {up.url}{where}")
    _out(f"hub          {up.hub_at} (where ranks meet)")
    for node in ready.nodes:
        _out(f"host         {node.name}: {slots_of(node.slots)}")
    for trouble in ready.missing:
        _out(f"host         {trouble.host}: has not come, and is tried again")
    if not any(node.slots for node in ready.nodes):
        _out("host         none yet: jobs wait until one comes, with the join code")
    _out(f"logs         {settings.logdir}")
    _out(f"state        {settings.state}\n")
    _out(f"join code, for manyhands agent (a secret):\n\n    {up.join_code}\n")
    _out(f"user code, for --coordinator elsewhere (a secret too): {settings.state / CODE}\n")
    _out(f"submit a job:   manyhands submit{more} --gpus 1 -- python train.py")
    _out(f"look at it:     manyhands jobs{more}; manyhands logs{more} ID -f")
    _out(f"take it down:   Ctrl-C, or manyhands down{more}\n")
    _out(READY_LINE)


def _out(text: str) -> None:
    tell(sys.stdout, text)


def _say(text: str) -> None:
    tell(sys.stderr, text)
