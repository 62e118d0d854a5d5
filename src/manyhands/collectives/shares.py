"""Who computes what in the next round: shares, members, and the record that says so. Pure.

Every peer that evaluates these functions must get the same answer, so they take only what all
peers know in common, and calculate in integers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from manyhands.collectives.messages import Newcomer, Record, SelfReport, Share
from manyhands.collectives.ranges import EMPTY, Ranges
from manyhands.core.peers import PeerState, View, ViewNumber

RESYNC = Ranges.whole(1)  # what a re-sync has for samples: who has it gives its parameters


def share_out(
    ranges: Ranges, members: Sequence[int], speeds: Mapping[int, int]
) -> tuple[Share, ...]:
    """Divide the samples among the members in proportion to their speeds.

    Contiguous pieces in the order of `members`, by largest remainder; of equal remainders the
    earlier member's counts. One whose speed is not known counts as the slowest of the others: it
    must not hold them up, and has to show what it can. `members` must not be empty.
    """
    slowest = min((speed for speed in speeds.values() if speed), default=1)
    speeds = {m: speeds.get(m) or slowest for m in members}
    count, total = len(ranges), sum(speeds[m] for m in members)
    quotas = [count * speeds[m] // total for m in members]
    remainders = [count * speeds[m] % total for m in members]
    by_remainder = sorted(range(len(members)), key=lambda i: -remainders[i])  # stable: order kept
    for i in by_remainder[: count - sum(quotas)]:
        quotas[i] += 1
    return tuple(map(Share, members, ranges.pieces(quotas)))


def supply(ranges: Ranges, members: Sequence[int], anchors: Sequence[int]) -> tuple[Share, ...]:
    """All of it to the first anchor that is a member; if none is left, to the first member."""
    chosen = next((peer for peer in anchors if peer in members), members[0])
    return tuple(Share(peer, ranges if peer == chosen else EMPTY) for peer in members)


class Classes(NamedTuple):
    """Of the members of a round, those whose states may drift apart."""

    digest: bytes = b""  # of which there are; none: all are of one
    anchors: tuple[int, ...] = ()  # who is of the class whose state all adopt, in roster order


ONE_CLASS = Classes()


class Resyncs(NamedTuple):
    """How the lead of a round finds out whether the next is a re-sync; its word counts."""

    classes: Callable[[Mapping[int, SelfReport]], Classes] = lambda reports: ONE_CLASS
    """What the members' reports, in roster order, say of their classes."""
    every: int = 1
    """After so many rounds those of several classes adopt the parameters of one."""


NO_RESYNCS = Resyncs()


def next_members(view: View, members: Collection[int]) -> tuple[int, ...]:
    """The members of the next round: those of this one that do not leave, and all active peers.

    In roster order. A member that the view does not show any more stays in, at the end: its
    removal is a cut, and the cut deals with it. (One that went quietly is no member.)
    """
    shown = {m.peer.incarnation: m.state for m in view.roster}
    active = [peer for peer, state in shown.items() if state is PeerState.ACTIVE]
    return (*active, *(m for m in members if m not in shown))


@dataclass(frozen=True, slots=True)
class Closure:
    """What the lead of a round knows when it writes the record."""

    view: View  # its newest
    members: tuple[int, ...]  # of this round
    reports: Mapping[int, SelfReport]  # that came with their contributions to part 0
    prev: bytes  # chain before this round
    generation: ViewNumber
    quarantine: Ranges
    governing: Record  # the record that this round was begun with
    last: bool  # no round with samples follows
    following: Ranges  # all samples of the next round, if it is not a closing one
    classes: Classes = ONE_CLASS  # of this round's members
    is_time: bool = False  # for a re-sync, if there are several


def next_record(closure: Closure) -> Record:
    """The record that closes the lead's round and governs the next."""
    members = next_members(closure.view, closure.members)
    closing = closure.last or not members  # nothing left to do, or everybody wants to leave
    if closing:
        members = _with_leavers(closure, members)
    speeds = {peer: report.speed for peer, report in closure.reports.items()}
    digest, anchors = closure.classes
    resync = not closing and _is_resync_due(closure, members)
    if resync:
        shares = supply(RESYNC, members, anchors)
    else:
        shares = share_out(EMPTY if closing else closure.following, members, speeds)
    return Record(
        prev=closure.prev,
        view=closure.view.number,
        generation=closure.generation,
        shares=shares,
        quarantine=closure.quarantine,
        closing=closing,
        snapshot_for=_asks(closure),
        speeds=tuple(speeds.get(peer, 0) for peer in members),
        sync=closure.governing.sync,
        classes=digest,
        anchors=anchors,
        resync=resync,
        num_resyncs=closure.governing.num_resyncs + resync,
    )


def _is_resync_due(closure: Closure, members: Sequence[int]) -> bool:
    """In time, and when there are other classes; not after one, which was for those who came too.

    Without a member that could begin it, it is not worth a round.
    """
    governing, (digest, anchors) = closure.governing, closure.classes
    if governing.resync or not any(peer in members for peer in anchors):
        return False
    return closure.is_time or digest != governing.classes


def _with_leavers(closure: Closure, members: tuple[int, ...]) -> tuple[int, ...]:
    """In a closing round everybody takes part once more: whoever commits it may exit."""
    everybody = {*members, *closure.members}
    order = [m.peer.incarnation for m in closure.view.roster]
    shown = [peer for peer in order if peer in everybody]
    return (*shown, *(m for m in closure.members if m not in order))


def _asks(closure: Closure) -> tuple[Newcomer, ...]:
    """Each newcomer's latest Ask, of all that members have passed on."""
    latest: dict[int, Newcomer] = {}
    for member in closure.members:
        for ask in closure.reports[member].asks:
            latest[ask.peer] = max(ask, latest.get(ask.peer, ask))
    return tuple(latest.values())
