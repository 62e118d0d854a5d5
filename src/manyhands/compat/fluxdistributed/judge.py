"""Judge: the evaluation of a replica, shared out over the devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import default_collate  # pyright: ignore[reportUnknownVariableType]

from manyhands.compat.fluxdistributed.feed import read_batch, share_of
from manyhands.compat.fluxdistributed.metrics import KS, Score, is_batch, score
from manyhands.compat.fluxdistributed.step import LossFn, cut, rows_of
from manyhands.core.errors import UsageError
from manyhands.data.order import Order
from manyhands.stages.carrier import Carrier


class Judge:
    """Of `val`: one batch, or a table, of which at most `samples` are looked at, always the same.

    All devices call it; each computes its share of the rows.
    """

    def __init__(
        self,
        val: Any,  # noqa: ANN401
        loss: LossFn,
        *,
        batchsize: int,
        samples: int | None,
        seed: int,
    ) -> None:
        self._val, self._loss, self._batchsize = val, loss, batchsize
        self._batch = is_batch(val)
        if self._batch:
            self._size = rows_of(val[0])
        elif hasattr(val, "__len__") and hasattr(val, "__getitem__"):
            self._size = len(val) if samples is None else min(len(val), samples)
        else:
            raise UsageError(
                f"val is a {type(val).__name__}", hint="give a batch, (x, y), or a table of samples"
            )
        if not self._size:
            raise UsageError("val is empty", hint="at least one sample, or val=None")
        self._seed = seed

    def scores(
        self, model: nn.Module, device: torch.device, carrier: Carrier, ks: Sequence[int] = KS
    ) -> dict[str, float]:
        """Loss and top-k over all devices: the same numbers on each."""
        mine = share_of(self._size, carrier.rank, carrier.size)
        own = score(self._loss, model, self._batches(mine), device, ks)
        sums = torch.tensor([own.rows, own.loss, own.ranked, *own.hits], dtype=torch.float64)
        sums = sums.to(carrier.words_on)
        carrier.sum(sums, range(carrier.size)).wait()
        rows, loss, ranked, *hits = cast("list[float]", sums.tolist())  # pyright: ignore[reportUnknownMemberType]
        return Score(rows=rows, loss=loss, ranked=ranked, hits=hits).means("val", ks)

    def _batches(self, mine: range) -> Iterator[tuple[Any, Any]]:
        for start in range(mine.start, mine.stop, self._batchsize):
            rows = range(start, min(start + self._batchsize, mine.stop))
            if self._batch:
                yield cut(tuple(self._val), rows.start, rows.stop)
            else:
                batch = read_batch(self._val, self._places(rows), default_collate)  # pyright: ignore[reportUnknownArgumentType]
                yield batch.x, batch.y

    def _places(self, rows: range) -> list[int]:
        if self._size == len(self._val):
            return list(rows)
        order = Order(len(self._val), seed=self._seed, epoch=0)
        return cast("list[int]", order.indices(rows.start, rows.stop).tolist())  # pyright: ignore[reportUnknownMemberType]
