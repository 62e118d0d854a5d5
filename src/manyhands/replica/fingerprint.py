"""Fingerprint: one number for every tensor of a state. Equal bits give equal numbers, anywhere.

The number is the sum of a tensor's words times 1, 3, 5, ... modulo 2^64: integers, which do not
depend on the order in which a device adds. An odd factor has an inverse, so a change of one word
always changes the number. Words have at most 32 bits: an element, or a piece of a larger one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from manyhands.replica.gradients import Named, owner_of

_COLUMNS = 256
_CPU_ROWS = 512  # of a block: a megabyte, which stays in the cache
_OTHER_ROWS = 1 << 14
_FEW = 4096  # words that are multiplied one by one
_WORDS = {1: torch.int8, 2: torch.int16}


class Tensors:
    """Those of a model and of what its optimizers remember of it, by what they belong to.

    A parameter and all that optimizers have for it are one slot; so is a buffer.
    """

    def __init__(self, model: Module, optimizers: Sequence[Optimizer]) -> None:
        self._parameters = list(model.named_parameters())
        self._buffers = [(n, *owner_of(model, n)) for n, _ in model.named_buffers()]
        self._optimizers = optimizers

    @property
    def num_slots(self) -> int:
        """How many there are."""
        return len(self._parameters) + len(self._buffers)

    @property
    def num_bytes(self) -> int:
        """Of the model."""
        buffers = (getattr(module, last) for _, module, last in self._buffers)
        return sum(t.nbytes for t in (*(p for _, p in self._parameters), *buffers))

    def every(self, stride: int, first: int) -> Iterator[Named]:
        """The tensors of every so-manieth slot."""
        num_parameters = len(self._parameters)
        for number in range(first, self.num_slots, stride):
            if number >= num_parameters:
                name, module, last = self._buffers[number - num_parameters]
                yield Named(name, getattr(module, last))
                continue
            name, parameter = self._parameters[number]
            yield Named(name, parameter)
            for optimizer in self._optimizers:
                yield from _tensors_in(optimizer.state.get(parameter), name)


def _tensors_in(value: object, name: str) -> Iterator[Named]:
    if isinstance(value, Tensor):
        yield Named(name, value)
    elif isinstance(value, Mapping):
        for key, item in cast("Mapping[object, object]", value).items():
            yield from _tensors_in(item, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(cast("Sequence[object]", value)):
            yield from _tensors_in(item, f"{name}.{number}")


def terms_of(tensor: Tensor) -> list[Tensor]:
    """Scalars on its device whose sum modulo 2^64 is its number: nothing waits for a GPU.

    A block is copied at a time. (A tensor that is not contiguous is copied whole: its elements
    count in their order, not in memory's.)
    """
    flat = tensor.detach().contiguous().view(-1)
    words = flat.view(_WORDS.get(flat.element_size(), torch.int32))
    size, table = len(words), _table(words.device)
    if size <= _FEW:
        return [table.dot(words.to(torch.int64), table.odd[:size])]
    terms: list[Tensor] = []
    for start in range(0, size, table.block):
        block = words[start : start + table.block].to(torch.int64)
        rows, rest = divmod(len(block), _COLUMNS)
        # Word (row, column) has the factor 2 (start + 256 row + column) + 1. Adding up by rows and
        # by columns leaves few products: no device is good at those of 64 bits.
        whole = (block[:-rest] if rest else block).view(rows, _COLUMNS)
        by_row = whole.sum(1)
        terms.append(table.dot(by_row, table.rows[:rows]))
        terms.append(table.dot(whole.sum(0), table.columns))
        if start:
            terms.append(by_row.sum() * (2 * start))
        if rest:
            more = 2 * (start + rows * _COLUMNS)
            terms.append(table.dot(block[-rest:], table.odd[:rest] + more))
    return terms


def number_of(terms: Sequence[Tensor]) -> int:
    """Waits for them."""
    return sum(int(term) for term in terms) % (1 << 64)


class _Table(NamedTuple):
    """Factors of the words of one block."""

    block: int
    odd: Tensor  # of the first words
    columns: Tensor  # of those of row 0
    rows: Tensor  # what those of a row have more than that
    dot: Callable[[Tensor, Tensor], Tensor]


@lru_cache(maxsize=16)
def _table(device: torch.device) -> _Table:
    on_cpu = device.type == "cpu"
    num_rows = _CPU_ROWS if on_cpu else _OTHER_ROWS
    odd = torch.arange(1, 2 * _FEW, 2, device=device)
    rows = torch.arange(num_rows, device=device) * (2 * _COLUMNS)
    dot = torch.dot if on_cpu else _dot
    return _Table(num_rows * _COLUMNS, odd, odd[:_COLUMNS], rows, dot)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """A GPU has none for integers."""
    return (a * b).sum()
