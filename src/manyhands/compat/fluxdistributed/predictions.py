"""Predictions, printed: what a model takes each sample for, with a mark at the right class."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TextIO, cast

import torch
from torch import Tensor

from manyhands.compat.fluxdistributed.metrics import ids_of
from manyhands.core.errors import UsageError

MARK = "✅"


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
    ids = _list(ids_of(output, labels))
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
