"""Metrics: how often the right class is among the first k, and the evaluation of a replica.

score      one device's rows
Judge      those of all devices, each of which computes its share
showpreds  what a model takes each sample for, printed
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO, cast

import torch
from torch import Tensor, nn
from torch.nn import CrossEntropyLoss, NLLLoss
from torch.nn.functional import cross_entropy, nll_loss

from manyhands.compat.fluxdistributed.feed import Bad, share_of
from manyhands.compat.fluxdistributed.step import (
    LossFn,
    call,
    cut,
    each,
    give_back,
    labels_for,
    rows_of,
)
from manyhands.core.errors import UsageError
from manyhands.data.fetch import Marks
from manyhands.data.memory import is_out_of_memory
from manyhands.data.order import Order
from manyhands.data.quarantine import Rules
from manyhands.data.reader import Reader
from manyhands.data.source import Source
from manyhands.data.table import BadSample
from manyhands.stages.carrier import Carrier

log = logging.getLogger(__name__)

KS = (1, 5, 10)
MARK = "✅"


def topkaccuracy(output: Tensor, labels: Tensor, k: int = 1) -> float:
    """The part of the rows whose class is among the k largest outputs.

    Labels are class ids, or one-hot rows. With fewer classes than k, all of them are looked at. Of
    outputs that are equal, those of smaller ids come first.
    """
    if k < 1:
        raise UsageError(f"top-{k}", hint="at least 1")
    ids = ids_of(output, labels)
    check_classes(output, ids, ranked=True)
    return float(hits(output, ids, k)) / max(1, len(ids))


def hits(output: Tensor, ids: Tensor, k: int) -> Tensor:
    """In how many rows the class is among the first k; not synchronised with the device."""
    own = output.gather(1, ids[:, None])
    classes = torch.arange(output.shape[1], device=output.device)
    # Counted rather than sorted: torch's topk may take any of equal values, and not the same ones
    # on every device. A NaN is ahead of nothing, and whatever is compared with it is behind it.
    ahead = (output > own) | ((output == own) & (classes < ids[:, None]))
    return ((ahead.sum(1) < k) & ~own[:, 0].isnan()).sum()


def ids_of(output: Tensor, labels: Tensor) -> Tensor:
    """Labels as class ids on the output's device. Raises UsageError for others than of `output`."""
    if output.dim() != 2:
        raise UsageError(
            f"outputs of shape {tuple(output.shape)}", hint="one row a sample, one column a class"
        )
    if labels.dim() == 2 and labels.shape == output.shape:
        labels = (labels.int() if labels.dtype is torch.bool else labels).argmax(1)
    if labels.dim() != 1 or len(labels) != len(output) or labels.is_floating_point():
        raise UsageError(
            f"{labels.dtype} labels of shape {tuple(labels.shape)} for outputs of shape "
            f"{tuple(output.shape)}",
            hint="one id a row, from 0; or one-hot rows",
        )
    return labels.to(output.device, torch.int64)


def is_of_classes(loss: object) -> bool:
    """Whether whole numbers are classes to this loss, however many outputs there are."""
    functions = (cross_entropy, nll_loss)
    return any(loss is one for one in functions) or isinstance(loss, CrossEntropyLoss | NLLLoss)


def check_classes(
    output: Any,  # noqa: ANN401
    labels: Any,  # noqa: ANN401
    *,
    ranked: bool = False,
    of_classes: bool = False,
) -> None:
    """Labels that are ids have a column in the output; they had better be in the machine's memory.

    On a GPU torch's own check ends the process. For a loss a negative one may mean something
    (ignore_index), and one column is a number, no class, unless the loss is `of_classes`; `ranked`
    have neither.
    """
    if not (isinstance(output, Tensor) and isinstance(labels, Tensor) and output.dim() == 2):
        return
    if output.shape[1] == 1 and not (ranked or of_classes):
        return
    if labels.dim() == 1 and not labels.is_floating_point() and len(labels):
        least = int(labels.min()) if ranked else 0
        largest = int(labels.max())
        if least < 0 or largest >= output.shape[1]:
            wrong = least if least < 0 else largest
            raise UsageError(
                f"class {wrong}, but the model has {output.shape[1]} outputs",
                hint="ids count from 0 and are not renumbered: give the model an output for each "
                "class, or other classes to prepare_training",
            )


@dataclass(kw_only=True)
class Score:
    """Sums over the rows of an evaluation; scores of several devices are added up."""

    rows: float = 0.0
    loss: float = 0.0
    ranked: float = 0.0
    """Rows whose output is one value a class."""
    bad: float = 0.0
    """Samples that could not be read."""
    hits: list[float]
    """For each k, the rows whose class is among the first k."""

    def means(self, tag: str, ks: Sequence[int]) -> dict[str, float]:
        """`val/loss`, `val/top1`, ...: without top-k where outputs are no classes."""
        found = {f"{tag}/loss": self.loss / self.rows} if self.rows else {}
        if self.ranked:
            found |= {
                f"{tag}/top{k}": hit / self.ranked for k, hit in zip(ks, self.hits, strict=True)
            }
        return found | ({f"{tag}/bad": self.bad} if self.bad else {})


@torch.no_grad()
def score(
    loss: LossFn,
    model: nn.Module,
    batches: Iterable[tuple[Any, Any]],
    device: torch.device,
    ks: Sequence[int],
) -> Score:
    """In eval mode, one forward for each batch; the model's mode is as before afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    made = Score(hits=[0.0] * len(ks))
    try:
        for x, y in batches:
            output = call(model, each(x, lambda tensor: tensor.to(device)))
            ranked = _is_ranked(output, y)
            if ranked:
                check_classes(output, y, ranked=True)
            target = each(y, lambda tensor: tensor.to(device))
            rows = rows_of(x)
            made.rows += rows
            made.loss += float(loss(output, labels_for(output, target))) * rows
            if ranked:
                made.ranked += rows
                ids = ids_of(output, target)
                for place, k in enumerate(ks):
                    made.hits[place] += float(hits(output, ids, k))
    finally:
        for module, training in modes.items():
            module.training = training
    return made


def _is_ranked(output: Any, target: Any) -> bool:  # noqa: ANN401
    if not isinstance(output, Tensor) or not isinstance(target, Tensor) or output.dim() != 2:
        return False
    if output.shape[1] == 1:  # a number, whatever its labels are
        return False
    if target.shape == output.shape:  # one-hot; else a regression
        return bool(((target == 0) | (target == 1)).all() and (target.sum(1) == 1).all())
    return target.dim() == 1 and not target.is_floating_point()


def log_loss_and_acc(
    loss: LossFn,
    model: nn.Module,
    val: tuple[Any, Any] | Iterable[tuple[Any, Any]],
    tag: str = "val",
    *,
    k: Sequence[int] = KS,
    step: int = 0,
    log: Callable[[Mapping[str, float], int], None] | None = None,
) -> dict[str, float]:
    """Loss and top-k of a batch, or of several, where the model is; logged, and returned by name
    (`val/top5`).

    They go to `log(metrics, step)`, else to the logger of `with_logger`, else to the console. In a
    block of `with_logger` no step goes back: one that would is the next after the last row there.
    """
    from manyhands.compat.fluxdistributed.logs import current_log

    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    batches = [cast("tuple[Any, Any]", val)] if is_batch(val) else val
    metrics = score(loss, model, cast("Any", batches), device, k).means(tag, k)
    (log or current_log())(metrics, step)
    return metrics


def is_batch(val: Any) -> bool:  # noqa: ANN401
    """Whether it is one batch, (x, y), and not a table or an iterable of batches."""
    if not isinstance(val, tuple | list) or len(cast("Sequence[Any]", val)) != 2:
        return False
    x, y = cast("Sequence[Any]", val)
    return not (isinstance(x, tuple | list) and isinstance(y, tuple | list))


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
            bad += [bad_one.error for bad_one in read.bad]
            if read.num:
                x, y = read.batch
                yield x, y

    def _places(self, rows: range) -> list[int]:
        if self._size == len(self._val):
            return list(rows)
        order = Order(len(self._val), seed=self._seed, epoch=0)
        return cast("list[int]", order.indices(rows.start, rows.stop).tolist())  # pyright: ignore[reportUnknownMemberType]


def showpreds(
    output: Tensor,
    labels: Tensor,
    names: Sequence[Any] | None = None,
    *,
    k: int = 5,
    file: TextIO | None = None,
) -> None:
    """Print the k largest classes of each row, with what the softmax gives them.

    `labels` are ids or one-hot rows; `names` is what `labels(tree)` gives, or a list of texts.
    Where the right class is not among the first k, it is named below them.
    """
    found = ids_of(output, labels)
    check_classes(output, found, ranked=True)
    ids = _list(found)
    if names is not None and len(names) < output.shape[1]:
        raise UsageError(f"{len(names)} names for {output.shape[1]} classes")
    stream = file or sys.stdout
    chances = output.detach().float().softmax(1).cpu()
    order = torch.argsort(chances, dim=1, descending=True, stable=True)
    for row, right in enumerate(ids):
        stream.write(f"sample {row}\n")
        places = _list(order[row, :k])
        for place in places:
            mark = f"  {MARK}" if place == right else ""
            stream.write(f"  {float(chances[row, place]):6.1%}  {_name(names, place)}{mark}\n")
        if right not in places:
            stream.write(f"  it is {_name(names, right)}: {float(chances[row, right]):.1%}\n")


def _list(ids: Tensor) -> list[int]:
    return cast("list[int]", ids.tolist())  # pyright: ignore[reportUnknownMemberType]


def _name(names: Sequence[Any] | None, place: int) -> str:
    if names is None:
        return f"class {place}"
    name = names[place]
    return name if isinstance(name, str) else str(name.description)
