"""`manyhands agent CODE`: offer this machine to a cluster, until it is told to leave."""

from __future__ import annotations

import json
import logging
import re
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from manyhands.cluster.agent import Agent
from manyhands.cluster.client import HttpOffice
from manyhands.cluster.code import Code, read_code
from manyhands.cluster.devices import find_slots
from manyhands.cluster.dial import Dialler
from manyhands.cluster.identity import default_agent_state
from manyhands.cluster.job import MAX_SLOTS, NAME
from manyhands.cluster.ledger import StateHeld
from manyhands.cluster.messages import Origin
from manyhands.cluster.routes import Role
from manyhands.cluster.starters import HELD
from manyhands.core.address import is_loopback
from manyhands.core.errors import AddressError, SettingsError

_CODE_CHARACTERS = 4096  # more is no code, whatever is on stdin
app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
def agent(
    code: Annotated[
        str,
        typer.Argument(
            metavar="CODE",
            help="The join code that `manyhands up` prints; - reads it from stdin, where "
            "nobody else sees it.",
        ),
    ],
    name: Annotated[
        str | None, typer.Option(help="Of this host, in the cluster. (default: the machine's)")
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_SLOTS,
            metavar="N",
            help="How many to offer. (default: all GPUs; without GPUs, 1 for all cores)",
        ),
    ] = None,
    gpus: Annotated[
        str | None, typer.Option(metavar="0,1,...", help="Offer these GPUs only.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(metavar="HOST", help="Where other hosts' ranks reach this one. (a guess)"),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="What it has begun, and jobs' folders. (default: manyhands/agents/... in "
            "$XDG_STATE_HOME or ~/.local/state; with --user, in /var/lib)",
        ),
    ] = None,
    user: Annotated[
        str | None, typer.Option(metavar="NAME", help="Run jobs as this user; for root.")
    ] = None,
    origin: Annotated[Origin, typer.Option(hidden=True)] = Origin.USER,
    terms: Annotated[str, typer.Option(hidden=True)] = "",
    json_output: Annotated[
        bool, typer.Option("--json", help="Why it left, as JSON on stdout.")
    ] = False,
) -> None:
    """Offer this machine to a cluster: it dials out, and runs what the coordinator places here.

    It needs no open port. Without an answer for a lease it ends its jobs, and goes on dialling.
    Ctrl-C or SIGTERM ends its jobs, each with its grace, and then the agent; a second one kills
    them at once. Jobs run with this Python first on their PATH.

    Exit code: 0 it left as it should; 75 another agent works in its folder; 1 for an error of
    manyhands, 2 for something you typed.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    found = read_code(typed(code))
    if found.role is not Role.AGENT:
        raise AddressError(
            "this is a user's code: it submits jobs, and lets no agent in",
            hint="`manyhands up` prints the join code for agents",
        )
    host = host_name(name)
    offered = find_slots(slots, gpu_indices=numbers(gpus))
    where = default_agent_state(found.host, found.port, host, user)
    dialler = Dialler(found)
    try:
        why = Agent(
            lambda: HttpOffice(dialler),
            host=host,
            slots=offered,
            state=(state or where).expanduser().absolute(),
            address=address or own_address(found),
            user=user,
            origin=origin,
            terms=terms,
            secrets_=(found.token, found.pack()),
        ).run()
    except StateHeld as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(HELD) from None
    finally:
        dialler.close()
    if json_output:
        print(json.dumps({"host": host, "left": why}))
    else:
        print(f"host {host} left: {why}")


def typed(code: str) -> str:
    """The code itself, from stdin if so told. It may be pasted with an end of line, or without."""
    if code != "-":
        return code
    if sys.stdin.isatty():
        print("join code:", file=sys.stderr)
    text = sys.stdin.readline(_CODE_CHARACTERS).strip()
    if not text:
        raise AddressError("there is no code on stdin", hint="echo CODE | manyhands agent -")
    return text


def host_name(given: str | None) -> str:
    """What this host is called in the cluster. Raises SettingsError."""
    name = socket.gethostname().split(".")[0] if given is None else given
    if not re.fullmatch(NAME, name):
        raise SettingsError(
            f"a host cannot be called {name[:80]!r}",
            hint="--name: at most 64 letters, digits, '.', '_' or '-', the first no sign",
        )
    return name


def numbers(gpus: str | None) -> tuple[int, ...]:
    """Of --gpus 0,1,2. Raises SettingsError."""
    if gpus is None:
        return ()
    if not re.fullmatch(r"\d{1,4}(,\d{1,4})*", gpus):
        raise SettingsError(f"--gpus {gpus[:80]!r}", hint="their numbers, such as 0,1,3")
    return tuple(int(number) for number in gpus.split(","))


def own_address(code: Code) -> str:
    """The address of this machine on the way to the coordinator."""
    if is_loopback(code.host):
        return "127.0.0.1"
    # No packet is sent: connecting a UDP socket only asks which interface would be used.
    try:
        kind, _, _, _, where = socket.getaddrinfo(code.host, code.port, type=socket.SOCK_DGRAM)[0]
    except OSError:
        return socket.gethostname()  # it may be found later; then it is asked again, by a name
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(where)
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()
