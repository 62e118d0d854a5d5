"""Share: one device's state for all others, as plain values and tensors; nothing is pickled."""

from __future__ import annotations

import hashlib

from typing import Any, cast

import msgspec
import torch

from manyhands.checkpoint.tree import flatten, unflatten
from manyhands.core.errors import Malformed
from manyhands.stages.carrier import Carrier
from manyhands.wire.tensors import TensorSpec, empty, spec_of

_MAX_TENSOR_BYTES = 1 << 40


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


def tell_all(carrier: Carrier, word: bytes) -> list[int]:
    """Of what each device says, a number: the same for the same words. All devices call it."""
    said = torch.zeros(carrier.size, dtype=torch.int64)
    digest = hashlib.blake2b(word, digest_size=8).digest()
    said[carrier.rank] = int.from_bytes(digest, "little", signed=True)
    said = said.to(carrier.words_on)
    carrier.sum(said, range(carrier.size)).wait()
    return cast("list[int]", said.tolist())  # pyright: ignore[reportUnknownMemberType]
