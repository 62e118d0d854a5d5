"""`manyhands hub`: run a hub until it is told to stop, and say how to join it."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from manyhands.core.address import HUB_PORT, host_port
from manyhands.links.hub import Hub

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
def hub(
    bind: Annotated[
        str | None,
        typer.Option(
            help=f"HOST:PORT to listen on; port 0 is any. (default 0.0.0.0:{HUB_PORT}, "
            "or 127.0.0.1 with --insecure)"
        ),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(
            help="HOST[:PORT] that peers reach it by, for the join code. (default: a guess)"
        ),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            help="Folder for key, token and runs: a restart is the same hub "
            "(default: manyhands/hub in $XDG_STATE_HOME or ~/.local/state)"
        ),
    ] = None,
    run: Annotated[list[str] | None, typer.Option(help="Serve this run only; repeatable.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="No TLS, no token: loopback only.")
    ] = False,
    door: Annotated[
        bool,
        typer.Option(
            "--door/--no-door",
            help="Peers of this machine come in by a Unix socket, or by TCP as all others.",
        ),
    ] = True,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON line on stdout.")] = False,
) -> None:
    """Run a hub: the meeting point that all peers of a run dial.

    It prints a join code, which is a secret: whoever has it can take part.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    bind = bind or (f"127.0.0.1:{HUB_PORT}" if insecure else f"0.0.0.0:{HUB_PORT}")
    state = state or default_state()
    # Waited for, not handled: a second Ctrl-C does not fall into the closing.
    ends = (signal.SIGINT, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    runs = frozenset(run) if run else None
    with Hub(
        bind, advertise=advertise, state=state, insecure=insecure, door=door, runs=runs
    ) as running:
        _announce(running, state, json_output, guessed=advertise is None)
        signal.sigwait(ends)
    if not json_output:
        print("stopped; peers look for it for a minute")


def default_state() -> Path:
    """Where a hub keeps its identity when nobody says otherwise."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "manyhands" / "hub"


def _announce(hub: Hub, state: Path, json_output: bool, *, guessed: bool) -> None:
    address = hub.address
    if json_output:
        said = {"code": address.code(), "host": address.host, "port": address.port}
        print(json.dumps({**said, "insecure": address.insecure, "state": str(state)}), flush=True)
        return
    where = f"{host_port(address.host, address.port)}"
    print(f"hub listens; peers reach it at {where}" + " (a guess: --advertise)" * guessed)
    print(f"state: {state}\n")
    if address.insecure:
        print(f"without TLS and token, for this machine only:\n\n    {address}?insecure=1\n")
    else:
        print(f"join code (a secret):\n\n    {address.code()}\n")
    print("peers: manyhands run --run NAME train.py, with it in MANYHANDS_URL (or after --hub);")
    print('or init_process_group("manyhands", init_method=...), or manyhands.open_link(...),')
    print("with it and with MANYHANDS_RUN. NAME is one for what they do together")
    print("to check it: manyhands doctor -    and paste it", flush=True)
