"""Open: a process group of its own, beside torch's default one or without any.

    group = open_group("hub://host:7799/run", rank=0, world=3, timeout_s=600)
    ...
    group.shutdown()

For programs that must not touch what `init_process_group` has made, or will make, for the user.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from manyhands.collectives.backend.group import ManyhandsGroup
from manyhands.collectives.backend.session import Session
from manyhands.core.address import Address
from manyhands.links.base import LinkSettings


def open_group(
    where: str | Address,
    *,
    rank: int | None,
    world: int,
    timeout_s: float,
    meet_s: float | None = None,
    settings: LinkSettings | None = None,
    called_off: Callable[[], str | None] | None = None,
) -> ManyhandsGroup:
    """Meet the others of a run; returns when all `world` ranks are there.

    Whoever opens it closes it, by `shutdown`. Every operation has `timeout_s`, the meeting
    `meet_s` (or as long). `called_off` is asked now and then why nobody shall wait any more: then
    all who wait are refused. Raises Refused (and why), LinkTimeout naming who is missing,
    LinkError.
    """
    session = Session(
        where, rank, world, meet_s or timeout_s, settings=settings, called_off=called_off
    )
    ranks = range(session.world)
    group = ManyhandsGroup(session, "manyhands", ranks, timedelta(seconds=timeout_s))
    session.world_group = group  # its `shutdown` ends the session
    return group
