"""The cluster that a command speaks to: its options, its errors as exit codes, values as JSON."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from manyhands.cluster.client import Cluster
from manyhands.cluster.dial import CoordinatorRefused, CoordinatorUnreachable
from manyhands.cluster.errors import NoSuchJob
from manyhands.core.errors import UsageError

Coordinator = Annotated[
    str | None,
    typer.Option(
        "--coordinator",
        metavar="HOST:PORT|CODE",
        help="Where the cluster is. (default: $MANYHANDS_COORDINATOR, or what --state says)",
    ),
]
StateFolder = Annotated[
    Path | None,
    typer.Option(
        "--state",
        metavar="DIR",
        help="The folder of `manyhands up`, where its token is. "
        "(default: manyhands/cluster in $XDG_STATE_HOME or ~/.local/state)",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout, the rest on stderr.")]
JobId = Annotated[int, typer.Argument(metavar="ID", min=1, help="The job's number.")]

_TYPED = frozenset({"key-taken", "no-such-rank", "no-such-attempt", "usage"})
"""Refusals of what the user typed, though it is for the coordinator to see."""


@contextlib.contextmanager
def connect(coordinator: str | None, state: Path | None) -> Generator[Cluster]:
    """The client. What the user typed wrongly becomes a UsageError: exit code 2."""
    where = coordinator or None
    with Cluster(where, state=None if state is None else state.expanduser()) as cluster:
        try:
            yield cluster
        except NoSuchJob as error:
            raise UsageError(error.message, hint=error.hint) from None
        except CoordinatorRefused as error:
            if error.code in _TYPED:
                raise UsageError(error.message, hint=error.hint) from None
            raise
        except CoordinatorUnreachable as error:
            if state is not None and where is None:  # then the environment is not looked at
                name = shlex.quote(str(state))
                hint = f"is it up? `manyhands up --state {name}` starts it"
                raise CoordinatorUnreachable(error.message, hint=hint) from None
            hints = [error.hint] if error.hint else []
            if "`manyhands up`" not in (error.hint or ""):
                hints.append("`manyhands up` starts a cluster on this machine")
            raise CoordinatorUnreachable(error.message, hint="; ".join(hints)) from None


def show(value: object) -> None:
    """A value of the API on stdout, as the API has it: one line of JSON."""
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.buffer.flush()


def say(text: str) -> None:
    """A word for people, beside the data."""
    print(text, file=sys.stderr, flush=True)
