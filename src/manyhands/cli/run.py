"""`manyhands run`: a training script as N peers of one run, at a hub of its own or at another."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from manyhands.cli.launch import Output, Signals, launch
from manyhands.core.address import HubAddress, LocalAddress, check_run, host_port, is_loopback
from manyhands.core.errors import AddressError, ManyhandsError, Refused, SettingsError
from manyhands.core.peers import PEER_NAME_HINT, is_peer_name
from manyhands.core.settings import find, find_meeting_point
from manyhands.links.base import LinkSettings, dial, new_peer
from manyhands.links.hub import Hub, HubLimits

app = typer.Typer(add_completion=False)
_MOST_COPIES = 1024  # each is a process with a torch of its own: more is a slip of the hand
_LOOK_S = 0.2  # between two looks at who is left in the run


@app.command(
    context_settings={
        "help_option_names": ["-h", "--help"],
        "allow_interspersed_args": False,  # what follows SCRIPT is the script's
    }
)
def run(
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="A Python file, or with -m a module.")
    ],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="For the script, as they are.")
    ] = None,
    number: Annotated[
        int, typer.Option("-n", min=1, max=_MOST_COPIES, help="How many copies to start here.")
    ] = 1,
    hub: Annotated[
        str | None,
        typer.Option(
            metavar="URL|CODE",
            help="Where the run meets. (default: $MANYHANDS_URL, or a hub in this process)",
        ),
    ] = None,
    run_name: Annotated[
        str | None,
        typer.Option(
            "--run",
            metavar="NAME",
            help="The run. (default: the one in CODE; with a hub of its own, a new one)",
        ),
    ] = None,
    min_peers: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="K",
            envvar="MANYHANDS_MIN_PEERS",
            help="Begin with this many peers. (default: -n with a hub of its own, else 1)",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from what was saved. (or MANYHANDS_RESUME=1)")
    ] = False,
    resume_if_any: Annotated[
        bool,
        typer.Option(
            "--resume-if-any",
            help="Go on from what was saved; if nothing was, begin. (or MANYHANDS_RESUME=auto)",
        ),
    ] = False,
    bind: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Where its own hub listens; port 0 is any. (default 127.0.0.1:0)",
        ),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(
            metavar="HOST[:PORT]",
            help="What peers on other machines reach its own hub by. (default: a guess)",
        ),
    ] = None,
    module: Annotated[
        bool, typer.Option("-m", help="SCRIPT is a module, as in python -m.")
    ] = False,
    json_output: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Events as JSON lines on stdout: run, started, ended, done. "
            "What the script writes goes to stderr.",
        ),
    ] = False,
) -> None:
    """Start N copies of a training script as peers of one run.

    They meet at a hub in this process, whose join code brings in more machines, or at the one
    that you name. With -n above 1 each line of output says whose it is. A copy that dies does
    not stop the others. Ctrl-C or SIGTERM asks all to leave, a second one kills.

    Exit code: 0 if a copy got to the end and none failed by itself (a death by signal is no
    failure of the script); else that of the first failure; 128 + the signal if signals ended
    all copies, or this command; 1 for an error of manyhands; 2 for something you typed.
    """
    logging.basicConfig(level=logging.WARNING, format="manyhands: %(message)s", stream=sys.stderr)
    if not module and not Path(script).is_file():
        raise SettingsError(f"there is no script {script!r}", hint="a path, or -m and a module")
    resuming = how_to_resume(resume, resume_if_any, os.environ)
    arguments = ["-m"] * module + [script, *(args or [])]
    output = Output(events=json_output)
    url = find("url", hub, environ=os.environ)
    names = peer_names(number, shared=url is not None)
    if url is None:
        run_name = find("run", run_name, environ=os.environ) or f"run-{secrets.token_hex(4)}"
        check_own(run_name, max(number, min_peers or 1))
    elif bind or advertise:
        raise SettingsError(
            "--bind and --advertise are for a hub in this process, but a meeting point is named",
            hint="leave them out, or else --hub (MANYHANDS_URL, url in manyhands.toml)",
        )
    else:
        run_name = check_meeting_point(url, run_name)
    options = {"-n": number, "--min-peers": min_peers, "--bind": bind, "--advertise": advertise}
    if url is not None:  # which is a secret: it need not be said once more
        options |= {"--hub": hub and "CODE", "--run": run_name}
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(Signals())
        own = None
        if url is None:
            own = stack.enter_context(own_hub(bind or "127.0.0.1:0", advertise))
            url, min_peers = replace(own.near, run=run_name).code(), min_peers or number
            more = [] if min_peers <= number else ["--min-peers", str(min_peers)]
            announce(replace(own.address, run=run_name), [*more, *arguments], output)
        else:
            output.event("run", run=run_name, code=None)
        if min_peers is not None and min_peers > number:
            output.say(f"{number} of the {min_peers} peers that begin the run start here")
        setting = environment(url, run_name, number, min_peers, resume=resuming)
        setting["MANYHANDS_AGAIN"] = again(options, arguments)
        environments = {name: {**setting, "MANYHANDS_NAME": name} for name in names}
        outcome = launch([sys.executable, *arguments], environments, output, signals)
        code = outcome.code
        if own is not None and not outcome.stopped:
            others = partial(num_others, own, run_name, frozenset(names))
            code = outlast(others, signals, output) or code
    output.event("done", code=code)
    raise typer.Exit(code)


def peer_names(number: int, *, shared: bool) -> list[str]:
    """A name for each copy: the machine's and a number, or as the user's settings say.

    At a `shared` meeting point another launcher of this machine may be in the run already.
    """
    given = find("name", None, environ=os.environ)
    host = socket.gethostname().split(".")[0] + f"-{os.getpid()}" * shared
    names = [f"{given or host}-{i}" for i in range(number)]
    if given is not None and number == 1:
        names = [given]
    if not is_peer_name(names[-1]):
        raise SettingsError(f"peer name {names[-1][:100]!r} cannot be used", hint=PEER_NAME_HINT)
    return names


def how_to_resume(resume: bool, if_any: bool, environ: Mapping[str, str]) -> str | None:
    """What copies find as MANYHANDS_RESUME: `1`, `auto`, or nothing."""
    if resume and if_any:
        raise SettingsError("--resume and --resume-if-any", hint="one of them")
    if resume or if_any:
        return "auto" if if_any else "1"
    given = environ.get("MANYHANDS_RESUME", "").lower()
    if given in ("", "0", "false", "no"):
        return None
    if given not in ("1", "true", "yes", "auto"):
        raise SettingsError(f"MANYHANDS_RESUME is {given[:40]!r}", hint="1, 0 or auto")
    return "auto" if given == "auto" else "1"


def again(options: Mapping[str, object], arguments: list[str]) -> str:
    """The command that goes on from what was saved, for copies to say when they are interrupted."""
    given = [str(part) for item in options.items() if item[1] is not None for part in item]
    return shlex.join(["manyhands", "run", *given, "--resume", *arguments])


def environment(
    url: str, run: str, number: int, min_peers: int | None, *, resume: str | None
) -> dict[str, str]:
    """What a copy finds in its environment: it is not public, as a command line is."""
    # macOS knows no affinity.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    share = {"OMP_NUM_THREADS": str(max(1, (cores or 1) // number))} if number > 1 else {}
    own = ("MANYHANDS_RESUME", "MANYHANDS_WORLD_SIZE")
    inherited = {key: value for key, value in os.environ.items() if key not in own}
    return {
        "PYTHONUNBUFFERED": "1",
        **share,
        **inherited,
        "MANYHANDS_URL": url,
        "MANYHANDS_RUN": run,
        "MANYHANDS_LOCAL_PEERS": str(number),
        "MANYHANDS_MIN_PEERS": str(min_peers or 1),
        **({} if min_peers is None else {"MANYHANDS_WORLD_SIZE": str(min_peers)}),
        **({} if resume is None else {"MANYHANDS_RESUME": resume}),
    }


def check_own(run: str, num_peers: int) -> None:
    """Raise UsageError if a hub in this process cannot serve that."""
    check_run(run)
    if num_peers > (most := HubLimits().peers):
        raise SettingsError(
            f"{num_peers} peers are more than a hub in this process takes: {most}",
            hint="fewer with -n or --min-peers, or RabbitMQ with --hub amqps://...",
        )


def check_meeting_point(url: str, run: str | None) -> str:
    """The run to join. One clear error now rather than one from each copy.

    It tries a run that nobody is in: one that goes on does not notice.
    """
    address = find_meeting_point(url, run=run, name=None, environ=os.environ).address
    if isinstance(address, LocalAddress):
        raise AddressError(
            f"{address} is inside one process, and each copy is one",
            hint="leave it out: copies on this machine meet at a hub in this process",
        )
    if address.run is None:
        raise AddressError(f"{address} names no run", hint="--run NAME, or ?run=NAME after it")
    aside = replace(address, run=f"{address.run[:40]}.try-{secrets.token_hex(4)}")
    try:
        dial(aside, new_peer(), LinkSettings()).close()
    except Refused as refusal:
        if refusal.code != "run":  # a hub that serves certain runs knows us, but not this one
            raise
    return address.run


@contextlib.contextmanager
def own_hub(bind: str, advertise: str | None) -> Generator[Hub]:
    """A hub in this process. If a thread of it fails, that stops this process as SIGTERM does."""
    failed: list[str] = []
    usual = threading.excepthook

    def stop(what: threading.ExceptHookArgs) -> None:
        failed.append(what.exc_type.__name__)
        try:
            usual(what)
        finally:  # there may be nowhere to write it to
            signal.raise_signal(signal.SIGTERM)

    threading.excepthook = stop
    try:
        with Hub(bind, advertise=advertise) as hub:
            yield hub
    finally:
        threading.excepthook = usual
    if failed:
        raise ManyhandsError(f"the hub in this process failed ({failed[0]}); its error is above")


def num_others(hub: Hub, run: str, names: frozenset[str]) -> int:
    """How many peers are in the run that were not started here.

    Not counted are dead copies of ours, whose leases may run on.
    """
    room = hub.room(run)
    return 0 if room is None else sum(peer.name not in names for peer in room.view.peers())


def outlast(num_left: Callable[[], int], signals: Signals, output: Output) -> int | None:
    """Keep the hub until nobody is left, or a signal comes: then its exit code."""
    if num_left():
        output.say("others are in the run: the hub stays until they have left, or Ctrl-C")
    while num_left():
        if (number := signals.wait_for_stop(_LOOK_S)) is not None:
            return 128 + number
    return None


def announce(address: HubAddress, arguments: list[str], output: Output) -> None:
    """Say how others come in. The code is a secret, told here by intent: this is its hub."""
    output.say(f"run {address.run}, hub at {host_port(address.host, address.port)}")
    if output.events:
        return output.event("run", run=address.run, code=address.code())
    here_only = is_loopback(address.host)
    where = "on this machine (for others: --bind 0.0.0.0:0)" if here_only else "on other machines"
    command = shlex.join(["manyhands", "run", "--hub", address.code(), *arguments])
    return output.say(f"to add hands {where}; the code is a secret:\n\n    {command}\n")
