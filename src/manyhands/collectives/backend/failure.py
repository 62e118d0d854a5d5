"""Failure: what ends a team, and how each operation's user is told. Pure."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from manyhands.core.errors import Excluded, LinkError, ManyhandsError, UsageError, WireError

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Iterable, Sequence

    from manyhands.collectives.backend import messages as words
    from manyhands.collectives.backend.exchange import Exchange, Target
    from manyhands.core.peers import PeerId, View

_RESTART = "restart the group; from a checkpoint if there is one"
_NAMED = 16  # ranks in one text


class TeamFailed(LinkError):
    """The team cannot go on: a member is gone, or messages are."""


class GaveUp(TeamFailed):
    """Another member said that it cannot go on."""


def broken_here(what: str, error: Exception) -> TeamFailed:
    """An operation has failed on this rank, by itself: nobody else will see why it is missing."""
    failed = TeamFailed(f"`{what}` failed on this rank: {error!r}")
    failed.__cause__ = error
    return failed


@contextmanager
def blaming(exchange: Exchange, sender: tuple[int, PeerId] | None = None) -> Generator[None]:
    """What is raised within is a failure of that operation; of `sender`'s, if it is a WireError."""
    try:
        yield
    except TeamFailed:
        raise
    except Exception as error:
        if sender is not None and isinstance(error, WireError):
            rank, peer = sender
            text = f"rank {rank} ({peer}) sent for `{exchange.form}` what is no value: {error}"
            raise TeamFailed(text) from error
        raise broken_here(exchange.form, error) from error


def judge_view(
    roster: Sequence[PeerId], parted: Collection[int], before: View, view: View
) -> TeamFailed | None:
    """What a new view means for a team of which `parted` ranks have said goodbye."""
    gone = [
        rank
        for rank, peer in enumerate(roster)
        if rank not in parted and view.member(peer.incarnation) is None
    ]
    if gone:
        names = ", ".join(f"rank {rank} ({roster[rank]})" for rank in gone)
        return TeamFailed(
            f"{names} is gone: it ended, its lease did, or another process came as that rank",
            hint=_RESTART,
        )
    # A goodbye explains a cut: whoever said it had nothing left to send. So does the end of a
    # stranger, from whom nobody here expects anything. Neither explains another era: the meeting
    # point came back without what was on its way.
    left = any(view.member(old.peer.incarnation) is None for old in before.roster)
    explained = left and view.number.era == before.number.era
    if view.cut != before.cut and not explained:
        return TeamFailed(
            "the meeting point lost messages of this run (a restart, or a broken connection)",
            hint=_RESTART,
        )
    return None


def judge_time(
    exchange: Exchange, late: Sequence[int], roster: Sequence[PeerId], now_s: float
) -> TeamFailed | None:
    """Whether an operation has waited for longer than its group allows; `late`: see `awaited`."""
    if now_s <= exchange.deadline_s:
        return None
    missing = exchange.waits_for()
    names = ", ".join(f"rank {rank} ({roster[rank]})" for rank in missing or late)
    what = "no data from" if missing else "what it sends was not taken by"
    return TeamFailed(
        f"`{exchange.form}` was not finished after {now_s - exchange.started_s:.0f} s: "
        f"{what} {names or 'the meeting point'}",
        hint="they are alive but have not called it, or with another root; or raise the group's "
        "timeout",
    )


def put_out(error: Excluded) -> TeamFailed:
    """This rank is out, perhaps because another process took its place."""
    taken = "another peer joined" in error.reason
    return TeamFailed(
        f"this process is out of its run: {error.reason}",
        hint="give each process a rank of its own, also where torchrun counts them anew on each "
        "machine"
        if taken
        else _RESTART,
    )


def judge_parted(
    exchange: Exchange, needed: Iterable[int], roster: Sequence[PeerId], parted: Collection[int]
) -> TeamFailed | None:
    """Whether an operation needs somebody who has said goodbye."""
    for rank in needed:
        if rank in parted:
            return TeamFailed(
                f"rank {rank} ({roster[rank]}) left the group before `{exchange.form}`",
                hint="it called destroy_process_group, or its program ended; its output says why",
            )
    return None


def disagreement(exchange: Exchange, rank: int, peer: PeerId, form: str) -> TeamFailed:
    """That rank takes the operation for another one."""
    return TeamFailed(
        f"rank {rank} ({peer}) runs `{form}` where this rank runs `{exchange.form}`",
        hint="all members of a group must call the same operations in the same order, with the "
        "same sizes, dtypes and roots",
    )


def surplus(
    exchange: Exchange, rank: int, peer: PeerId, k: int, target: Target | None
) -> TeamFailed:
    """That rank has sent other values than the operation has here."""
    size = f"{target.num_bytes} bytes" if target is not None and target.num_bytes else "no bytes"
    return TeamFailed(
        f"rank {rank} ({peer}) sent piece {k} of `{exchange.form}`; this rank expects {size} there",
        hint="sizes given to one operation must agree between its members",
    )


def twice(rank: int, peer: PeerId, piece: words.Piece) -> TeamFailed:
    """That rank has sent the same values again."""
    return TeamFailed(f"rank {rank} ({peer}) sent piece {piece.k} of `{piece.form}` twice")


def name_ranks(ranks: Sequence[int]) -> str:
    """In words; of many the first ones, and how many more."""
    named, more = ", ".join(map(str, ranks[:_NAMED])), len(ranks) - _NAMED
    return f"rank{'s' * (len(ranks) > 1)} {named}" + (f" and {more} more" if more > 0 else "")


def awaited(exchange: Exchange, late: Sequence[int]) -> str:
    """What it waits for, in words. `late`: the ranks that hold up what it sends."""
    missing = exchange.waits_for()
    if missing:
        return name_ranks(missing)
    return f"{name_ranks(late) if late else 'the meeting point'} to take what it sends"


def told(error: ManyhandsError, exchange: Exchange) -> ManyhandsError:
    """The error for one operation: what it was, and who was waited for."""
    if isinstance(error, UsageError):
        return error
    ranks = exchange.waits_for()
    waited = f", waiting for {name_ranks(ranks)}" if ranks else ""
    number = exchange.key.seq
    one = TeamFailed(f"`{exchange.form}` (number {number} of its group{waited}) failed: {error}")
    one.__cause__ = error
    return one
