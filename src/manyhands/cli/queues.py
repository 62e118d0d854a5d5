"""`manyhands queues`: make, purge and look at the queues that DeepBooster's trainers use."""

from __future__ import annotations

import json
import shlex
import sys
from typing import Annotated

import typer

from manyhands.core.address import AmqpAddress
from manyhands.core.errors import Refused
from manyhands.links.amqp import login_of
from manyhands.links.amqp.login import AmqpLogin
from manyhands.links.amqp.plain import read_broker
from manyhands.links.amqp.queues import check_queue, limited_user, look, purge, set_up

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Url = Annotated[
    str,
    typer.Option(
        "--url",
        envvar="MANYHANDS_URL",
        help="amqps://USER:PASSWORD@HOST/VHOST, or amqp:// for this machine's broker; "
        "amqp:// to another works, with a warning.",
    ),
]
Queues = Annotated[list[str], typer.Argument(metavar="QUEUE...", help="Names of queues.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]


@app.callback()
def queues() -> None:
    """Make, purge and look at the queues that DeepBooster's trainers use."""


@app.command("setup")
def setup_queues(
    names: Queues,
    url: Url,
    user: Annotated[
        str | None,
        typer.Option(help="Also print the rabbitmqctl lines for a user with these rights only."),
    ] = None,
    json_output: AsJson = False,
) -> None:
    """Make the queues that are missing, and bind each to amq.topic by its name."""
    address, login = _broker(url, names)
    made = set_up(login, names)
    lines = [] if user is None else limited_user(address.vhost, user, names)
    if json_output:
        print(json.dumps({"made": made, "bound": names, "user": lines}))
        return
    for name in names:
        print(f"{name}: {'made' if name in made else 'was there'}, bound to amq.topic")
    if lines:
        print("\non the broker's machine:\n")
        print("\n".join(f"    {line}" for line in lines))


@app.command("purge")
def purge_queues(names: Queues, url: Url, json_output: AsJson = False) -> None:
    """Throw away what waits in the queues."""
    _, login = _broker(url, names)
    purged = purge(login, names)
    if json_output:
        print(json.dumps(purged))
        return
    for name, count in purged.items():
        print(f"{name}: {count} message{'' if count == 1 else 's'} purged")


@app.command("list")
def list_queues(names: Queues, url: Url, json_output: AsJson = False) -> None:
    """What waits in the queues, and how many consume from them. Exit code 1: one is missing."""
    _, login = _broker(url, names)
    found = look(login, names)
    if json_output:
        plain = {name: state and state._asdict() for name, state in found.items()}
        print(json.dumps(plain))
    else:
        for name, state in found.items():
            said = "is not there"
            if state is not None:
                said = f"{state.messages} messages, {state.consumers} consumers"
            print(f"{name}: {said}")
    missing = [name for name, state in found.items() if state is None]
    if missing:
        raise Refused(
            "missing",
            f"not there: {', '.join(missing)}",
            hint=f"{shlex.join(['manyhands', 'queues', 'setup', *missing])} --url URL",
        )


def _broker(url: str, names: list[str]) -> tuple[AmqpAddress, AmqpLogin]:
    address, warning = read_broker(url)
    for name in names:
        check_queue(name)
    if warning is not None:
        print(f"warning: {warning}", file=sys.stderr)
    return address, login_of(address)
