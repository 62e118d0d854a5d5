"""The verdict of a cut: what becomes of the round that was under way. Pure.

`decide` takes the complete set of Statuses of a cut and says what is filled in and who goes on;
`settle` says, once everybody who goes on is at the same round, who its members are and what each
of them computes. Both are functions of common knowledge alone, so all peers find the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from manyhands.collectives.messages import MOST_DEATHS, NO_TAG, Record, Share, Status, Tag
from manyhands.collectives.ranges import EMPTY, Ranges
from manyhands.collectives.shares import share_out, supply
from manyhands.core.peers import ViewNumber


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the Statuses of a cut come to."""

    stands: bool  # together they hold all results of the round that was under way
    target: int  # rounds committed by everybody who goes on
    stay: tuple[int, ...]  # who goes on, in roster order
    sent_back: tuple[int, ...]  # whose state cannot be brought to the target
    attempt: Tag  # whose results are filled in, for round `target - 1`; NO_TAG if none are
    fillers: Mapping[int, int]  # part -> who fans it out, for each part that somebody lacks
    quarantine: Ranges  # of round `target`
    generation: ViewNumber  # of the history that goes on
    refused: Ranges = EMPTY  # of round `target`, in the attempt that was under way
    losses: tuple[Ranges, ...] = ()  # of round `target`, before this cut
    doubted: Ranges = EMPTY  # of round `target`: claims may have moved since some have heard


@dataclass(frozen=True, slots=True)
class Settlement:
    """How the round after a cut is begun. No members: only leavers are left."""

    members: tuple[int, ...]
    claims: tuple[Share, ...]  # in order of `members`
    quarantine: Ranges
    inherited: bool  # some member was one before the cut; else a new generation begins
    losses: tuple[Ranges, ...] = ()  # samples whose claimants have died once, twice, by now
    deadly: Ranges = EMPTY  # those whose claimants have died once more than that

    def claims_of(self, peer: int) -> Ranges:
        """What this peer shall compute; nothing if it is no member."""
        return next((share.ranges for share in self.claims if share.peer == peer), EMPTY)


def decide(statuses: Mapping[int, Status], num_parts: int) -> Verdict:
    """The verdict on these Statuses, of all participants, in roster order."""
    # Whoever still has the history before a take-over may be ahead in number, but not in fact.
    generation = max(status.generation for status in statuses.values())
    current = [s for s in statuses.values() if s.generation == generation]
    top = max(status.applied for status in current)
    right = _right_chain([s for s in current if s.applied == top])
    at = {p: s for p, s in statuses.items() if s.applied == top and s.chain == right}
    newest = max(status.newest for status in at.values())
    held = {p: mask_of(s) for p, s in at.items() if s.newest == newest != NO_TAG}
    refused = Ranges.union(at[p].refused for p in held)
    together = 0
    for mask in held.values():
        together |= mask
    every = (1 << num_parts) - 1
    if together & every == every and not refused:
        fillers = _fillers({p: held.get(p, 0) for p in at}, num_parts)
        return _verdict(statuses, True, top + 1, at, newest, fillers, EMPTY)
    doubted = Ranges.union(status.doubted for status in at.values())
    quarantine = Ranges.union(status.quarantine for status in at.values()) | (refused - doubted)
    keepers = [p for p, s in at.items() if s.kept != NO_TAG]
    behind = _behind(statuses, top, at[keepers[0]].previous) if keepers else ()
    attempt, fillers = NO_TAG, {}
    if behind:
        attempt = at[keepers[0]].kept
        fillers = {k: keepers[k % len(keepers)] for k in range(num_parts)}
    verdict = _verdict(statuses, False, top, {*at, *behind}, attempt, fillers, quarantine)
    return replace(
        verdict,
        refused=refused,
        losses=_losses(at.values()),
        doubted=doubted,
    )


def settle(
    verdict: Verdict,
    statuses: Mapping[int, Status],
    record: Record,
    active: Collection[int],
    whole: Ranges,
) -> Settlement:
    """How those who are at the target go on, with the record that governs round `target`.

    `active` are the participants that were not leaving at the cut, `whole` all samples of the
    round. Claims stay with whoever has them: a running pass is not interrupted, and nothing is
    counted twice. Only what nobody has claimed is shared out. It had a claimant, who has died,
    unless that is one of those who answered: it leaves, or has not heard of its claim yet.
    """
    members = tuple(p for p in verdict.stay if p in active)
    fresh = {p for p in statuses if verdict.stands or statuses[p].applied < verdict.target}
    shares = {share.peer: share.ranges for share in record.shares}
    inside = {p for p in members if (p in shares if p in fresh else statuses[p].member)}
    quarantine = verdict.quarantine
    held = {
        p: shares.get(p, EMPTY)
        if p in fresh
        # Others have claimed what was refused in an attempt that this peer has not seen the end of.
        else statuses[p].claims - (verdict.doubted - statuses[p].doubted)
        for p in statuses
    }
    claims = {p: held[p] - quarantine for p in members}
    uncovered = whole - quarantine - Ranges.union(claims.values())
    if members:
        speeds = {p: statuses[p].speed for p in members}
        for share in (
            supply(uncovered, members, record.anchors)
            if record.resync
            else share_out(uncovered, members, speeds)
        ):
            claims[share.peer] |= share.ranges
    orphaned = uncovered - Ranges.union(held.values()) - verdict.doubted
    if record.resync or _is_uneven(statuses, verdict.stay, active):
        orphaned = EMPTY  # nobody dies of giving its parameters, or of what it has not heard of
    losses, deadly = _count(verdict.losses, orphaned)
    return Settlement(
        members,
        tuple(Share(p, claims[p]) for p in members),
        quarantine,
        bool(inside),
        losses,
        deadly,
    )


def _is_uneven(
    statuses: Mapping[int, Status], stay: Sequence[int], active: Collection[int]
) -> bool:
    """Whether some of those who go on may have been given claims that they have not heard of.

    That is so if others have settled a later cut than they. Whoever just follows has settled none:
    what it has begun at is the cut since which it is here.
    """
    settled = [statuses[p].begun.cut for p in stay if statuses[p].member or p not in active]
    return bool(settled) and any(statuses[p].begun.cut < max(settled) for p in stay)


def mask_of(status: Status) -> int:
    """The parts a Status says are held, as an integer with bit k set for part k."""
    return int.from_bytes(status.held, "little")


def _losses(statuses: Collection[Status]) -> tuple[Ranges, ...]:
    """Of a round so far, as those know it who were there at its last cut."""
    known = [(*status.losses, *[EMPTY] * MOST_DEATHS)[: MOST_DEATHS - 1] for status in statuses]
    return tuple(map(Ranges.union, zip(*known, strict=True)))


def _count(losses: tuple[Ranges, ...], lost: Ranges) -> tuple[tuple[Ranges, ...], Ranges]:
    """The losses with these samples lost once more, and those for which that is once too often."""
    counted: list[Ranges] = []
    for known in losses or [EMPTY] * (MOST_DEATHS - 1):
        counted.append(known | lost)
        lost &= known
    return tuple(counted), lost


def _right_chain(top: Sequence[Status]) -> bytes:
    """The chain of the most advanced peers: of the first member among them, or the first.

    They all agree unless somebody came with a foreign state of its own: it is sent back.
    """
    return next((status for status in top if status.member), top[0]).chain


def _behind(statuses: Mapping[int, Status], top: int, previous: bytes) -> list[int]:
    """Those one round behind that the kept result brings to `top`."""
    return [p for p, s in statuses.items() if s.applied == top - 1 and s.chain == previous]


def _fillers(held: Mapping[int, int], num_parts: int) -> dict[int, int]:
    """For each part that not everybody holds, the k-th holder: the work is spread."""
    lacked = 0
    for mask in held.values():
        lacked |= ~mask
    fillers: dict[int, int] = {}
    for k in range(num_parts):
        if lacked >> k & 1:
            holders = [p for p, mask in held.items() if mask >> k & 1]
            fillers[k] = holders[k % len(holders)]
    return fillers


def _verdict(
    statuses: Mapping[int, Status],
    stands: bool,
    target: int,
    staying: Collection[int],
    attempt: Tag,
    fillers: Mapping[int, int],
    quarantine: Ranges,
) -> Verdict:
    stay = tuple(p for p in statuses if p in staying)
    back = tuple(p for p in statuses if p not in staying)
    generation = max(status.generation for status in statuses.values())
    return Verdict(stands, target, stay, back, attempt, fillers, quarantine, generation)
