"""DeepPool's cluster.py: a cluster in a terminal, until Ctrl-C.

    python -m manyhands.compat.deeppool.cluster --addrToBind 127.0.0.1:12347 --be_batch_size=0 \\
        --cpp --logdir logs --hostfile hostfile.txt

It is what `manyhands up` starts, with DeepPool's flags and with its cpprt<slot>.out files. Flags
that mean nothing here are taken, and said to be ignored; flags that nobody knows are errors.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from manyhands.cluster.foreground import READY_LINE, serve, tell
from manyhands.cluster.hostfile import HostLine, read_hostfile
from manyhands.cluster.identity import default_state
from manyhands.cluster.server import PORT
from manyhands.cluster.up import Ready, Up, UpSettings
from manyhands.compat.deeppool.transcripts import Slots, Transcripts
from manyhands.core.errors import ManyhandsError, UsageError

_BACKGROUND = "a background job is a job: manyhands submit --priority best-effort"
_NO_RUNTIME = "there is no C++ runtime"
_OF_THE_RUNTIME = (
    *("myAddr", "device", "rank", "worldSize", "debug", "cuda_profile", "use_fg_graph"),
    *("min_layer_sync", "sync_bucket_size", "profile_stage_time", "profile_layer_times_graph"),
    *("profile_layer_times_timers", "graph_merge_min_us", "graph_merge_max_us"),
    "graph_merge_max_subgraphs",
)
_OF_BACKGROUND_JOBS = (
    *("sample_per_kernel", "be_jit_file", "use_be_graph", "be_image_px", "run_be_as_hipri"),
    *("be_graph_split_ms", "be_tasklet_depth", "fg_tasklet_depth", "target_slowdown_factor"),
    "be_batch_size",
)
_IGNORED = {
    "c10dBackend": "a job's program chooses its own",
    "logLevel": "it did nothing in DeepPool either",
    "pathToConfig": "hosts are in --hostfile",
    "install": "hosts need manyhands installed: pip install manyhands",
    "profile": "there is no planner to measure for",
    "cpp": _NO_RUNTIME,
    "cifar_dataset": "a job's program has its data: --data",
    **dict.fromkeys(_OF_THE_RUNTIME, _NO_RUNTIME),
    **dict.fromkeys(_OF_BACKGROUND_JOBS, _BACKGROUND),
}
"""Flag -> why nothing comes of it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a cluster until it is taken down; returns the exit code.

    0 taken down, 1 an error of manyhands, 2 something that was typed.
    """
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", stream=sys.stderr)
    options = parser().parse_args(arguments)
    for line in ignored(options):
        _complain(line)
    try:
        settings = settings_of(options)
        if os.geteuid() == 0 and settings.user is None and settings.hosts:
            _complain("warning: jobs run as root; --user NAME has them run as somebody else")
        run(settings)
    except ManyhandsError as error:
        _complain(f"error: {error}")
        return 2 if isinstance(error, UsageError) else 1
    _say("the cluster is down")
    return 0


def parser() -> argparse.ArgumentParser:
    """DeepPool's flags, and --state and --user."""
    made = argparse.ArgumentParser(
        prog="python -m manyhands.compat.deeppool.cluster",
        description="A cluster that takes training jobs, with DeepPool's flags.",
        allow_abbrev=False,
    )
    add = made.add_argument
    add("--addrToBind", default=f"127.0.0.1:{PORT}", metavar="HOST:PORT")
    add("--hostfile", type=Path, help="ADDRESS,GPU on each line (default: all of this machine)")
    add("--logdir", type=Path, default=Path("logs"), help="for cpprt<slot>.out and all other logs")
    add("--manualLaunch", action="store_true", help="start no agents: they come by the join code")
    add("--state", type=Path, default=default_state(), help="for jobs, tokens and keys")
    add("--user", metavar="NAME", help="whom jobs run as, where this is root")
    group = made.add_argument_group("taken from DeepPool, and ignored")
    for name in _IGNORED:
        group.add_argument(f"--{name}", nargs="?", const="", help=argparse.SUPPRESS)
    group.description = " ".join(f"--{name}" for name in _IGNORED)
    return made


def ignored(options: argparse.Namespace) -> list[str]:
    """A line for each flag that was given and means nothing here."""
    given = {name: getattr(options, name) for name in _IGNORED}
    return [
        f"ignored: --{name}{'=' * bool(value)}{value} ({_IGNORED[name]})"
        for name, value in given.items()
        if value is not None
    ]


def settings_of(options: argparse.Namespace) -> UpSettings:
    """Raises SettingsError: of the hostfile all that is wrong, by line."""
    hosts: tuple[HostLine, ...] = (HostLine(address="127.0.0.1", name="127.0.0.1"),)
    if options.hostfile is not None:
        hosts = read_hostfile(options.hostfile)
    return UpSettings(
        state=options.state.expanduser().absolute(),
        logdir=options.logdir.expanduser().absolute(),
        bind=options.addrToBind,
        hosts=() if options.manualLaunch else hosts,
        user=options.user,
    )


def run(settings: UpSettings) -> None:
    """Until a signal, or `manyhands down`. Raises what makes it fail."""

    def transcripts(up: Up) -> Transcripts:
        slots = slots_in_order(up, settings.hosts)
        return Transcripts(up.coordinator, up.logs, settings.logdir, slots, _complain)

    serve(Up(settings, say=_complain), _announce, _complain, beside=transcripts)


def slots_in_order(up: Up, hosts: Iterable[HostLine]) -> Callable[[], Slots]:
    """All slots of the cluster as the hostfile has them, then those of hosts that came by code."""

    def slots() -> Slots:
        found = {node.name: len(node.slots) for node in up.coordinator.nodes()}
        said = {host.name: len(host.gpus) or host.slots for host in hosts}
        sizes = {name: found.get(name, size) for name, size in said.items()}
        sizes |= {name: size for name, size in found.items() if name not in said}
        return [(name, slot) for name, size in sizes.items() for slot in range(size or 0)]

    return slots


def _announce(up: Up, ready: Ready) -> None:
    _say(f"coordinator  {up.url}")
    _say(f"hub          {up.hub_at} (where ranks meet)")
    for node in ready.nodes:
        _say(f"host         {node.name}: {len(node.slots)} slots")
    _say(f"logs         {up.settings.logdir}/cpprt<slot>.out")
    _say(f"state        {up.settings.state}")
    _say(f"join code, for manyhands agent (a secret):\n\n    {up.join_code}\n")
    _say(READY_LINE)


def _say(text: str) -> None:
    tell(sys.stdout, text)


def _complain(text: str) -> None:
    tell(sys.stderr, text)


if __name__ == "__main__":
    sys.exit(main())
