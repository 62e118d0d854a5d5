"""Ways into the group, and errors on the way."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from manyhands.collectives.backend import seats
from tests.collectives.backend.programs.failures import error_of


def enter(
    given: dict[int, dict[str, object]], *, url: str | None = None, timeout_s: float = 30.0
) -> dict[str, object]:
    """init_process_group with `given[this process]`; says what came of it, and leaves.

    "url" and "delay_s" may be among what is given, and "refusal_s", how long a refusal waits; with
    "stays" it takes part until an error.
    """
    mine = dict(given.get(int(os.environ["CREW_RANK"]), {}))
    time.sleep(mine.pop("delay_s", 0.0))
    seats._REFUSAL_S = mine.pop("refusal_s", 1.0)
    url, stays = mine.pop("url", url), mine.pop("stays", False)
    timeout = timedelta(seconds=mine.pop("timeout_s", timeout_s))
    start_s = time.monotonic()

    def init():
        dist.init_process_group("manyhands", init_method=url, timeout=timeout, **mine)

    error = error_of(init)
    took_s = time.monotonic() - start_s
    if error:
        assert not dist.is_initialized()
        return {"error": error, "took_s": took_s}
    try:
        while stays:
            if error := error_of(lambda: dist.all_reduce(torch.ones(1))):
                return {"error": error}
        total = torch.tensor([float(2 ** dist.get_rank())])
        dist.all_reduce(total)
        return {"rank": dist.get_rank(), "world": dist.get_world_size(), "sum": float(total)}
    finally:
        dist.destroy_process_group()


def again_and_again(url: str, turns: int) -> None:
    """The same processes, the same run, one group after another, with no pause in between."""
    rank = int(os.environ["CREW_RANK"])
    world = int(os.environ["CREW_WORLD"])
    for turn in range(turns):
        dist.init_process_group(
            "manyhands",
            init_method=url,
            rank=(rank + turn) % world,
            world_size=world,
            timeout=timedelta(seconds=30),
        )
        tensor = torch.full((20_000,), float(turn))
        dist.all_reduce(tensor)
        assert (tensor == turn * world).all()
        dist.new_group([0])
        dist.destroy_process_group()


def set_debug_level() -> None:
    """As TORCH_DISTRIBUTED_DEBUG does for a new interpreter."""
    dist.set_debug_level_from_env()
    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
