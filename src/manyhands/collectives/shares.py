"""Who computes what in the next round: shares, members, and the record that says so. Pure.

Every peer that evaluates these functions must get the same answer, so they take only what all
peers know in common, and calculate in integers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from manyhands.collectives.messages import Newcomer, Record, SelfReport, Share
from manyhands.collectives.ranges import EMPTY, Ranges
from manyhands.core.peers import PeerState, View, ViewNumber


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


def next_record(closure: Closure) -> Record:
    """The record that closes the lead's round and governs the next."""
    members = next_members(closure.view, closure.members)
    closing = closure.last or not members  # nothing left to do, or everybody wants to leave
    if closing:
        members = _with_leavers(closure, members)
    speeds = {peer: report.speed for peer, report in closure.reports.items()}
    return Record(
        prev=closure.prev,
        view=closure.view.number,
        generation=closure.generation,
        shares=share_out(EMPTY if closing else closure.following, members, speeds),
        quarantine=closure.quarantine,
        closing=closing,
        snapshot_for=_asks(closure),
        speeds=tuple(speeds.get(peer, 0) for peer in members),
        sync=closure.governing.sync,
    )


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
