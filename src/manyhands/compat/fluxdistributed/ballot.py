"""Ballot: what all devices say to each other, so that all of them do the same next.

`vote` and `confirm` are for a step; `share` is one device's state for all others, as plain values
and tensors: nothing is pickled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import msgspec
import torch
from torch import Tensor

from manyhands.checkpoint.tree import flatten, unflatten
from manyhands.compat.fluxdistributed.buffer import Layout, givers_of
from manyhands.core.errors import Malformed
from manyhands.stages.carrier import Carrier
from manyhands.wire.tensors import TensorSpec, empty, spec_of

_PLAIN = 3  # loss, done, bad
_MAX_TENSOR_BYTES = 1 << 40


class Verdict(NamedTuple):
    """What all have said: the same on each of them."""

    rows: tuple[int, ...]  # of each rank
    loss: float  # mean over all rows
    done: int  # how many have nothing more to do
    bad: int  # samples that they have met
    short: tuple[int, ...]  # ranks of those that ran out of memory
    used: list[bool]  # leaves, by any device
    givers: dict[int, int]  # of leaves that cannot be averaged, by place: whose value it is

    @property
    def total(self) -> int:
        """The rows of all."""
        return sum(self.rows)

    def given_by(self, rank: int) -> list[int]:
        """Places of the leaves whose value is that device's."""
        return [place for place, giver in self.givers.items() if giver == rank]


def vote(
    carrier: Carrier,
    layout: Layout,
    *,
    rows: int = 0,
    loss: float = 0.0,
    done: bool = False,
    bad: int = 0,
    short: bool = False,
    used: Sequence[bool] = (),
) -> Verdict:
    """Before a step is taken. All devices call it; `loss` is the mean of this one's rows."""
    world, given = carrier.size, layout.given
    own = torch.zeros(world, 2 + len(given), dtype=torch.float64)  # what is said by rank
    own[carrier.rank, 0], own[carrier.rank, 1] = rows, short
    leaves = torch.zeros(len(layout.leaves), dtype=torch.float64)
    if used:
        leaves = torch.tensor(used, dtype=torch.float64)
        own[carrier.rank, 2:] = leaves[given]
    plain = torch.tensor([loss * rows, done, bad], dtype=torch.float64)
    said = _added(carrier, torch.cat([plain, leaves, own.flatten()]))
    summed, ended, met = cast("list[float]", said[:_PLAIN].tolist())  # pyright: ignore[reportUnknownMemberType]
    by_rank = said[_PLAIN + len(leaves) :].view_as(own)
    each = _ints(by_rank[:, 0])
    return Verdict(
        rows=tuple(each),
        loss=summed / max(1, sum(each)),
        done=int(ended),
        bad=int(met),
        short=tuple(rank for rank, flag in enumerate(_ints(by_rank[:, 1])) if flag),
        used=[bool(count) for count in _ints(said[_PLAIN : _PLAIN + len(leaves)])],
        givers=givers_of(layout, [_ints(marks) for marks in by_rank[:, 2:]]),
    )


def confirm(carrier: Carrier, *, failed: bool = False) -> tuple[int, ...]:
    """After a step: the ranks whose step has failed."""
    ballot = torch.zeros(carrier.size, dtype=torch.float64)
    ballot[carrier.rank] = failed
    return tuple(rank for rank, count in enumerate(_ints(_added(carrier, ballot))) if count)


def tell_all(carrier: Carrier, word: bytes) -> list[int]:
    """Of what each device says, a number: the same for the same words. All devices call it."""
    said = torch.zeros(carrier.size, dtype=torch.int64)
    digest = hashlib.blake2b(word, digest_size=8).digest()
    said[carrier.rank] = int.from_bytes(digest, "little", signed=True)
    return _ints(_added(carrier, said))


def _added(carrier: Carrier, said: Tensor) -> Tensor:
    """The sum over all devices, in the machine's memory."""
    said = said.to(carrier.words_on)
    carrier.sum(said, range(carrier.size)).wait()
    return said.cpu()


def _ints(counts: Tensor) -> list[int]:
    return cast("list[int]", counts.long().tolist())  # pyright: ignore[reportUnknownMemberType]


class _Words(msgspec.Struct, frozen=True):
    shape: Any
    tensors: list[TensorSpec]


def share(carrier: Carrier, tree: Any, root: int) -> Any:  # noqa: ANN401
    """What `root` has (a tree of dicts, lists, numbers, tensors); the others pass None.

    All devices call it. What comes is in the machine's memory. Raises UsageError at `root` for a
    tree that cannot be told, Malformed for words that are none.
    """
    if carrier.size == 1:
        return tree
    peers = range(carrier.size)
    if carrier.rank == root:
        flat = flatten(tree)
        tensors = [tensor.detach().cpu().contiguous() for tensor in flat.tensors]
        words = _Words(flat.shape, [spec_of(tensor) for tensor in tensors])
        carrier.say(msgspec.json.encode(words), root)
    else:
        try:
            words = msgspec.json.decode(carrier.say(None, root), type=_Words)
        except msgspec.DecodeError as error:
            raise Malformed(f"rank {root} told a state that is none: {error}") from None
        tensors = [empty(spec, _MAX_TENSOR_BYTES) for spec in words.tensors]
    pending = [carrier.spread(tensor, root, peers) for tensor in tensors]
    for work in pending:
        work.wait()
    return tree if carrier.rank == root else unflatten(words.shape, tensors)
