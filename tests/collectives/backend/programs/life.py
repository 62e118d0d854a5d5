"""Entering and leaving the group."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist


def join(*, url: str, world: int, timeout_s: float = 60.0) -> None:
    name = int(os.environ["CREW_RANK"])
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
