"""Metrics: how often the right class is among the first k, and what a batch is like."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from manyhands.compat.fluxdistributed.step import LossFn, call, each, rows_of
from manyhands.core.errors import UsageError

KS = (1, 5, 10)


def topkaccuracy(output: Tensor, labels: Tensor, k: int = 1) -> float:
    """The part of the rows whose class is among the k largest outputs.

    Labels are class ids, or one-hot rows. With fewer classes than k, all of them are looked at. Of
    outputs that are equal, those of smaller ids come first.
    """
    if k < 1:
        raise UsageError(f"top-{k}", hint="at least 1")
    ids = ids_of(output, labels)
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
        labels = labels.argmax(1)
    if labels.dim() != 1 or len(labels) != len(output) or labels.is_floating_point():
        raise UsageError(
            f"{labels.dtype} labels of shape {tuple(labels.shape)} for outputs of shape "
            f"{tuple(output.shape)}",
            hint="one id a row, from 0; or one-hot rows",
        )
    return labels.to(output.device, torch.int64)


def check_classes(output: Any, labels: Any) -> None:  # noqa: ANN401
    """Labels that are ids have a column in the output; `labels` must be in the machine's memory.

    On a GPU torch's own check ends the process.
    """
    if not (isinstance(output, Tensor) and isinstance(labels, Tensor) and output.dim() == 2):
        return
    if labels.dim() == 1 and not labels.is_floating_point() and len(labels):
        largest = int(labels.max())
        if largest >= output.shape[1]:
            raise UsageError(
                f"class {largest}, but the model has {output.shape[1]} outputs",
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
            check_classes(output, y)
            target = each(y, lambda tensor: tensor.to(device))
            rows = rows_of(x)
            made.rows += rows
            made.loss += float(loss(output, target)) * rows
            if _is_ranked(output, target):
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
