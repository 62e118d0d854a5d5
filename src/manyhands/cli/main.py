"""The `manyhands` command: its options, its table of commands, its exit codes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from manyhands._version import __version__
from manyhands.core.errors import ManyhandsError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """Where a command lives and what `manyhands --help` says of it."""

    module: str
    """The module whose `app`, a `typer.Typer`, is the command (or the group of commands)."""
    help: str
    """One line; kept here so that the overview loads none of the modules."""


COMMANDS: Mapping[str, Command] = {
    "demo": Command(
        module="manyhands.cli.demo",
        help="Train on real digits here, kill a peer, add one, compare with one process.",
    ),
    "run": Command(
        module="manyhands.cli.run",
        help="Start a training script as peers of one run.",
    ),
    "hub": Command(
        module="manyhands.cli.hub",
        help="Run a hub: the meeting point that all peers of a run dial.",
    ),
    "doctor": Command(
        module="manyhands.cli.doctor",
        help="Everything that could go wrong, measured, with remedies.",
    ),
    "up": Command(
        module="manyhands.cli.up",
        help="Start a cluster: a coordinator, and agents on this machine and others.",
    ),
    "down": Command(
        module="manyhands.cli.down",
        help="Take the cluster down, and wait until it is.",
    ),
    "agent": Command(
        module="manyhands.cli.agent",
        help="Offer this machine to a cluster.",
    ),
    "submit": Command(
        module="manyhands.cli.submit",
        help="Submit a job to the cluster: a command, run once for each slot.",
    ),
    "jobs": Command(
        module="manyhands.cli.jobs",
        help="List the cluster's jobs.",
    ),
    "status": Command(
        module="manyhands.cli.status",
        help="Show one job: its failure, where it is, every step.",
    ),
    "logs": Command(
        module="manyhands.cli.logs",
        help="Show what a rank of a job wrote, or writes.",
    ),
    "cancel": Command(
        module="manyhands.cli.cancel",
        help="End jobs.",
    ),
    "nodes": Command(
        module="manyhands.cli.nodes",
        help="List the cluster's hosts.",
    ),
    "queues": Command(
        module="manyhands.cli.queues",
        help="Make, purge and look at the queues that DeepBooster's trainers use.",
    ),
    "data": Command(
        module="manyhands.cli.data",
        help="Data sets by name: list, show, check, add; split a JSONL file.",
    ),
    "worker": Command(
        module="manyhands.worker.command",
        help="Offer this machine to a BossMan: build and run the layers that it sends.",
    ),
}
"""Every command by name, in the order of the overview."""


class LazyGroup(TyperGroup):
    """A group that lists its commands from `COMMANDS` and imports a module when it is called."""

    # Any: newer typers bring a click of their own, so click's types have no public name.
    def __init__(self, **attrs: Any) -> None:  # noqa: ANN401
        super().__init__(**attrs)
        for name, command in COMMANDS.items():
            self.commands[name] = TyperCommand(name, help=command.help)

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ANN401
        """The commands in the order of the table."""
        return list(COMMANDS)

    def resolve_command(
        self,
        ctx: Any,  # noqa: ANN401
        args: list[str],
    ) -> tuple[str | None, Any, list[str]]:
        """Finds the command by its placeholder, then loads the real one."""
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None and name in COMMANDS:
            command = load(COMMANDS[name])
        return name, command, rest


def load(command: Command) -> object:
    """Imports the module of a command and returns what typer makes of its `app`."""
    app = cast("typer.Typer", import_module(command.module).app)
    made = typer.main.get_command(app)
    # Typer keeps the line ends of a docstring: paragraphs would be broken twice.
    made.help = "\n\n".join(" ".join(p.split()) for p in (made.help or "").split("\n\n"))
    return made


def show_version(wanted: bool) -> None:
    """Prints the version and ends, when it was asked for."""
    if wanted:
        print(f"manyhands {__version__}")
        raise typer.Exit


def overview(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=show_version, is_eager=True),
    ] = False,
) -> None:
    """Train one PyTorch model with every machine you can reach."""


def build_app() -> typer.Typer:
    """The application, made anew for each call: nothing happens at import."""
    app = typer.Typer(
        cls=LazyGroup,
        no_args_is_help=True,
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        # A traceback with the values of all locals would print tokens and passwords.
        pretty_exceptions_enable=False,
    )
    app.callback()(overview)
    return app


def main() -> None:
    """Runs the command line and ends the process with its exit code.

    0 done; 1 an error of manyhands; 2 something the user typed; 130 interrupted. The error and
    its hint go to stderr. Any other exception is a bug and keeps its traceback.
    """
    try:
        build_app()()
    except ManyhandsError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
