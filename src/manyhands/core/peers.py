"""Peers, rosters and views: who takes part in a run, as plain values.

A *view* is a numbered roster. Views reach every peer of a run in the same order,
because one arbiter (the hub, or one peer elected by the broker) numbers them.
A *cut* is a view after which messages may be missing. docs/membership.md is the protocol.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import msgspec


class PeerId(NamedTuple):
    """One life of a named peer. A peer that comes back after its lease is a new incarnation.

    `incarnation` is a random number that the peer draws when it opens its link; it alone
    addresses the peer on the wire, so a message for a dead incarnation cannot reach its successor.
    """

    name: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.name}#{self.incarnation & 0xFFFF:04x}"


PEER_NAME_HINT = "1 to 100 bytes of printable text"


def is_peer_name(name: str) -> bool:
    """Whether a peer may have this name: it is shown in logs, and a view has many of them."""
    return name.isprintable() and 1 <= len(name.encode(errors="replace")) <= 100


class PeerState(enum.Enum):
    """How far a peer takes part."""

    WATCHING = "watching"  # connected; receives fan-outs, never slows anybody down
    ACTIVE = "active"  # follows every round, answers cuts
    LEAVING = "leaving"  # said that it will go


class ViewNumber(NamedTuple):
    """Orders views. `era` grows when the arbiter's memory was lost, `n` with every view."""

    era: int
    n: int

    def __str__(self) -> str:
        return f"{self.era}.{self.n}"


NO_VIEW = ViewNumber(0, 0)  # older than every view


class Member(msgspec.Struct, frozen=True, array_like=True):
    """One line of a roster."""

    peer: PeerId
    state: PeerState
    since: ViewNumber  # the view in which the peer got this state


class View(msgspec.Struct, frozen=True, array_like=True):
    """A numbered roster, in order of joining, with the latest cut.

    `cut_roster` is the roster of the cut itself: who must be heard before anything is decided.
    `founder` may start from its own state because the run never had an active peer;
    it is None once the run has state, so that nobody starts afresh in silence.
    `over` says that the run has finished: a newcomer has nothing left to do.
    """

    number: ViewNumber
    roster: tuple[Member, ...]
    cut: ViewNumber = NO_VIEW
    cut_roster: tuple[Member, ...] = ()
    founder: PeerId | None = None
    over: bool = False

    def member(self, incarnation: int) -> Member | None:
        """The roster's line of that incarnation, if it is there."""
        return next((m for m in self.roster if m.peer.incarnation == incarnation), None)

    def peers(self, *states: PeerState) -> tuple[PeerId, ...]:
        """The peers in one of these states (all peers when none is given), in roster order."""
        return tuple(m.peer for m in self.roster if not states or m.state in states)
