"""Refusal: what becomes of samples whose contribution cannot be used. Pure.

All members see the same refusals, in the same attempts, so all of them come to the same here.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from manyhands.collectives.messages import Fault, Share, Sum
from manyhands.collectives.ranges import EMPTY, Ranges
from manyhands.collectives.shares import share_out


class OnRefusal(enum.Enum):
    """What a run does about a contribution that cannot be used; the same at all its peers."""

    SKIP = "skip"  # its samples count nothing in this round
    REDO = "redo"  # others compute them once more; what is refused again counts nothing
    STOP = "stop"  # the run stops


@dataclass(frozen=True, slots=True)
class Doubts:
    """What was refused in the attempts at a round so far, and, since the last cut, who gave it."""

    peers: frozenset[int] = frozenset()
    samples: Ranges = EMPTY


@dataclass(frozen=True, slots=True)
class SecondOpinion:
    """What follows from a refusal, if others shall compute the samples once more."""

    doubts: Doubts
    claims: Mapping[int, Ranges]  # what is computed once more, and by whom
    quarantine: Ranges  # the rest of what was refused


def blamed(heads: Sequence[Sum], refused: Ranges) -> tuple[tuple[Share, ...], tuple[Fault, ...]]:
    """Of an attempt, as far as these of its results tell: which contributions, and why."""
    given = heads[0].contributions if heads else ()
    bad = tuple(share for share in given if share.ranges & refused)
    return bad, tuple(fault for head in heads for fault in head.faults)


def ask_others(doubts: Doubts, contributions: Sequence[Share], refused: Ranges) -> SecondOpinion:
    """Have others compute what these contributions were refused for.

    Nobody whose contribution was refused is asked again in this round, so there are at most as
    many refusals as members. Samples that two peers were refused for are the cause themselves.
    """
    peers = doubts.peers | {share.peer for share in contributions if share.ranges & refused}
    others = [share.peer for share in contributions if share.peer not in peers]
    again = refused - doubts.samples if others else EMPTY
    # Nothing that all members know says how fast each of them is now.
    shares = share_out(again, others, dict.fromkeys(others, 1)) if others else ()
    return SecondOpinion(
        Doubts(peers, doubts.samples | refused),
        {share.peer: share.ranges for share in shares},
        refused - again,
    )
