"""Entries: what of a model's state each worker has."""

from __future__ import annotations

from collections.abc import Sequence

from manyhands.compat.bossman.errors import WorkerFailed
from manyhands.core.plan import Stage
from manyhands.stages import commands as words


def entries_of(
    worker: str, answer: words.Answer, stages: Sequence[Stage]
) -> tuple[words.Entry, ...]:
    """What a worker says that it has, if it is of its own layers. Raises WorkerFailed."""
    entries = answer.entries if isinstance(answer, words.Done) else ()
    keys = {(entry.layer, entry.name) for entry in entries}
    own = {index for stage in stages for index in range(stage.first, stage.end)}
    if len(keys) < len(entries) or any(layer not in own for layer, _ in keys):
        raise WorkerFailed(worker, "it says that it has the state of layers that are not its own")
    return entries


def key_of(entry: words.Entry) -> str:
    """As the whole model's state dict names it."""
    return f"{entry.layer - 1}.{entry.name}"  # the boss's own layer is before the model's first
