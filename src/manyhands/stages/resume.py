"""Resume: what whoever ran a plan that broke is told: who is gone, and the command that goes on."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from manyhands.core.address import redact

_RANK = re.compile(r"\brank (\d+) \(")


def again(
    num_peers: int,
    environ: Mapping[str, str],
    arguments: Sequence[str],
    *,
    num_gone: int = 1,
    saved: bool = True,
) -> str:
    """The command that starts this program once more, for those of these peers who are not gone.

    Of a launcher that started only some of them nobody here knows which are left: its command is
    said for whichever machines are.
    """
    left = str(max(1, num_peers - num_gone))
    said = environ.get("MANYHANDS_AGAIN")
    if said is not None:
        words = shlex.split(said)
        # `manyhands run` puts its own options first, and --resume after them.
        options = words[: words.index("--resume")] if "--resume" in words else []
        if ["-n", str(num_peers)] in [options[i : i + 2] for i in range(len(options))]:
            for option in {"-n", "--min-peers"} & {*options}:
                words[words.index(option) + 1] = left
        if options and not saved:
            words.remove("--resume")
        return shlex.join(words)
    local = environ.get("LOCAL_WORLD_SIZE")
    if local is None:
        return shlex.join(["python", *arguments])
    if "MANYHANDS_JOB" in environ:  # whose ranks have all of torchrun's variables
        return shlex.join(["manyhands", "submit", "--gpus", left, "--", "python", *arguments])
    if local == str(num_peers):
        return shlex.join(["torchrun", "--nproc-per-node", left, *arguments])
    options = [
        *("--nnodes", f"1:{environ.get('GROUP_WORLD_SIZE', num_peers)}"),
        *("--nproc-per-node", local, "--rdzv-backend", "c10d"),
        # Which of them: it may be the one that is gone.
        *("--rdzv-endpoint", environ.get("MASTER_ADDR", "HOST")),
    ]
    return shlex.join(["torchrun", *options, *arguments])


def hint(command: str, saved: tuple[str, int] | None) -> str:
    """From the newest checkpoint, given as its place and how many steps it has; or from nothing."""
    if saved is None:
        return f"nothing was saved; to start anew with the peers that are left: {command}"
    url, num_steps = saved
    return (
        f"to go on after step {num_steps} with the peers that are left, from what is saved in "
        f"{redact(url)}, on a plan for them: {command}"
    )


def gone(reason: str) -> set[int]:
    """The ranks that a link says are gone; none, if it says something else."""
    names, died, _ = reason.partition(" is gone")
    return {int(rank) for rank in _RANK.findall(names)} if died else set()


def named(reason: str, peers: Sequence[str]) -> str:
    """Links speak of ranks: with which peers of the plan these are."""
    ranks = {int(rank) for rank in _RANK.findall(reason)}
    legend = ", ".join(
        f"rank {rank} is peer {peers[rank]}" for rank in sorted(ranks) if rank < len(peers)
    )
    return f"{reason} ({legend})" if legend else reason
