"""`manyhands doctor`: everything that could go wrong, measured, with remedies."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from manyhands.core.errors import UsageError
from manyhands.doctor.examine import Request, examine, resolve
from manyhands.doctor.report import (
    Finding,
    Report,
    Status,
    secrets_of,
    without_secrets,
)

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
_SIGNS = {
    Status.OK: ("✓", "green"),
    Status.WARNING: ("!", "yellow"),
    Status.PROBLEM: ("✗", "bold red"),
    Status.SKIPPED: ("-", "dim"),
}
_CHECK_WIDTH = 18  # of the longest name of a check


@app.command()
def doctor(
    address: Annotated[
        str | None,
        typer.Argument(
            metavar="[URL|CODE|-]",
            help="The hub or broker; - reads it from stdin, where no other user sees it. "
            "(default: $MANYHANDS_URL)",
        ),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(help="The run you mean to join, for hubs and rights that serve one run."),
    ] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="The report as JSON on stdout.")
    ] = False,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=60.0, help="How long to measure bandwidth.")
    ] = 2.0,
) -> None:
    """Find everything that could go wrong: on this machine, and on the way to a hub or broker.

    The test is made in a private run: a run that is going on does not notice it. Exit code 0:
    nothing failed; 1: a check failed; 2: the address cannot be used.
    """
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr)
    if address == "-":
        address = sys.stdin.readline().strip()
        if not address:
            raise typer.BadParameter("standard input has no address for -")
    start = time.monotonic()
    found = resolve(address, run, os.environ)
    bad = found if isinstance(found, UsageError) else None
    known = None if isinstance(found, UsageError) else found
    secrets = secrets_of(address or os.environ.get("MANYHANDS_URL"), known)
    request = Request(address=known, bad_address=bad, seconds=seconds)
    findings = (without_secrets(finding, secrets) for finding in examine(request))
    shown = tuple(findings if json_output else _show_each(findings))
    report = Report(
        findings=shown,
        address=None if known is None else str(known),
        elapsed_s=time.monotonic() - start,
    )
    if json_output:
        print(json.dumps(report.plain(), indent=2))
    else:
        _show_end(report)
    raise typer.Exit(report.exit_code)


def _show_each(findings: Iterator[Finding]) -> Iterator[Finding]:
    """Pass the findings on, each printed as it comes."""
    console = Console()
    for finding in findings:
        if console.is_terminal:
            show(console, finding)
        else:
            print(plain_lines(finding), flush=True)
        yield finding


def show(console: Console, finding: Finding) -> None:
    """One finding on a terminal, wrapped to its width. No text of it is taken for markup."""
    sign, style = _SIGNS[finding.status]
    lines = Text(finding.summary, style="dim" if finding.status is Status.SKIPPED else "")
    if finding.remedy is not None:
        lines.append(f"\n→ {finding.remedy}", style="cyan")
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(width=_CHECK_WIDTH, no_wrap=True)
    table.add_column(ratio=1)
    table.add_row(Text(sign, style), Text(finding.check, style), lines)
    console.print(table, highlight=False)


def plain_lines(finding: Finding) -> str:
    """One finding as lines for a file or a pipe."""
    line = f"{finding.status.value:<8} {finding.check:<{_CHECK_WIDTH}} {finding.summary}"
    return line if finding.remedy is None else f"{line}\n{'':<9}remedy: {finding.remedy}"


def _show_end(report: Report) -> None:
    problems, warnings = report.num(Status.PROBLEM), report.num(Status.WARNING)
    what = f"{problems} problem{'' if problems == 1 else 's'}" if problems else "nothing failed"
    if warnings:
        what += f", {warnings} warning{'' if warnings == 1 else 's'}"
    skipped = report.num(Status.SKIPPED)
    print(f"\n{what}; {skipped} not checked; {report.elapsed_s:.1f} s")
