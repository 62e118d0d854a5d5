"""Saving: where a training stands, as safetensors and JSON; it goes on from there.

What is saved is one replica, since all are equal: the number of devices may be another one
afterwards, as long as together they have as many rows in a step.
"""

from __future__ import annotations

import logging
import os
from typing import Any, NamedTuple

import msgspec
from torch import Tensor

from manyhands.checkpoint.store import Checkpoint, Store
from manyhands.core.errors import UsageError

log = logging.getLogger(__name__)

Where = str | os.PathLike[str]


class Terms(NamedTuple):
    """What must be the same for a training to go on."""

    size: int  # samples of an epoch
    rows: int  # of all devices in a step
    seed: int


class Standing(msgspec.Struct, kw_only=True):
    """How far a training is."""

    step: int = 0  # the next one
    skipped: int = 0
    pieces: int = 1  # that each device's rows are computed in


class Saved(NamedTuple):
    """A checkpoint that was found."""

    standing: Standing
    tree: Any  # model, optimizer, pace
    place: str


def save(where: Where, terms: Terms, standing: Standing, tree: Any) -> str:  # noqa: ANN401
    """Write it; returns its place. Blocks. Raises CheckpointError."""
    about = {**terms._asdict(), **msgspec.to_builtins(standing)}
    made = Checkpoint(round=standing.step, chain=b"", about=about, tree=tree)
    return Store(where).save(made)


def load(where: Where, terms: Terms) -> Saved | None:
    """The newest one there, None if there is none. Raises UsageError for another training's."""
    found = Store(where).load()
    for broken in found.broken:
        log.warning("%s is passed over: %s", broken.place, broken.reason)
    if found.checkpoint is None or found.place is None:
        return None
    about = dict(found.checkpoint.about)
    try:
        was = Terms(*(about.pop(name) for name in Terms._fields))
        standing = msgspec.convert(about, Standing)
    except (KeyError, msgspec.ValidationError):
        raise UsageError(f"{found.place} is not a checkpoint of this kind of training") from None
    if was != terms:
        raise UsageError(
            f"{found.place} is of a training with {_said(was)}; this one has {_said(terms)}",
            hint="the devices may change, the data, the seed and the rows of a step may not",
        )
    return Saved(standing, found.checkpoint.tree, found.place)


def load_weights(where: Where) -> dict[str, Tensor]:
    """The newest weights that `save=` has left there, for `load_state_dict`. Raises UsageError."""
    found = Store(where).load()
    tree: Any = {} if found.checkpoint is None else found.checkpoint.tree
    if "model" not in tree:
        raise UsageError(
            f"there are no weights in {os.fspath(where)}",
            hint="train(..., save=FOLDER) writes some",
        )
    return tree["model"]


def _said(terms: Terms) -> str:
    return f"{terms.size} samples, {terms.rows} rows a step, seed {terms.seed}"
