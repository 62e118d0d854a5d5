"""Comparison: what an agent has to do, from what is wanted and what it holds. Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from manyhands.cluster.messages import Phase, Want

AttemptKey = tuple[int, int]
"""(job, attempt)"""


class Verb(enum.Enum):
    """One thing to do with an attempt."""

    BEGIN = "begin"
    """Take it in: ready, with a port where rank 0 is here."""
    DECLINE = "decline"
    """It is to end and was never begun: hold it as ended."""
    START = "start"
    STOP = "stop"
    """Ask its processes to leave, with the grace of its spec."""
    FORGET = "forget"


class Held(NamedTuple):
    """What matters here of an attempt that the agent has."""

    phase: Phase
    stopping: bool = False
    log_settled: bool = True
    """Its log was sent or refused to the last byte."""


class Deed(NamedTuple):
    """Do this with that attempt."""

    verb: Verb
    key: AttemptKey


def compare(
    wants: Sequence[Want], held: Mapping[AttemptKey, Held], *, may_start: bool
) -> list[Deed]:
    """What is missing, at most one deed an attempt; nothing when all is as it is wanted.

    An attempt is only ever begun when nothing is held of it, and started when it is ready.
    """
    wanted = {(want.job, want.attempt): want for want in wants}
    deeds = [
        Deed(verb, key)
        for key, want in wanted.items()
        if (verb := _for_wanted(want, held.get(key), may_start)) is not None
    ]
    deeds += [
        Deed(verb, key)
        for key, has in held.items()
        if key not in wanted and (verb := _for_unwanted(has)) is not None
    ]
    return deeds


def _for_wanted(want: Want, has: Held | None, may_start: bool) -> Verb | None:
    if has is None:
        if want.stop:
            return Verb.DECLINE
        return Verb.BEGIN if may_start else None
    if want.stop:
        return None if has.stopping or has.phase is Phase.ENDED else Verb.STOP
    ready = has.phase is Phase.READY and want.task.master_port > 0
    return Verb.START if ready and may_start else None


def _for_unwanted(has: Held) -> Verb | None:
    if has.phase is Phase.ENDED:
        return Verb.FORGET if has.log_settled else None
    return None if has.stopping else Verb.STOP
