"""Saving: where a training stands, as safetensors and JSON; it goes on from there.

What is saved is one replica, since all are equal: the number of devices may be another one
afterwards, as long as together they have as many rows in a step.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
from torch import Tensor

from manyhands.checkpoint.store import Checkpoint, Store
from manyhands.core.errors import CheckpointError, UsageError

log = logging.getLogger(__name__)

Where = str | os.PathLike[str]


class Terms(NamedTuple):
    """What must be the same for a training to go on."""

    size: int  # samples of an epoch
    rows: int  # of all devices in a step
    seed: int
    drop_last: bool = False  # the last rows of an epoch, if they fill no step


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


def find(resume: Where | bool | None, where: Where | None, terms: Terms) -> Saved | None:
    """The checkpoint to go on from; `where` is where the training saves its own.

    Raises UsageError if one was named that is not there, or is another training's, and if what is
    saved would be mixed with another training's; CheckpointError if none of them can be read.
    """
    if resume is True:
        if where is None:
            raise UsageError("resume=True without save", hint="resume=FOLDER, or save=FOLDER too")
        return load(where, terms)
    found = None
    if resume is not None and resume is not False:
        found = load(resume, terms)
        if found is None:
            raise UsageError(
                f"there is no checkpoint in {resume}", hint="save=... writes some there"
            )
        if where is not None and os.fspath(resume) == os.fspath(where):
            return found
    if where is not None:
        _check_free(where, 0 if found is None else found.standing.step)
    return found


def load(where: Where, terms: Terms) -> Saved | None:
    """The newest one there, None if there is none.

    Raises UsageError for another training's, CheckpointError if there are some and all are broken.
    """
    store = Store(where)
    found = store.load()
    for broken in found.broken:
        log.warning("%s is passed over: %s", broken.place, broken.reason)
    if found.checkpoint is None or found.place is None:
        # One that was never written to its end is as good as none: its training goes on from there.
        if found.broken and any(place.complete for place in store.places()):
            raise CheckpointError(
                f"of the checkpoints in {os.fspath(where)} none can be read: "
                f"{found.broken[0].place}: {found.broken[0].reason}",
                hint="mend them; or to begin anew, save to another folder or remove them",
            )
        return None
    about = dict(found.checkpoint.about)
    try:
        size, rows, seed = (about.pop(name) for name in ("size", "rows", "seed"))
        was = Terms(size, rows, seed, about.pop("drop_last", False))
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


def _check_free(where: Where, step: int) -> None:
    """No later step is saved there: the newest is that of the last step, whoever has written it."""
    rounds: list[int] = []
    with suppress(CheckpointError):  # what cannot be listed is told when something is saved
        rounds = [place.round for place in Store(where).places() if place.complete]
    if rounds and max(rounds) > step:
        raise UsageError(
            f"{os.fspath(where)} has checkpoints of an earlier training, up to step {max(rounds)}, "
            "which would be taken for this one's",
            hint="resume=True goes on from there; else save to another folder, or remove them",
        )


def _said(terms: Terms) -> str:
    text = f"{terms.size} samples, {terms.rows} rows a step, seed {terms.seed}"
    return f"{text}, drop_last" if terms.drop_last else text
