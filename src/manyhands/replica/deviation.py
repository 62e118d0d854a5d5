"""Deviation: peers that do not have the bits that they should have, and what becomes of them.

All peers apply the same mean to the same state, so those of one arithmetic have the same bits. Each
says fingerprints of its state with its report of a round; the lead compares them, and names
deviants with the result. A deviant leaves, and comes back for the others' state.
"""

from __future__ import annotations

import hashlib
import logging
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import msgspec
from torch import Tensor

from manyhands.collectives.messages import SelfReport
from manyhands.collectives.shares import ONE_CLASS, Classes
from manyhands.core.errors import ManyhandsError
from manyhands.core.peers import PeerId
from manyhands.links.messages import Incarnation
from manyhands.replica.fingerprint import Tensors, number_of, terms_of
from manyhands.replica.gradients import Named

log = logging.getLogger(__name__)

STRIDE = 64  # in so many rounds every tensor is looked at; of small models, in fewer
_LOOK_BYTES = 64 << 10  # of a model, to look at in a round
_MOST = 512  # numbers of a fingerprint: more tensors than that share them
_NAMED = 8  # deviants of a round; the others are named in a later one
_ANCHORS = 64  # that a record names: it has to fit into a message
_TIMES = 3  # that a peer may be named
_FORGOTTEN = 1024  # rounds after which an earlier time does not count
_RECENT = 8  # states that somebody may be named for: reports have those of the last few rounds

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
_Kind = Annotated[bytes, msgspec.Meta(max_length=64)]


class Scope(NamedTuple):
    """What was looked at: the tensors of every `stride`-th slot of the state after some rounds."""

    applied: _Count
    stride: Annotated[int, msgspec.Meta(ge=1, le=STRIDE)]


class Print(NamedTuple):
    """A fingerprint: numbers of 64 bits, of the tensors in their order."""

    scope: Scope
    numbers: Annotated[bytes, msgspec.Meta(max_length=8 * _MOST)]


class Bits(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a peer says of its bits. Only peers of one `kind` can be expected to have the same."""

    peer: Incarnation
    kind: _Kind
    prints: Annotated[tuple[Print, ...], msgspec.Meta(max_length=2)] = ()


class Deviant(NamedTuple):
    """One whose tensor is not `like` another's; `place`: of its number in the fingerprint."""

    peer: Incarnation
    like: Incarnation
    scope: Scope
    place: Annotated[int, msgspec.Meta(ge=0, le=_MOST)]


class Compared(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the lead makes of what all say."""

    deviants: Annotated[tuple[Deviant, ...], msgspec.Meta(max_length=_NAMED)] = ()
    num_kinds: _Count = 0


@dataclass(frozen=True, slots=True)
class Deviated:
    """A peer has not the bits of the others. For `run.events`."""

    peer: PeerId | None
    round: int
    """Before which it was seen."""
    tensor: str


class Differs(ManyhandsError):
    """This peer computes something else than the others, again and again."""


_BITS = msgspec.msgpack.Decoder(Bits)
_ENCODE = msgspec.msgpack.Encoder().encode


def compare(reports: Sequence[bytes]) -> Compared:
    """`reports` are in the order of the roster; of each kind one peer at least is no deviant.

    Most of a kind are right; if there is no most, the first of the roster is.
    """
    kinds: defaultdict[bytes, list[Bits]] = defaultdict(list)
    for report in reports if len(reports) > 1 else ():
        if (said := _read(report)) is not None:
            kinds[said.kind].append(said)
    deviants: list[Deviant] = []
    for peers in kinds.values():
        deviants += _deviants(peers)
    return Compared(tuple(deviants[:_NAMED]), len(kinds))


def classes_of(reports: Mapping[int, SelfReport]) -> Classes:
    """The kinds of these peers, in roster order. Anchors: those of most speed together, and of
    equal ones the first of the roster's; deviants are none.
    """
    kinds: defaultdict[bytes, list[int]] = defaultdict(list)
    for peer, report in reports.items() if len(reports) > 1 else ():
        if (said := _read(report.fingerprint)) is not None:
            kinds[said.kind].append(peer)
    if len(kinds) <= 1:
        return ONE_CLASS
    anchors = max(kinds.values(), key=lambda peers: sum(reports[p].speed for p in peers))
    deviants = compare([report.fingerprint for report in reports.values()]).deviants
    wrong = {deviant.peer for deviant in deviants}
    digest = hashlib.blake2b(_ENCODE(sorted(kinds)), digest_size=16).digest()
    return Classes(digest, tuple(peer for peer in anchors if peer not in wrong)[:_ANCHORS])


def _read(report: bytes) -> Bits | None:
    try:
        return _BITS.decode(report)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None  # it has none, or is of another language


def _deviants(peers: Sequence[Bits]) -> list[Deviant]:
    # Whoever computes no samples reports before its thread has come as far as the others'.
    common = Counter(scope for said in peers for scope, _ in said.prints)
    if not common:
        return []
    scope = max(common, key=lambda scope: (common[scope], scope))
    numbers = {said.peer: n for said in peers for of, n in said.prints if of == scope}
    right, _ = Counter(numbers.values()).most_common(1)[0]
    like = next(peer for peer, n in numbers.items() if n == right)
    return [
        Deviant(peer, like, scope, _first_difference(right, n))
        for peer, n in numbers.items()
        if n != right
    ]


def _first_difference(a: bytes, b: bytes) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a)) // 8


class _Taken(NamedTuple):
    scope: Scope
    terms: list[list[Tensor]]


class Watch:
    """One peer's part in it. The engine reads `report`; all else is the user's thread.

    `count` says which of the rounds that the user knows comes after so many of the engine's.
    """

    def __init__(
        self, tensors: Tensors, count: Callable[[int], int], resync_every: int = 1
    ) -> None:
        self._tensors, self._count, self._resync_every = tensors, count, resync_every
        # One slot a round at least, where that is not too much: a fault should not go on for long.
        rounds = max(tensors.num_slots, tensors.num_bytes // _LOOK_BYTES)
        self._stride = max(1, min(STRIDE, rounds))
        self._me = 0
        self._arithmetic = b""
        self._origin = b""  # where the state came from, if that makes its bits others
        self._members: set[int] = set()
        self._taken: _Taken | None = None  # the newest; a GPU may still be at it
        self._counts: dict[int, int] = {}  # of the last states that were looked at
        self._said = b""
        self._prints: tuple[Print, ...] = ()
        self._named: set[int] = set()
        self._times: list[int] = []  # rounds before which this peer was named
        self._warned = False

    def begin(self, me: int, arithmetic: bytes) -> None:
        """As this incarnation, with the state that this peer has."""
        self._me, self._arithmetic = me, arithmetic
        self._forget()

    @property
    def kind(self) -> bytes:
        """Of this peer's state: its bits are those of all others of the same."""
        return self._arithmetic + self._origin

    def replaced(self, kind: bytes, chain: bytes) -> None:
        """The state after this chain has come from peers of that kind, one and the same.

        Of this peer's arithmetic it is what they are. Else it is like none of its own arithmetic,
        but for those who have got the same one: they remember something else of the past.
        """
        same = kind.startswith(self._arithmetic)
        self._origin = kind[len(self._arithmetic) :] if same else chain
        self._forget()

    def _forget(self) -> None:
        self._taken, self._prints = None, ()
        self._say()

    def _say(self) -> None:
        self._said = _ENCODE(Bits(self._me, self.kind, self._prints))

    def look(self, applied: int, members: Sequence[int], *, alone: bool) -> None:
        """The state is the one after so many rounds; whoever is of the next is in `members`.

        When there is somebody new, all of it is looked at.
        """
        if self._taken is not None and self._taken.scope.applied == applied:
            return
        joined = not self._members.issuperset(members)
        self._members = set(members)
        if alone:
            if self._taken is not None:
                self._forget()
            return
        if self._taken is not None:
            numbers = _numbers(self._taken.terms)
            self._prints = (*self._prints[-1:], Print(self._taken.scope, numbers))
            self._say()
        self._counts[applied] = self._count(applied)  # later a re-sync may have come after it
        self._counts = {a: count for a, count in self._counts.items() if a > applied - _RECENT}
        scope = Scope(applied, 1 if joined else self._stride)
        self._taken = _Taken(scope, [terms_of(tensor) for _, tensor in self._looked_at(scope)])

    def _looked_at(self, scope: Scope) -> Iterator[Named]:
        return self._tensors.every(scope.stride, scope.applied % scope.stride)

    def report(self, report: SelfReport) -> SelfReport:
        """With what this peer says of its bits."""
        return msgspec.structs.replace(report, fingerprint=self._said)

    # -- what has come of it --------------------------------------------------------------------

    def heed(
        self, compared: Compared, name_of: Callable[[int], PeerId | None]
    ) -> tuple[list[Deviated], bool]:
        """What is new in it, and whether this peer has to take the state of others.

        Raises Differs when that has not helped.
        """
        if compared.num_kinds > 1 and not self._warned:
            self._warned = True
            log.warning(
                "peers of %d kinds of arithmetic (device, threads, version or settings of torch) "
                "train together: their parameters agree only to rounding, and are made equal every "
                "%d rounds (resync_every)",
                compared.num_kinds,
                self._resync_every,
            )
        found: list[Deviated] = []
        mine = False
        for deviant in compared.deviants:
            if deviant.peer in self._named:
                continue
            self._named.add(deviant.peer)
            peer, like = name_of(deviant.peer), name_of(deviant.like)
            applied = deviant.scope.applied
            count = self._counts.get(applied, self._count(applied))
            event = Deviated(peer, count, self._name(deviant))
            found.append(event)
            said = (
                f"before round {event.round}, {event.tensor} of {peer} has other bits than that "
                f"of {like}"
            )
            if deviant.peer == self._me:
                mine = True
                self._count_time(event.round, said)
            log.warning("%s: it leaves, and comes back for the state of the others", said)
        return found, mine

    def _count_time(self, round_: int, said: str) -> None:
        self._times = [r for r in self._times if r > round_ - _FORGOTTEN] + [round_]
        if len(self._times) >= _TIMES:
            raise Differs(
                f"{said}, for the {_TIMES}rd time: what this peer computes is not what the others "
                "do, and they go on without it",
                hint="look for what depends on the peer after backward(): its own loss, a rank, a "
                "clock, chance; then for another build of a library; then test this machine's "
                "memory and device",
            )

    def _name(self, deviant: Deviant) -> str:
        names = [name for name, _ in self._looked_at(deviant.scope)][deviant.place :: _MOST]
        return " or ".join(names[:2]) if names else "the number of tensors"


def _numbers(terms: Sequence[Sequence[Tensor]]) -> bytes:
    numbers = [0] * min(_MOST, len(terms))
    for place, one in enumerate(terms):
        numbers[place % _MOST] += number_of(one)
    return struct.pack(f"<{len(numbers)}Q", *(number % (1 << 64) for number in numbers))
