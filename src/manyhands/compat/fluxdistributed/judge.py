"""Judge: the evaluation of a replica, shared out over the devices."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn

from manyhands.compat.fluxdistributed.feed import Bad, share_of
from manyhands.compat.fluxdistributed.memory import give_back, is_out_of_memory
from manyhands.compat.fluxdistributed.metrics import KS, Score, is_batch, score
from manyhands.compat.fluxdistributed.step import LossFn, cut, rows_of
from manyhands.core.errors import UsageError
from manyhands.data.fetch import Marks
from manyhands.data.order import Order
from manyhands.data.quarantine import Rules
from manyhands.data.reader import Reader
from manyhands.data.source import Source
from manyhands.data.table import BadSample
from manyhands.stages.carrier import Carrier

log = logging.getLogger(__name__)


class Judge:
    """Of `val`: one batch, or a table, of which at most `samples` are looked at, always the same.

    All devices call it; each computes its share of the rows. Samples are read as those of the
    training are: with random numbers of their own, which depend on nothing but `seed`, and by the
    rules of `bad`.
    """

    def __init__(
        self,
        val: Any,  # noqa: ANN401
        loss: LossFn,
        *,
        batchsize: int,
        samples: int | None,
        seed: int,
        bad: Bad = "raise",
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
        self._told: set[str] = set()
        self._lock = threading.Lock()  # devices of one process share a judge
        self._reader: Reader | None = None
        if not self._batch:
            source = Source(dataset=val, batch=batchsize, rules=Rules(policy=bad))
            self._reader = Reader(source, seed, alone=False)

    def scores(
        self,
        model: nn.Module,
        device: torch.device,
        carrier: Carrier,
        *,
        pieces: int = 1,
        on_oom: str = "raise",
        ks: Sequence[int] = KS,
    ) -> dict[str, float]:
        """Loss and top-k over all devices: the same numbers on each; none if one of them ran out of
        memory, unless that is to be raised.

        Rows are taken a `batchsize` at a time, or as many `pieces` of it as they are trained in.
        """
        own, short = Score(hits=[0.0] * len(ks)), False
        try:
            own = self._own(model, device, carrier, pieces, on_oom, ks)
        except Exception as error:
            if on_oom == "raise" or not is_out_of_memory(error):
                raise
            short = True
        if short:
            give_back(device)
        counts = [own.rows, own.loss, own.ranked, own.bad, short, *own.hits]
        sums = torch.tensor(counts, dtype=torch.float64).to(carrier.words_on)
        carrier.sum(sums, range(carrier.size)).wait()
        rows, loss, ranked, bad, missing, *hits = cast("list[float]", sums.tolist())  # pyright: ignore[reportUnknownMemberType]
        if missing:
            return {}
        return Score(rows=rows, loss=loss, ranked=ranked, bad=bad, hits=hits).means("val", ks)

    def _own(
        self,
        model: nn.Module,
        device: torch.device,
        carrier: Carrier,
        pieces: int,
        on_oom: str,
        ks: Sequence[int],
    ) -> Score:
        """This device's; if memory is short and it may, with fewer rows at once."""
        mine = share_of(self._size, carrier.rank, carrier.size)
        rows = max(1, -(-self._batchsize // pieces))
        while True:
            try:
                # Nobody waits for this one between two batches, so it may try again by itself.
                return self._scored(model, device, mine, rows, ks)
            except Exception as error:
                if on_oom != "split" or rows == 1 or not is_out_of_memory(error):
                    raise
            rows = -(-rows // 2)
            give_back(device)

    def _scored(
        self, model: nn.Module, device: torch.device, mine: range, rows: int, ks: Sequence[int]
    ) -> Score:
        bad: list[BadSample] = []
        made = score(self._loss, model, self._batches(mine, rows, bad), device, ks)
        made.bad = float(len(bad))
        with self._lock:
            new = [error for error in bad if error.where not in self._told]
            self._told.update(error.where for error in new)
        for error in new:
            log.warning("%s: a sample of val", error.message)
        return made

    def _batches(
        self, mine: range, num_rows: int, bad: list[BadSample]
    ) -> Iterator[tuple[Any, Any]]:
        for start in range(mine.start, mine.stop, num_rows):
            rows = range(start, min(start + num_rows, mine.stop))
            if self._reader is None:
                yield cut(tuple(self._val), rows.start, rows.stop)
                continue
            read = self._reader.read(Marks(0, tuple(rows), self._places(rows)))
            bad += read.bad
            if read.num:
                x, y = read.batch
                yield x, y

    def _places(self, rows: range) -> list[int]:
        if self._size == len(self._val):
            return list(rows)
        order = Order(len(self._val), seed=self._seed, epoch=0)
        return cast("list[int]", order.indices(rows.start, rows.stop).tolist())  # pyright: ignore[reportUnknownMemberType]
