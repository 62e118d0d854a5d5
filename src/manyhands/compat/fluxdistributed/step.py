"""Step: what one device does: gradients of its part of the batch, and the optimizer's step.

And how a device says that it has no memory for it, and how it gets some back.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.compat.fluxdistributed.buffer import Buffer, Final, Kept, Slot
from manyhands.core.errors import UsageError
from manyhands.data.memory import is_out_of_memory

LossFn = Callable[[Any, Any], Tensor]
"""Of the model's output and the labels: the mean over the rows."""

T = TypeVar("T")


def train_step(
    loss: LossFn,
    buffer: Buffer,
    slot: int,
    model: nn.Module,
    x: Any,  # noqa: ANN401  (a tensor, or several in a tuple or dict)
    y: Any,  # noqa: ANN401
    *,
    pieces: int = 1,
) -> float:
    """The loss of a batch; its gradients go into the slot, with the number of rows as `count`.

    The batch is on the model's device. With `pieces`, it is taken so many rows at a time, for less
    memory: the same gradient, but for layers that look at several rows at once. If it raises, the
    model is as before.
    """
    before = Kept()
    before.take(model)
    try:
        value = compute(loss, buffer[slot], model, x, y, before, pieces=pieces)
    except BaseException:
        before.restore(model)
        raise
    for parameter in model.parameters():
        parameter.grad = None
    return value


def compute(
    loss: LossFn,
    slot: Slot,
    model: nn.Module,
    x: Any,  # noqa: ANN401
    y: Any,  # noqa: ANN401
    before: Kept,
    *,
    pieces: int,
    check: Callable[[Any, int, int], None] | None = None,
) -> float:
    """As `train_step`, but whoever calls it undoes what came to nothing.

    `check` is shown the output of rows [start, stop) before the loss is.
    """
    rows = rows_of(x)
    total = 0.0
    for parameter in model.parameters():
        parameter.grad = None
    for start, stop in cuts_of(rows, pieces):
        output = call(model, cut(x, start, stop))
        if check is not None:
            check(output, start, stop)
        value = loss(output, labels_for(output, cut(y, start, stop)))
        del output  # the graph goes with the loss
        _check_loss(value)
        part = (stop - start) / rows
        (value if part == 1 else value * part).backward()  # pyright: ignore[reportUnknownMemberType]
        total += float(value.detach()) * part
    slot.mark(model, rows, before)
    return total


def update(optimizer: Optimizer, model: nn.Module, final: Mapping[str, Tensor] | Slot) -> None:
    """The optimizer's step with these gradients, by name; afterwards the model has none.

    A parameter that is not named has no gradient, so the optimizer leaves it as it is. What
    `sync_buffer` returned has the model's buffers, too (BatchNorm's statistics): it gets them.
    """
    if isinstance(final, Slot):
        final.show(model)
    else:
        _give(model, final, final.buffers if isinstance(final, Final) else {})
    optimizer.step()
    for parameter in model.parameters():
        parameter.grad = None


@torch.no_grad()
def _give(model: nn.Module, final: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    names, own = dict(model.named_parameters()), dict(model.named_buffers())
    if odd := sorted((final.keys() - names.keys()) | (buffers.keys() - own.keys())):
        raise UsageError(f"gradients for {odd[0]}, which this model does not have")
    for name, parameter in names.items():
        given = final.get(name)
        parameter.grad = None if given is None else given.to(parameter.device)
    for name, value in buffers.items():
        own[name].copy_(value)


def rows_of(x: Any) -> int:  # noqa: ANN401
    """How many rows a batch has."""
    if isinstance(x, Tensor):
        return len(x)
    if isinstance(x, Mapping):
        return rows_of(next(iter(cast("Mapping[Any, Any]", x).values())))
    if isinstance(x, list | tuple):
        return rows_of(cast("Sequence[Any]", x)[0])
    raise UsageError(
        f"a batch of {type(x).__name__}", hint="tensors, or tuples, lists and dicts of them"
    )


def cuts_of(rows: int, pieces: int) -> list[tuple[int, int]]:
    """At most so many pieces of nearly one size, none of them empty."""
    pieces = min(pieces, rows)
    return [(rows * i // pieces, rows * (i + 1) // pieces) for i in range(pieces)]


def cut(batch: T, start: int, stop: int) -> T:
    """Some rows of it."""
    return each(batch, lambda tensor: tensor[start:stop])


def each(batch: T, act: Callable[[Tensor], Tensor]) -> T:
    """The same with `act` done to every tensor."""
    if isinstance(batch, Tensor):
        return cast("T", act(batch))
    if isinstance(batch, Mapping):
        items = cast("Mapping[Any, Any]", batch).items()
        return cast("T", {key: each(value, act) for key, value in items})
    if isinstance(batch, list | tuple):
        return cast("T", tuple(each(value, act) for value in cast("Sequence[Any]", batch)))
    return batch


def call(model: nn.Module, x: Any) -> Any:  # noqa: ANN401
    """The model's output; of several inputs each is an argument of its own."""
    if isinstance(x, Mapping):
        return model(**x)
    return model(*x) if isinstance(x, list | tuple) else model(x)


def labels_for(output: Any, labels: Any) -> Any:  # noqa: ANN401
    """As losses take them: one-hot rows of integers or truths are made floats like the output.

    Other integers are ids of classes or places in a row, which a loss takes as they are.
    """
    if not (isinstance(output, Tensor) and isinstance(labels, Tensor)):
        return labels
    if output.dim() < 2 or labels.shape != output.shape or labels.is_floating_point():
        return labels
    hot = labels.dtype is torch.bool or bool(((labels == 0) | (labels == 1)).all())
    return labels.to(output.dtype) if hot else labels


def check_reduction(loss: LossFn) -> None:
    """Devices are put together by their numbers of rows. Raises UsageError for another loss."""
    reduction = getattr(loss, "reduction", "mean")
    if reduction != "mean":
        raise UsageError(
            f"a loss with reduction={reduction!r}",
            hint='what devices compute is weighed by their rows: use reduction="mean"',
        )


def _check_loss(value: Any) -> None:  # noqa: ANN401
    if not isinstance(value, Tensor) or value.dim():
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise UsageError(
            f"the loss of a batch is {shape}, not one number",
            hint="return the mean over the rows, as torch's losses do by default",
        )
    if not value.requires_grad and torch.is_grad_enabled():
        raise UsageError(
            "the loss does not depend on any parameter that is trained",
            hint="is everything frozen (requires_grad=False), or detached?",
        )


# -- memory -----------------------------------------------------------------------------------


def give_back(device: torch.device) -> None:
    """Return what nothing refers to any more to the device."""
    gc.collect()
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()


def is_short(act: Callable[[], object]) -> bool:
    """Whether memory ran out while it was done; what else it raises is raised."""
    try:
        act()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return True
    return False
