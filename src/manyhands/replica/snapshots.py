"""Snapshots: the state of one round on its way to peers that join.

A state is cut into pieces of at most `part_bytes`, the same at every donor; each donor sends every
n-th, beside a head that says which round and which history it belongs to. Pieces of different
states never meet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from torch import Tensor

from manyhands.checkpoint.tree import Flat, unflatten
from manyhands.collectives.messages import Snapshot
from manyhands.collectives.rounds import Rounds
from manyhands.core.errors import Malformed, ManyhandsError, WireError
from manyhands.core.peers import PeerId
from manyhands.replica.openings import Openings
from manyhands.wire.tensors import TensorSpec, bytes_of, from_bytes, num_bytes, spec_of

_PIECES = 1 << 22  # of one state: 8 TiB


class Piece(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a buffer is: piece 0 is the table of contents, the others are the tensors' bytes."""

    number: Annotated[int, msgspec.Meta(ge=0, lt=_PIECES)]
    of: Annotated[int, msgspec.Meta(ge=1, le=_PIECES)]


class Contents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Piece 0."""

    description: dict[str, Any]
    openings: tuple[int, ...]
    kind: bytes  # of the donors: see deviation
    shape: Any
    specs: tuple[TensorSpec, ...]


_ENCODE = msgspec.json.Encoder().encode
_PIECE = msgspec.json.Decoder(Piece)
_CONTENTS = msgspec.json.Decoder(Contents)
_WORD_BYTES = len(_ENCODE(Piece(_PIECES - 1, _PIECES)))  # at most: it travels beside each piece


class _Key(NamedTuple):
    number: int  # of the Ask
    applied: int
    chain: bytes


class Taken(NamedTuple):
    """A state, what it is one of, the openings before it, and the kind of those who sent it."""

    tree: Any
    description: dict[str, Any]
    openings: Openings
    kind: bytes


class _Coming(NamedTuple):
    of: int
    pieces: dict[int, bytes]


class Snapshots:
    """The engine's `State` of one peer. `check` looks at a description before its state is taken,
    and `learn` is told the openings that go with it.

    The engine's lock guards what it calls; `serve` and `take` are for the user's thread.
    """

    def __init__(
        self,
        description: dict[str, Any],
        check: Callable[[dict[str, Any]], None],
        learn: Callable[[Openings], None],
        limit_bytes: int,
    ) -> None:
        self._description, self._check, self._limit = description, check, limit_bytes
        self._learn = learn
        self._rounds: Rounds | None = None
        # In the order of rounds. The engine adds to it while the user's thread takes from it.
        self._due: deque[tuple[Snapshot, PeerId]] = deque()
        self._number = 0  # of the Ask whose answer may still be wanted
        self._coming: dict[_Key, _Coming] = {}  # answers to that one
        self._here: dict[_Key, dict[int, bytes]] = {}

    def attach(self, rounds: Rounds) -> None:
        """This engine from now on; what was under way with another one is void."""
        self._rounds = rounds
        self._due.clear()
        self._number = 0
        self._coming.clear()
        self._here.clear()

    # -- what the engine calls ----------------------------------------------------------------

    def give(self, head: Snapshot, to: PeerId) -> None:
        """Remember it: the user's thread has still to step."""
        self._due.append((head, to))

    def arrived(self, sender: PeerId, head: Snapshot, buffers: Sequence[memoryview]) -> None:
        """A piece. The last one tells the engine. One for an earlier Ask is of no use any more."""
        assert self._rounds is not None
        if head.number < self._number:
            return
        if head.number > self._number:
            self._number = head.number
            self._coming.clear()
        try:
            piece, data = _open(buffers)
            key = _Key(head.number, head.applied, head.chain)
            coming = self._coming.setdefault(key, _Coming(piece.of, {}))
            if piece.of != coming.of or piece.number >= coming.of:
                raise Malformed(f"piece {piece.number} of {piece.of}, after one of {coming.of}")
            if sum(map(len, coming.pieces.values())) + len(data) > self._limit:
                raise Malformed(f"a state of more than {self._limit} bytes")
            coming.pieces[piece.number] = data
            if piece.number == 0:
                self._check(_read(data).description)
            if len(coming.pieces) == coming.of:
                self._number = head.number + 1  # the engine takes this one, or has asked again
                self._coming.clear()
                self._here[key] = coming.pieces
                self._learn(Openings(_read(coming.pieces[0]).openings))
                self._rounds.snapshot_arrived(sender, head)
        except ManyhandsError as error:
            self._rounds.abort(error)

    # -- the user's thread ---------------------------------------------------------------------

    def is_due(self, applied: int) -> bool:
        """Whether somebody waits for the state after so many rounds, or an earlier one."""
        return bool(self._due) and self._due[0][0].applied <= applied

    def serve(
        self, applied: int, state: Flat, openings: Openings, kind: bytes, part_bytes: int
    ) -> None:
        """Send `state` to those who wait for it, their piece of it: it is copied here, and may
        change as soon as this returns.
        """
        assert self._rounds is not None
        due: list[tuple[Snapshot, PeerId]] = []
        while self.is_due(applied):
            head, to = self._due.popleft()
            if head.applied == applied:  # else its round went by
                due.append((head, to))
        specs = tuple(spec_of(tensor) for tensor in state.tensors)
        contents = _ENCODE(Contents(self._description, openings.starts, kind, state.shape, specs))
        sizes = [num_bytes(spec) for spec in specs]
        of, chunks = _cut(contents, state.tensors, sizes, part_bytes - _WORD_BYTES, due)
        for head, to in due:
            for number in range(head.place, of, head.num_donors):
                chunk = chunks[number]
                word = memoryview(_ENCODE(Piece(number, of)))
                self._rounds.send_snapshot(head, to, [word, chunk] if len(chunk) else [word])

    def take(self, head: Snapshot) -> Taken:
        """What came with this head. Raises Malformed."""
        pieces = self._here.pop(_Key(head.number, head.applied, head.chain))
        for key in list(self._here):
            if key.number < head.number:  # the engine had asked again, and did not take it
                del self._here[key]
        contents = _read(pieces[0])
        data = memoryview(bytearray().join(pieces[n] for n in range(1, len(pieces))))
        tensors: list[Tensor] = []
        at = 0
        for spec in contents.specs:
            size = num_bytes(spec)
            tensors.append(from_bytes(spec, data[at : at + size]))
            at += size
        if at != len(data):
            raise Malformed(f"{len(data)} bytes came for a state of {at}")
        tree = unflatten(contents.shape, tensors)
        return Taken(tree, contents.description, Openings(contents.openings), contents.kind)


def _cut(
    contents: bytes,
    tensors: Sequence[Tensor],
    sizes: Sequence[int],
    most: int,
    due: Sequence[tuple[Snapshot, PeerId]],
) -> tuple[int, dict[int, memoryview]]:
    """How many pieces a state has, and copies of those that somebody gets from this peer."""
    chunks, of = {0: memoryview(contents)}, 1
    for tensor, size in zip(tensors, sizes, strict=True):
        starts = range(0, size, most)
        wanted = [
            (of + n, at)
            for n, at in enumerate(starts)
            if any((of + n) % head.num_donors == head.place for head, _ in due)
        ]
        data = bytes_of(tensor) if wanted else memoryview(b"")  # it waits for a GPU, and copies
        chunks |= {number: memoryview(bytes(data[at : at + most])) for number, at in wanted}
        of += len(starts)
    return of, chunks


def _open(buffers: Sequence[memoryview]) -> tuple[Piece, bytes]:
    try:
        return _PIECE.decode(buffers[0]), b"".join(buffers[1:])
    except (IndexError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Malformed(f"a piece of a state is none: {str(error)[:80]}") from None


def _read(data: bytes) -> Contents:
    try:
        return _CONTENTS.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"a state's table of contents is none: {str(error)[:80]}") from None
