"""Fingerprint: one number for every tensor of a state. Equal bits give equal numbers, anywhere.

The number is the sum of a tensor's words times 1, 3, 5, ... modulo 2^64, in integers, so it does not
depend on the order in which a device adds. An odd factor has an inverse, so a change of one word
always changes the number. Words have at most 32 bits: an element, or a piece of a larger one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from manyhands.checkpoint.tree import flatten
from manyhands.replica.gradients import Named

_COLUMNS = 256
_CPU_ROWS = 256  # of a block: half a megabyte, which stays in the cache
_OTHER_ROWS = 1 << 14
_FEW = 4096  # words that are multiplied one by one
_WORDS = {1: torch.int8, 2: torch.int16}


class Tensors:
    """Those of a model and of what its optimizers remember of it, by what they belong to.

    A parameter and all that optimizers have for it are one slot; so is a buffer.
    """

    def __init__(self, model: Module, optimizers: Sequence[Optimizer]) -> None:
        self._parameters = list(model.named_parameters())
        self._buffers = [(n, *_owner(model, n)) for n, _ in model.named_buffers()]
        self._optimizers = optimizers

    def every(self, stride: int, first: int) -> Iterator[Named]:
        """The tensors of every so-manieth slot."""
        num_parameters = len(self._parameters)
        for number in range(first, num_parameters + len(self._buffers), stride):
            if number >= num_parameters:
                name, module, last = self._buffers[number - num_parameters]
                yield Named(name, getattr(module, last))
                continue
            name, parameter = self._parameters[number]
            yield Named(name, parameter)
            for optimizer in self._optimizers:
                if (state := optimizer.state.get(parameter)) is not None:
                    flat = flatten(state, name)
                    yield from map(Named, flat.names, flat.tensors)


def _owner(model: Module, name: str) -> tuple[Module, str]:
    path, _, last = name.rpartition(".")
    return model.get_submodule(path), last


def terms_of(tensor: Tensor) -> list[Tensor]:
    """Scalars on its device whose sum modulo 2^64 is its number: nothing waits for a GPU.

    A block is copied at a time. (A tensor that is not contiguous is copied whole: its elements
    count in their order, not in memory's.)
    """
    flat = tensor.detach().contiguous().view(-1)
    words = flat.view(_WORDS.get(flat.element_size(), torch.int32))
    table = _table(words.device)
    terms: list[Tensor] = []
    for start in range(0, len(words), table.block):
        block = words[start : start + table.block].to(torch.int64)
        rest = len(block) if len(block) <= _FEW else len(block) % _COLUMNS
        rows = (len(block) - rest) // _COLUMNS
        # Word (row, column) has the factor 2 (start + 256 row + column) + 1. Adding up by rows and
        # by columns leaves few products: no device is good at those of 64 bits.
        if rows:
            whole = block[: rows * _COLUMNS].view(rows, _COLUMNS)
            terms.append(_dot(whole.sum(1), table.firsts[:rows] + 2 * start))
            terms.append(_dot(whole.sum(0), table.odd[:_COLUMNS]))
        if rest:
            before = start + rows * _COLUMNS
            terms.append(_dot(block[-rest:], table.odd[:rest] + 2 * before))
    return terms


def number_of(terms: Sequence[Tensor]) -> int:
    """Waits for them."""
    return sum(int(term) for term in terms) % (1 << 64)


class _Table(NamedTuple):
    block: int  # words
    odd: Tensor  # 1, 3, 5, ...: factors of row 0
    firsts: Tensor  # what the factors of a row have more than those of row 0


@lru_cache(maxsize=16)
def _table(device: torch.device) -> _Table:
    rows = _CPU_ROWS if device.type == "cpu" else _OTHER_ROWS
    return _Table(
        rows * _COLUMNS,
        torch.arange(1, 2 * _FEW, 2, device=device),
        torch.arange(rows, device=device) * (2 * _COLUMNS),
    )


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return torch.dot(a, b) if a.device.type == "cpu" else (a * b).sum()
