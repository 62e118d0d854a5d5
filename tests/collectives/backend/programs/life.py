"""Entering and leaving the group."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from manyhands.collectives.backend import session
from manyhands.links.base import LinkSettings
from manyhands.links.messages import Terms


def join(
    *,
    url: str,
    world: int,
    timeout_s: float = 60.0,
    outage_s: float | None = None,
    lease_s: float | None = None,
) -> None:
    """`outage_s`: how long this process looks for a meeting point that has gone away.

    `lease_s`: after how long one that is silent is out, if these are the first at the run.
    """
    name = int(os.environ["CREW_RANK"])
    if outage_s is not None:
        os.environ["MANYHANDS_OUTAGE"] = str(outage_s)
    if lease_s is not None:  # no user's setting
        session.LinkSettings = partial(LinkSettings, terms=Terms(lease_s=lease_s))
    dist.init_process_group(
        "manyhands",
        init_method=url,
        rank=name,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )
    torch.manual_seed(1234 + name)


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
