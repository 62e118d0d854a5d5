"""Script: the torch process group that whoever launched a script means.

    with mh.group() as peers:
        plan = mh.Plan.even(len(model), peers.size)

The same program then runs alone (`python train.py`), with `manyhands run` and with torchrun.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from manyhands.core.errors import SettingsError, UsageError

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Peers(NamedTuple):
    """How many take part, and which of them this is; alone: 0 of 1."""

    rank: int
    size: int


@contextmanager
def group(*, size: int | None = None, backend: str = "gloo") -> Generator[Peers]:
    """Join the process group of this script for the block, and leave it at its end.

    Under `manyhands run`, or wherever MANYHANDS_URL says where to meet, that is one of the backend
    "manyhands"; it has `size` peers, or as many as `manyhands run` waits for. Under torchrun it is
    one of `backend`. Else there is none: this process is alone, and `size` may be 1 only. A default
    group that is there already is used, and left as it is. Blocks until all peers are there. Raises
    UsageError if it does not know how many these are, and what init_process_group raises.
    """
    import torch.distributed as dist

    from manyhands.collectives.backend.register import register

    register()
    torch_dist: Any = dist  # its stubs leave these functions half typed
    if dist.is_initialized():
        yield _checked(Peers(dist.get_rank(), dist.get_world_size()), size)
        return
    arguments = arguments_of(os.environ, size, backend)
    if arguments is None:
        yield _checked(Peers(0, 1), size)
        return
    torch_dist.init_process_group(**arguments)
    try:
        yield Peers(dist.get_rank(), dist.get_world_size())
    finally:
        torch_dist.destroy_process_group()


def arguments_of(
    environ: Mapping[str, str], size: int | None, backend: str
) -> dict[str, Any] | None:
    """Those of init_process_group; None: nobody else is meant. Raises UsageError."""
    if size is not None and size < 1:
        raise UsageError(f"a group of {size} peers", hint="at least one")
    url = environ.get("MANYHANDS_URL")
    if url:
        size = size or _number(environ, "MANYHANDS_WORLD_SIZE") or _number(environ, "WORLD_SIZE")
        if size is None:
            raise UsageError(
                "how many peers the group has is not known",
                hint="manyhands run --min-peers N ..., or mh.group(size=N)",
            )
        return {"backend": "manyhands", "init_method": url, "world_size": size}
    if all(name in environ for name in _TORCHRUN):
        _checked(Peers(0, _number(environ, "WORLD_SIZE") or 1), size)
        return {"backend": backend}
    return None


def _checked(peers: Peers, size: int | None) -> Peers:
    if size is not None and size != peers.size:
        raise UsageError(
            f"a group of {size} peers is asked for, there {'is' if peers.size == 1 else 'are'} "
            f"{peers.size}",
            hint=f"start it with `manyhands run -n {size} ...`, or set MANYHANDS_URL",
        )
    return peers


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if text is None:
        return None
    if not text.isdigit() or int(text) < 1:
        raise SettingsError(f"{name} is {text!r}", hint="a number of peers, 1 or more")
    return int(text)
